"""The real model of speech of benchmarks, examples and tests: OpenAI's Whisper base.

`python -m benchmarks.whisper_base` fetches and converts it. `get` is for who needs its folders.
"""
