"""All options of beam search: the name, type, range, default and meaning of each, and what it goes with.

From this table come the checks of requests (`BeamParams`, `StepParams`) and of engines (`TrieBeamConfig`), the
signature of `vllm_trie.beam_params`, and the tables of docs/options.md.
"""

from vllm_trie.options.engine import PLUGIN_NAME, TrieBeamConfig
from vllm_trie.options.matrix import FIELDS, OF_HF, refuse
from vllm_trie.options.parts import NO_SCORER
from vllm_trie.options.request import (
    OPTIONS,
    BeamParams,
    SearchParams,
    StepParams,
    asks_for_beams,
    parse_options,
    refuse_other_names,
    search_params,
)
from vllm_trie.options.resolve import resolve
from vllm_trie.options.speculation import Drafts, check_drafts
from vllm_trie.options.table import choices, cure

__all__ = [
    "FIELDS",
    "NO_SCORER",
    "OF_HF",
    "OPTIONS",
    "PLUGIN_NAME",
    "BeamParams",
    "Drafts",
    "SearchParams",
    "StepParams",
    "TrieBeamConfig",
    "asks_for_beams",
    "check_drafts",
    "choices",
    "cure",
    "parse_options",
    "refuse",
    "refuse_other_names",
    "resolve",
    "search_params",
]
