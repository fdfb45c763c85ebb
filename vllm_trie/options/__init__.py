"""All options of beam search: the name, type, range, default and meaning of each, and what it goes with.

From this table come the checks of requests (`BeamParams`, `StepParams`) and of engines (`TrieBeamConfig`), the
signature of `vllm_trie.beam_params`, and the tables of docs/options.md.
"""

from vllm_trie.options.engine import PLUGIN_NAME, TrieBeamConfig
from vllm_trie.options.request import OPTIONS, BeamParams, StepParams, asks_for_beams, parse_options

__all__ = ["OPTIONS", "PLUGIN_NAME", "BeamParams", "StepParams", "TrieBeamConfig", "asks_for_beams", "parse_options"]
