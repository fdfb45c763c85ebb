"""Beam search inside vLLM's engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_trie.params import BeamParams, beam_params

__all__ = ["BeamParams", "beam_params"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`__all__`, on first use: vLLM imports this package in every process, and `python -m vllm_trie` without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm_trie.params

    return getattr(vllm_trie.params, name)
