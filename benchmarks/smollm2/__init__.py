"""The real model of the demo, the benchmarks and the tests: SmolLM2-135M-Instruct, and a draft model for it.

`python -m benchmarks.smollm2` (`make model`) fetches and converts it. `get` is for who needs its folders, `distill` for
who would train the draft model again.
"""
