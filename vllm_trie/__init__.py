"""Beam search inside vLLM's engine."""

from vllm_trie.entrypoints.beam_params import beam_params
from vllm_trie.options import BeamParams

__all__ = ["BeamParams", "beam_params"]
__version__ = "0.1.0"
