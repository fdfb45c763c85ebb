"""What a forest's nodes carry is what plain steps along their paths would have made of it."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.steps import rules_of
from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint
from vllm_trie.search.constraints.constraint import NOTHING
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.rules import SearchPhase
from vllm_trie.speculation.search.draft_lookup import DraftPaths
from vllm_trie.speculation.search.forest import Forest, Layer
from vllm_trie.speculation.worker.forest_step import ForestStep, add_forest_layer
from vllm_trie.speculation.worker.searched_forest import SearchedForestStep

CPU = torch.device("cpu")
NUM_BEAMS, NUM_LAYERS, VOCAB_SIZE, STOP = 3, 3, 8, 7
NO_PAIR_TWICE = NGramConstraint(2)


def items() -> ConstraintAlongItems:
    """A root with all tokens but the stop as children, below each the first five tokens, which end items."""
    children = [*range(7)] + [*range(5)] * 7
    first_child = [1, 8, 13, 18, 23, 28, 33, 38] + [43] * 36
    is_item = [False] * 8 + [True] * 35
    trie = ConstraintTrie(torch.tensor(first_child), torch.tensor([0, *children]), torch.tensor(is_item), [7, 5, 0])
    return ConstraintAlongItems(ItemConstraint("items", 3), trie, (STOP,))


def planted(histories: np.ndarray) -> ForestStep:
    """A forest of roots alone, the newest tokens of histories [b, L]."""
    along = items()
    rules = rules_of(NUM_BEAMS, stops=(STOP,), constraints=(along.rules, NO_PAIR_TWICE))
    budget = SpeculationBudget(NUM_LAYERS, 99, [[]], [[]], draft_width=4, phases=[SearchPhase()] * NUM_LAYERS)
    roots = histories[:, -1].tolist()
    layer = Layer([*range(NUM_BEAMS)], -np.random.default_rng(0).random(NUM_BEAMS, np.float32), NUM_BEAMS)
    state = along.begin(NUM_BEAMS, CPU)
    for tokens in torch.from_numpy(histories[:, -2:]).T:
        state = along.advance(state, tokens[None])
    padded = np.pad(histories, ((0, 0), (NUM_LAYERS, 0)), constant_values=NOTHING)
    states = {NO_PAIR_TWICE: torch.from_numpy(padded)[None], along: state}
    group: Any = SimpleNamespace(row_ids=["row"] * NUM_BEAMS, search=rules, rules=rules)
    blocks = [np.ones((NUM_BEAMS, 7), np.int32)]
    step = GroupStep(SearchPhase(), selects=True, budget=budget)
    return SearchedForestStep(step, group, 5, [16], Forest(roots, 99), layer, blocks, [[]], states)


def check(forest_step: ForestStep, histories: np.ndarray) -> int:
    """Raise AssertionError unless each node carries what its path says. Returns how many there are beyond the roots."""
    forest = forest_step.forest
    along = next(key for key in forest_step.states if isinstance(key, ConstraintAlongItems))
    for node in range(forest.num_nodes):
        root, *path = forest.path(node)
        beams = forest_step.beams_at([node], SearchBeams(torch.zeros(1, 1)))
        tokens = [*histories[root], *(forest.tokens[one] for one in path)]
        carried = beams.states[NO_PAIR_TWICE][0, 0].tolist()
        assert [token for token in carried if token != NOTHING] == tokens
        state = forest_step.states[along][:, root, None]
        for one in path:
            assert along.leads_on(state, torch.tensor([[forest.tokens[one]]])).all()
            state = along.advance(state, torch.tensor([[forest.tokens[one]]]))
        assert beams.states[along].tolist() == state.tolist()
        pairs, num_before = [*pairwise(tokens)], len(histories[root]) - 1
        assert all(pair not in pairs[:at] for at, pair in enumerate(pairs) if at >= num_before)
    return forest.num_nodes - NUM_BEAMS


@pytest.mark.parametrize("seed", range(5))
def test_drafts_keep_to_constraints_and_nodes_carry_what_their_paths_say(seed: int) -> None:
    histories = np.random.default_rng(seed).integers(0, 5, (NUM_BEAMS, 6)).astype(np.int32)
    forest_step, random = planted(histories), torch.Generator().manual_seed(seed)
    for number in range(1, NUM_LAYERS + 1):
        logits = torch.randn(len(forest_step.layer.nodes), VOCAB_SIZE, generator=random)
        add_forest_layer([forest_step], logits, number)
    assert check(forest_step, histories) > NUM_LAYERS


def test_nodes_that_were_found_carry_what_their_paths_say() -> None:
    histories = np.array([[0, 1, 2, 0, 3], [0, 1, 2, 3, 1], [0, 1, 2, 4, 4]], np.int32)
    forest_step = planted(histories)
    found = np.array([[4, 1, 0], [4, 1, 3], [0, 4, 1], [1, 0, 2]], np.int32)
    forest_step.add_layers(DraftPaths(np.array([0, 0, 1, 2]), found))
    assert check(forest_step, histories) == 10
