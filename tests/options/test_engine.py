"""Options of one engine."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_trie.options import EngineOptions
from vllm_trie.options.parts import Sampling, Speculating


def test_defaults_hold_without_an_entry() -> None:
    assert EngineOptions.from_additional_config(None) == EngineOptions()
    assert EngineOptions.from_additional_config({"somebody_else": 1}) == EngineOptions()


def test_options_are_read() -> None:
    assert EngineOptions.from_additional_config({"trie_beam": {"reclaim_interval": 3}}).reclaim_interval == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reclaim_interval": 0}, "trie_beam.reclaim_interval=0"),
        ({"reclaim_interval": 1.5}, "trie_beam.reclaim_interval=1.5"),
        ({"reclaim_interval": True}, "trie_beam.reclaim_interval=True"),
        ({"max_beam_width": 0}, "trie_beam.max_beam_width=0"),
        ({"max_beam_width": "8"}, "trie_beam.max_beam_width='8'"),
        ({"semantics": "tf"}, "trie_beam.semantics='tf' is unknown; known: 'hf', 'vllm'"),
        ({"check_invariants": "yes"}, "trie_beam.check_invariants='yes'"),
        ({"debug_rank_check": 1}, "trie_beam.debug_rank_check=1 is neither true nor false"),
        ({"speculation": "on"}, "trie_beam.speculation='on' is unknown; known: 'auto', 'exact', 'sample', 'off'"),
        ({"speculation": True}, "trie_beam.speculation=True is unknown"),
        ({"do_sample": 1}, "trie_beam.do_sample=1 is neither true nor false"),
        ({"replacement": "yes"}, "trie_beam.replacement='yes' is neither true nor false"),
        ({"memory_mode": 0}, "trie_beam.memory_mode=0 is neither true nor false"),
        ({"draft_width": 0}, "trie_beam.draft_width=0 is not a number of beams"),
        ({"min_width": True}, "trie_beam.min_width=True is not a number of beams"),
        ({"min_width": 1.5}, "trie_beam.min_width=1.5 is not a number of beams"),
        ({"threshold": 0}, r"trie_beam.threshold=0 is not a probability; pass a number in \(0, 1\]"),
        ({"threshold": 70}, "trie_beam.threshold=70 is not a probability"),
        (
            {"do_sample": True, "speculation": "exact"},
            'trie_beam.do_sample=True is not supported together with trie_beam.speculation="exact", which takes the '
            'best; use speculation="sample"',
        ),
        (
            {"do_sample": False, "speculation": "sample"},
            'trie_beam.do_sample=False is not supported together with trie_beam.speculation="sample", which samples '
            'beams; use speculation="exact"',
        ),
        ({"draft_widht": 8}, "unknown option trie_beam.draft_widht; did you mean draft_width?"),
        ({"do_sampel": True}, "unknown option trie_beam.do_sampel; did you mean do_sample?"),
        ({"vllm_check": "of"}, "trie_beam.vllm_check='of' is unknown; known: 'strict', 'warn', 'off'"),
        ({"reclaim_intervall": 3}, "did you mean reclaim_interval"),
        ({"zzz": 3}, "known: do_sample, .*, reclaim_interval, max_beam_width, semantics, check_invariants"),
        (["reclaim_interval"], "is not a mapping"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions.from_additional_config({"trie_beam": options})


def test_what_requests_get_that_say_nothing_of_speculation() -> None:
    said = {"speculation": "sample", "do_sample": True, "replacement": True, "memory_mode": True}
    said |= {"draft_width": 8, "min_width": 2, "threshold": 0.7}
    assert said.keys() == {*Sampling.model_fields, *Speculating.model_fields}
    for one in (said, *({name: value} for name, value in said.items())):  # each alone too: requests may say the rest
        assert EngineOptions.from_additional_config({"trie_beam": one}) == EngineOptions(**one)
        assert vars(EngineOptions(**one)) == vars(EngineOptions()) | one
