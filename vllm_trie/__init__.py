"""Beam search inside vLLM's engine."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_trie.entrypoints.beam_params import beam_params
    from vllm_trie.options import BeamParams

__all__ = ["BeamParams", "beam_params"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`__all__`, on first use: vLLM imports this package in every process, and `python -m vllm_trie` without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm_trie.entrypoints.beam_params as defining  # which imports BeamParams, too

    return getattr(defining, name)
