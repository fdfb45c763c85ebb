"""Engine-wide options are checked by name and value."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_trie.config import TrieBeamConfig


def test_defaults_hold_without_an_entry() -> None:
    assert TrieBeamConfig.from_additional_config(None) == TrieBeamConfig()
    assert TrieBeamConfig.from_additional_config({"somebody_else": 1}) == TrieBeamConfig()


def test_options_are_read() -> None:
    assert TrieBeamConfig.from_additional_config({"trie_beam": {"reclaim_interval": 3}}).reclaim_interval == 3


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
        ({"reclaim_intervall": 3}, "did you mean reclaim_interval"),
        ({"zzz": 3}, "known: reclaim_interval, max_beam_width, semantics, check_invariants"),
        (["reclaim_interval"], "is not a mapping"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrieBeamConfig.from_additional_config({"trie_beam": options})
