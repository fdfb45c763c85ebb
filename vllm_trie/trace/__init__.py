"""The search itself, as `trace=True` returns it: lists to walk, and a page to look at."""

from vllm_trie.trace.trace import Forest, Trace

__all__ = ["Forest", "Trace"]
