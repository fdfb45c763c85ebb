"""Beam search inside vLLM's engine."""

from vllm_trie.params import BeamParams, beam_params

__all__ = ["BeamParams", "beam_params"]
__version__ = "0.1.0"
