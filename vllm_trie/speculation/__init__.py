"""Speculation (DSBD): forests of drafts, which let one forward pass of the target make several steps of a search.

The core imports nothing from here. An engine with a draft model, an EAGLE-3 head or n-gram drafting plugs it in at
startup, at two seams: `vllm_trie.worker.speculation` and `vllm_trie.engine.speculation`.
"""
