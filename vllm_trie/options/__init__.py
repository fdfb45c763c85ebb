"""All options of beam search: the name, type, range, default and meaning of each, and which combinations are refused.

From this table come the checks of requests (`BeamParams`, `StepOptions`) and of engines (`EngineOptions`), the
signature of `vllm_trie.beam_params`, and the tables of docs/options.md.
"""

from vllm_trie.options.engine import PLUGIN_NAME, EngineOptions
from vllm_trie.options.request import OPTIONS, BeamParams, StepOptions, options_ask_for_beams, parse_options

__all__ = [
    "OPTIONS",
    "PLUGIN_NAME",
    "BeamParams",
    "EngineOptions",
    "StepOptions",
    "options_ask_for_beams",
    "parse_options",
]
