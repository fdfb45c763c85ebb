"""Speculation (DSBD): forests of drafts, of which one forward of the target makes several steps of a search.

The core imports nothing from here. An engine that has a draft model, an EAGLE-3 head or n-grams to draft by finds at
its start what fills in its two seams: `vllm_trie.worker.speculation` and `vllm_trie.engine.speculation`.
"""
