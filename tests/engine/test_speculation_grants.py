"""What is granted to a search suffices to speculate with, to the row and the token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Engines
from tests.engine.test_preemption import run
from tests.engine.test_scheduling import prompt_of
from tests.engine.test_speculation import NOISE, Pair, speculating
from vllm_trie import beam_params

LEAST: list[tuple[dict[str, Any], int, int]] = [  # what is asked for, and the fewest rows and tokens of use to it
    ({"beam_width": 1}, 0, 1),
    ({"beam_width": 2}, 0, 1),
    ({"beam_width": 2, "prune_relative": 1e-9}, 0, 2),
    ({"beam_width": 2, "semantics": "vllm"}, 0, 2),
    ({"beam_width": 2, "semantics": "tridecode"}, 0, 1),
    ({"beam_width": 1, "speculation": "sample", "seed": 1}, 0, 1),
    ({"beam_width": 3, "speculation": "sample", "seed": 1}, 2, 5),
    ({"beam_width": 3, "speculation": "sample", "seed": 1, "memory_mode": True}, 2, 5),
]


@pytest.mark.parametrize(("options", "rows", "tokens"), LEAST)
def test_nothing_is_lent_or_drafted_with_less_than_the_least_of_use(
    engines: Engines,
    random_pair: Callable[[str, float], Pair],
    options: dict,
    rows: int,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), 4)
    share_out = engine.scheduler._grants.share_out
    jobs = [(prompt_of(length), beam_params(**options, max_tokens=60, ignore_eos=True)) for length in (20, 21, 22)]

    def counts(spare_rows: int, spare_tokens: int) -> dict[str, int]:
        """Of all searches, one at a time."""
        monkeypatch.setattr(
            engine.scheduler._grants, "share_out", lambda eager, *_: share_out(eager, spare_rows, spare_tokens)
        )
        outputs = [run(engine, [(prompt, params.clone())], lambda: None)[0] for prompt, params in jobs]
        told = [output.kv_transfer_params["trie_beam"] for output in outputs]
        return {name: sum(one[name] for one in told) for name in ("drafted", "steps", "target_forwards")}

    least = counts(rows, tokens)
    assert least["steps"] > least["target_forwards"], "so little is of no use"
    assert counts(rows, tokens - 1)["drafted"] == 0
    if rows > 0:
        assert counts(rows - 1, 100)["drafted"] == 0
