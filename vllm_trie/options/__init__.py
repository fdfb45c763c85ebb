"""All options of beam search: the name, type, range, default and meaning of each, and what it goes with.

From this table come the checks of requests (`BeamParams`) and of engines (`TrieBeamConfig`), the signature of
`vllm_trie.beam_params`, and the tables of docs/options.md.
"""

from vllm_trie.options.engine import PLUGIN_NAME, TrieBeamConfig
from vllm_trie.options.other_names import OTHER_NAMES, did_you_mean, meant_by
from vllm_trie.options.request import NO_SCORER, BeamParams, asks_for_beams, refuse_other_names
from vllm_trie.options.resolve import resolve
from vllm_trie.options.speculation import Drafts, SpeculationOptions, check_drafts
from vllm_trie.options.table import about, choices

__all__ = [
    "NO_SCORER",
    "OTHER_NAMES",
    "PLUGIN_NAME",
    "BeamParams",
    "Drafts",
    "SpeculationOptions",
    "TrieBeamConfig",
    "about",
    "asks_for_beams",
    "check_drafts",
    "choices",
    "did_you_mean",
    "meant_by",
    "refuse_other_names",
    "resolve",
]
