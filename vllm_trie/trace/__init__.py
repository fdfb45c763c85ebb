"""Reads and draws the search that `trace=True` returns."""

from vllm_trie.trace.trace import Forest, Trace

__all__ = ["Forest", "Trace"]
