"""Searches that no forest follows, beside speculation: they take plain steps, and find the same."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Engines
from tests.support.grammars import structured
from tests.support.items import random_items
from tests.support.trained_pair import held_out, search, tokens, trained_pair

pytestmark = pytest.mark.slow

ITEMS = [[*item] for item in random_items(300, [2, 4, 6])]
DRAWN = {"do_sample": True, "seed": 1}
SEARCHES: dict[str, dict[str, Any]] = {
    "groups": {"num_beam_groups": 2, "diversity_penalty": 0.7},
    "groups along items": {"num_beam_groups": 2, "diversity_penalty": 0.7, "allowed_sequences": ITEMS},
    "widths": {"width": 4, "beam_widths": [2, 4, 3]},
    "stochastic": DRAWN | {"stochastic": True},
    "grammar": {"structured_outputs": structured("regex"), "ignore_eos": False},
    "grammar and draws": DRAWN | {"structured_outputs": structured("regex"), "ignore_eos": False},
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_that_asks_to_speculate_finds_what_it_finds_without(engines: Engines, name: str) -> None:
    engine, prompts = trained_pair(engines), held_out()[:2]
    options = {"width": 4, **SEARCHES[name]}
    plain = search(engine, prompts, **options, speculation="off")
    for asked in ({"speculation": "sample" if "seed" in options else "exact"}, {"speculation": "auto"}, {}):
        for own in (asked, asked | {"draft_width": 8}):
            found = search(engine, prompts, **options, **own)
            assert tokens(found) == tokens(plain)
            if name != "groups along items":  # which have ids
                assert [output.kv_transfer_params for output in found] == [None, None]
            assert not any("steps_per_forward" in str(output.kv_transfer_params) for output in found)
