"""Beam search inside vLLM's engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_trie.entrypoints.answers.compact import Hypotheses, hypotheses
    from vllm_trie.entrypoints.requests.beam_params import beam_params
    from vllm_trie.entrypoints.server.catalog_api import load_catalog, load_item_list
    from vllm_trie.options import BeamParams
    from vllm_trie.reranking.metrics import HypothesisPair
    from vllm_trie.step_search.scorers import StepCandidate
    from vllm_trie.trace import Trace

__all__ = [
    "BeamParams",
    "Hypotheses",
    "HypothesisPair",
    "StepCandidate",
    "Trace",
    "beam_params",
    "hypotheses",
    "load_catalog",
    "load_item_list",
]
__version__ = "0.1.0"

_HOMES = {
    "BeamParams": "vllm_trie.options",
    "Hypotheses": "vllm_trie.entrypoints.answers.compact",
    "HypothesisPair": "vllm_trie.reranking.metrics",
    "Trace": "vllm_trie.trace",
    "StepCandidate": "vllm_trie.step_search.scorers",
    "beam_params": "vllm_trie.entrypoints.requests.beam_params",
    "hypotheses": "vllm_trie.entrypoints.answers.compact",
    "load_catalog": "vllm_trie.entrypoints.server.catalog_api",
    "load_item_list": "vllm_trie.entrypoints.server.catalog_api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `python -m vllm_trie` imports this package where torch may be missing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
