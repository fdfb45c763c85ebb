"""The search never waits for its device: it runs on tensors without content, and uploads nothing a second time."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.support.steps import rules_of
from vllm_trie.search import gumbel, sampling
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints import stops
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchInputs, SearchRules, SearchStrategy
from vllm_trie.search.step import (
    joint_search_distribution,
    reported_search_step,
    take_packed_search_step,
    take_search_step,
)
from vllm_trie.search.step_result import next_search_beams, pack_search_step
from vllm_trie.search.strategies import sampled
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy, take_strategy_cells
from vllm_trie.search.strategies.sampled import RowSamplingStrategy
from vllm_trie.search.strategies.stochastic import StochasticStrategy

NOWHERE = torch.device("meta")
WIDTH = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "controlled": {"is_controlled": True},
    "masked": {"are_barred": True},
    "last": {"is_last": True},
    "log-probabilities": {"num_logprobs": 3},
    "filters": {"filters": SearchFilters(0.7, 0.1, 20, 0.9)},
    "pruning": {"pruning": SearchPruning(0.1, 2.0, 0.1, 2)},
    "sampled": {"strategy": RowSamplingStrategy(), "filters": SearchFilters(0.7, 0.1, 20, 0.9)},
    "jointly sampled": {
        "strategy": JointSamplingStrategy(False, 1, None, False),
        "filters": SearchFilters(0.7, 0.1, 20, 0.9),
    },
    "jointly sampled with replacement": {"strategy": JointSamplingStrategy(True, 1, None, False), "num_logprobs": 3},
    "sampled as whole hypotheses": {"strategy": StochasticStrategy(), "filters": SearchFilters(0.7, 0.1, 20, 0.9)},
    "sampled as whole hypotheses, with log-probabilities": {"strategy": StochasticStrategy(), "num_logprobs": 3},
    "n-grams": {"constraints": (NGramConstraint(2),)},
    "n-grams, jointly sampled": {
        "strategy": JointSamplingStrategy(False, 1, None, False),
        "constraints": (NGramConstraint(1),),
    },
    "groups": {"strategy": DiverseGroupsStrategy(2, 0.5, 1), "filters": SearchFilters(0.7, 0.1, 20, 0.9)},
    "groups, of which one is done": {"strategy": DiverseGroupsStrategy(2, 0.5, 1, (0,)), "num_logprobs": 3},
    "jointly sampled and one kept": {"strategy": JointSamplingStrategy(False, 1, None, True), "num_logprobs": 3},
}


def step(rules: SearchRules, num_groups: int, num_rows: int, vocab_size: int) -> tuple[torch.Size, Any]:
    logits = torch.empty(num_groups, num_rows, vocab_size, dtype=torch.bfloat16, device=NOWHERE)
    scores = torch.empty(num_groups, num_rows, device=NOWHERE)
    histories = torch.empty(num_groups, num_rows, 20, dtype=torch.int32, device=NOWHERE)
    states = dict.fromkeys(rules.constraints, histories)
    beams, draws = SearchBeams(scores, scores, states), [(0, group) for group in range(num_groups)]
    taken = take_packed_search_step(rules, logits, beams, SearchInputs(draws))
    return taken.words.shape, taken.layout


@pytest.fixture(autouse=True)
def _no_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gumbel, sampling):
        monkeypatch.setattr(
            module, "search_generator_on_device", lambda *_: None
        )  # there are none for tensors without content
    upload = torch.from_numpy  # of what is new in every step
    monkeypatch.setattr(sampled, "uploaded_for_search", lambda array, device: upload(array).to(device))


@pytest.mark.parametrize("semantics", ["hf", "vllm", "tridecode"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_step_waits_for_nothing_and_uploads_nothing_twice(semantics: str, options: dict[str, Any]) -> None:
    rules = rules_of(WIDTH, semantics, (1, 2), **options)
    if rules.strategy == BestStrategy("vllm"):
        rules = rules._replace(strategy=BestStrategy("vllm", (3, 1.5)))
    for num_rows, vocab_size in ((1, 300), (WIDTH, 300), (WIDTH, 3)):
        expected = step(rules, 3, num_rows, vocab_size)
        with patch.object(torch, "tensor", None), patch.object(torch, "from_numpy", None):
            assert step(rules, 3, num_rows, vocab_size) == expected


def test_going_on_with_what_was_sampled_waits_for_nothing() -> None:
    rules = rules_of(WIDTH, stops=(1, 2), num_logprobs=2)
    logits, scores = torch.empty(1, WIDTH, 30, device=NOWHERE), torch.empty(1, WIDTH, device=NOWHERE)
    p, logprobs = joint_search_distribution(rules, logits, SearchBeams(scores))
    assert (p.dtype, logprobs.dtype) == (torch.float64, torch.float32)
    cells = torch.empty(3, dtype=torch.int64, device=NOWHERE)
    choice, slots = take_strategy_cells(rules, logprobs[0], scores[0], cells, SearchInputs())
    assert reported_search_step(rules, choice).parents.shape == (1, WIDTH)
    assert slots.shape == (3,)


def test_only_stop_strings_are_looked_for_on_the_host() -> None:
    asked = []

    def judge(*on_host: Any) -> np.ndarray:
        asked.append(on_host)
        return np.zeros(on_host[1].shape, dtype=bool)

    rules, judge_inputs = rules_of(WIDTH, stops=(1,)), torch.arange(12, dtype=torch.int32).view(3, 4)
    for is_barred, sees in ((False, True), (False, False), (True, True)):
        of_rules = rules._replace(stops=rules.stops._replace(strings=("x",), are_barred=is_barred))
        with patch.object(stops, "is_searched_on_host", lambda _, sees=sees: sees):
            inputs = SearchInputs(completes=StopStringConstraint(judge, judge_inputs).of_rows(2))
            take_search_step(of_rules, torch.randn(2, WIDTH, 30), SearchBeams(torch.zeros(2, WIDTH)), inputs)
    assert len(asked) == 2, "where no hypothesis may stop, none is looked at"
    for parents, tokens, copied in asked:
        assert parents.shape == tokens.shape
        assert parents.min() >= 2
        np.testing.assert_array_equal(copied, judge_inputs.numpy())


ITEM_RULES = {
    "items": ItemConstraint("", 1),
    "items and a stop": ItemConstraint("", 1, ends_with_stop=True, renormalizes=True),
    "several items after a token": ItemConstraint("", 3, after=7),
}


@pytest.mark.parametrize("length", [None, 1])
@pytest.mark.parametrize("strategy", [BestStrategy(), DiverseGroupsStrategy(2, 0.5, 1, (0,))], ids=["beams", "groups"])
@pytest.mark.parametrize("item_rules", ITEM_RULES.values(), ids=ITEM_RULES)
def test_step_along_a_catalog_waits_for_nothing(
    item_rules: ItemConstraint, strategy: SearchStrategy, length: int | None
) -> None:
    first_child, tokens = (torch.empty(size, dtype=torch.int32, device=NOWHERE) for size in (41, 40))
    trie = ConstraintTrie(first_child, tokens, torch.empty(40, dtype=torch.bool, device=NOWHERE), [8, 5, 2, 1])
    rules = rules_of(WIDTH, stops=(1, 2), constraints=(item_rules,), num_logprobs=2, strategy=strategy)
    for num_rows in (1, WIDTH):
        logits = torch.empty(3, num_rows, 300, dtype=torch.bfloat16, device=NOWHERE)
        states = torch.empty(3, num_rows, dtype=torch.int64, device=NOWHERE)
        items = ConstraintAlongItems(item_rules, trie, rules.stops.token_ids)
        beams = SearchBeams(torch.empty(3, num_rows, device=NOWHERE), None, {items: states}, length)
        found = take_search_step(rules, logits, beams)
        after = beams.after(next_search_beams(found))
        assert after.states[items].shape == found.tokens.shape == (3, WIDTH)
        assert after.advance(found.tokens).states[items].shape == (3, WIDTH)
        assert [after.at(group).states[items].shape for group in range(3)] == [(1, WIDTH)] * 3
        pack_search_step(found, rules.layout(*logits.shape[1:]))
