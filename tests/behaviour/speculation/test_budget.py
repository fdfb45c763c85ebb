"""What budget a search is given suffices to speculate with, to the token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.engine import Engines
from tests.support.pairs import NOISE, Pair, speculating
from tests.support.running import prompt_of, run
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.engine.speculation import DraftingCandidate

pytestmark = pytest.mark.slow

LEAST: dict[str, tuple[dict[str, Any], int]] = {  # what is asked for, and the fewest tokens of use to it
    "one beam": ({"beam_width": 1}, 1),
    "beams": ({"beam_width": 2}, 1),
    "pruned": ({"beam_width": 2, "prune_relative": 1e-9}, 2),
    "vllm": ({"beam_width": 2, "semantics": "vllm"}, 2),
    "tridecode": ({"beam_width": 2, "semantics": "tridecode"}, 1),
    "one is sampled": ({"beam_width": 1, "speculation": "sample", "seed": 1}, 1),
    "sampled": ({"beam_width": 3, "speculation": "sample", "seed": 1}, 3),
    "memory": ({"beam_width": 3, "speculation": "sample", "seed": 1, "memory_mode": True}, 3),
}


@pytest.mark.parametrize("least", sweep(LEAST, "beams", "pruned", "sampled"))
def test_the_least_of_use_is_given_and_nothing_less(
    engines: Engines,
    random_pair: Callable[[str, float], Pair],
    least: tuple[dict[str, Any], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = speculating(engines, random_pair("gqa", NOISE), 4)
    share_out, (own, tokens) = engine.scheduler._budgets.share_out, least
    options = {"speculation": "exact", "max_tokens": 40, "ignore_eos": True} | own
    jobs = [(prompt_of(length), beam_params(**options)) for length in (20, 21)]

    def searched(spare_tokens: int) -> tuple[int, int]:
        """How often searches, one at a time, were given a budget, and how many forwards they saved by it."""
        num_budgets = 0

        def share(candidates: Sequence[DraftingCandidate], output: Any, num_tokens: int, _: int, num_rows: int) -> None:
            nonlocal num_budgets
            share_out(candidates, output, num_tokens, spare_tokens, num_rows)
            num_budgets += sum(one.step.budget is not None for one in candidates)

        monkeypatch.setattr(engine.scheduler._budgets, "share_out", share)
        outputs = [run(engine, [(prompt, params.clone())])[0] for prompt, params in jobs]
        answers = [output.kv_transfer_params["trie_beam"] for output in outputs]
        return num_budgets, sum(one["steps"] - one["target_forwards"] for one in answers)

    num_budgets, num_saved = searched(tokens)
    assert num_budgets > 0
    assert num_saved > 0, "so little is of no use"
    assert searched(tokens - 1) == (0, 0)
