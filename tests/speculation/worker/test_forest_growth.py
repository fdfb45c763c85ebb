"""Forests that grow unseen are those that the host grows: nodes, rows, masks, blocks and slots, layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.steps import rules_of
from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import States
from vllm_trie.search.devices import ALIGNMENT, NEVER
from vllm_trie.search.filters import LogitsFilters
from vllm_trie.search.rank import NO_KEY, SCORE_UNIT
from vllm_trie.speculation.search.forest import Forest, Layer
from vllm_trie.speculation.worker import best_drafts, unseen_forests
from vllm_trie.speculation.worker.forest_growth import layer_of
from vllm_trie.speculation.worker.forest_step import NO_BLOCK, ForestStep, add_layer
from vllm_trie.speculation.worker.kernels import drafts
from vllm_trie.speculation.worker.kernels import forest_growth as growth_kernels
from vllm_trie.speculation.worker.kernels.forest_growth import SLOTS
from vllm_trie.speculation.worker.searched_forest import SearchedForest
from vllm_trie.speculation.worker.unseen_forests import UnseenForests
from vllm_trie.worker import launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB_SIZE, STOPS = 11, (3, 4)
BLOCK_SIZES = [2, 4]


class Problem:
    """Some groups that speculate, and what the draft model says.

    Args:
        seed: Of all of it.
    """

    def __init__(self, seed: int) -> None:
        self.seed, random = seed, np.random.default_rng(seed)
        limits = 5, 5, 10, 5  # layers; beams; drafts of a layer; drafts of a beam and layer
        sizes = random.integers(1, limits, (random.integers(1, 4), 4))
        most = random.integers(1, 1 + sizes[:, [0, 1, 3]].prod(axis=1))
        self.sizes = np.column_stack([sizes[:, :3], most]).tolist()
        if random.random() < 0.3:
            self.sizes.append([6, int(random.integers(1, 3)), 30, int(random.choice([62, 63, 64, 65, 130]))])
        self.block_sizes = BLOCK_SIZES[: random.integers(1, 3)]
        self.starts, self.num_stops = random.integers(0, 10, len(self.sizes)).tolist(), int(random.integers(0, 3))

    def planted(self) -> list[ForestStep]:
        """Forests of roots alone; some of these are dead."""
        random, found = np.random.default_rng(self.seed), []
        for start, (num_layers, width, draft_width, most) in zip(self.starts, self.sizes, strict=True):
            filters = LogitsFilters(random.choice([0.7, 1.0, 1.0]))  # torch ranks tokens with a temperature
            rules = [rules_of(1, stops=STOPS[: self.num_stops], filters=filters)] * num_layers
            numbers, blocks, spare = iter(random.permutation(2000) + 1), [], []
            for size in self.block_sizes:
                column, has_next = start // size, random.random() < 0.5
                table = np.full((width, max((start + most) // size, column + has_next) + 1), NO_BLOCK, np.int32)
                for row in table:
                    row[: column + 1 + has_next] = [next(numbers) for _ in range(column + 1 + has_next)]
                table[:, : random.integers(0, column + 1)] = NO_BLOCK  # behind a window
                blocks.append(table)
                spare.append([int(next(numbers)) for _ in range(width * table.shape[1])])
            budget = SpeculationBudget(num_layers, most, [], spare, draft_width=draft_width, rules=rules)
            scores = -random.integers(0, 4, width).astype(np.float32)
            scores[random.random(width) < 0.2] = NEVER
            layer, forest = (
                Layer([*range(width)], scores, width),
                Forest(random.integers(0, 9, width).tolist(), most),
            )
            group: Any = type("Group", (), {"row_ids": ["row"] * width})
            step = GroupStep(rules[0], selects=True, budget=budget, num_shared=[4] * len(self.block_sizes))
            found.append(SearchedForest(step, group, start, self.block_sizes, forest, layer, blocks, spare, {}))
        return found

    def says(self, count: int, number: int) -> torch.Tensor:
        """[count, V] log-probabilities, many of which are equal."""
        random = torch.Generator().manual_seed(self.seed + 1000 * number)
        logprobs = -torch.randint(0, 5, (count, VOCAB_SIZE), generator=random).float()
        return logprobs.where(torch.rand(count, VOCAB_SIZE, generator=random) < 0.7, NEVER).to(DEVICE)


def rank(forest_step: ForestStep, logits: torch.Tensor, _: States, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `best_drafts.rank`, of log-probabilities, and of those that are equal the lowest tokens first."""
    going_on = logits.clone()
    going_on[:, list(forest_step.rules[number - 1].stops.token_ids)] = NEVER
    order = going_on.sort(dim=1, descending=True, stable=True)
    return order.values[:, : forest_step.budget.draft_width], order.indices[:, : forest_step.budget.draft_width]


def best_of_rows(logits: torch.Tensor, which: torch.Tensor, count: int, kept: int) -> torch.Tensor:
    """As `drafts.best_of_rows`, of log-probabilities."""
    keys = logits[which].abs().view(torch.int32).long() * SCORE_UNIT + torch.arange(VOCAB_SIZE, device=DEVICE)
    found = torch.full((len(which), kept), NO_KEY, device=DEVICE)
    found[:, torch.randperm(kept)[: min(count, VOCAB_SIZE)]] = keys.sort(dim=1).values[:, :count]
    return found


def check_layer(unseen: UnseenForests, seen: list[ForestStep], number: int) -> None:
    """Raise AssertionError unless a layer, of which there is one more, is the same there as on the host."""
    growing = unseen._growing
    for plan in unseen._plans:
        forest_step = seen[unseen_order(seen).index(plan.place)]
        if forest_step.budget.num_layers <= number:
            continue
        forest, nodes, part = forest_step.forest, np.array(forest_step.layer.nodes, int), plan.parts[number]
        own = slice(part.first, part.first + len(nodes))
        places = np.array(forest.places)[nodes]
        rows = np.array(forest.row_of)[nodes]
        assert growing.parents[part.nodes].ge(0).tolist() == [True] * len(nodes) + [False] * (part.size - len(nodes))
        assert growing.tokens[own].tolist() == [forest.tokens[node] for node in nodes]
        assert growing.scores[own].tolist() == forest_step.layer.scores.tolist()
        assert growing.rows[own].tolist() == [plan.first_row + row for row in rows]
        assert growing.ends[own].tolist() == [forest_step.start + 1 + place for place in places]
        for node, words in zip(nodes, growing.masks[own].tolist(), strict=True):
            assert sum((word % (1 << 64)) << 64 * at for at, word in enumerate(words)) == forest._masks[node]
        for group, table in enumerate(forest_step.blocks):
            assert growing.tables[group, plan.rows, : table.shape[1]].tolist() == table.tolist()
            assert growing.slots[group, own].tolist() == forest_step.slots_of(group, rows, places).tolist()
        nowhere = slice(own.stop, part.first + part.size)
        assert not growing.tokens[nowhere].any()
        assert growing.ends[nowhere].eq(forest_step.start + 1).all()
        assert not growing.slots[:, nowhere].any()
        assert growing.masks[nowhere, 0].eq(1).all()
        assert growing.masks[nowhere, 1:].eq(0).all()


def unseen_order(seen: list[ForestStep]) -> list[int]:
    """Where each of the forests is among those that grow unseen, which are in the order of their layers."""
    order = sorted(range(len(seen)), key=lambda at: -seen[at].budget.num_layers)
    return [order.index(at) for at in range(len(seen))]


def check(problem: Problem, by_kernels: bool, most_slots: int = SLOTS[-1]) -> None:
    """Raise AssertionError unless the forests are those of the host.

    Args:
        problem: Which.
        by_kernels: On a device that has some.
        most_slots: Wider forests kernels do not draft alone.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (best_drafts, unseen_forests):
            patch.setattr(module, "rank", rank)
        patch.setattr(drafts, "best_of_rows", best_of_rows)
        patch.setattr(growth_kernels, "SLOTS", (most_slots,))
        patch.setattr(launches, "run_on", lambda _: by_kernels)
        seen, replayed = problem.planted(), problem.planted()
        unseen = UnseenForests(replayed, problem.block_sizes, DEVICE)
        plans = unseen._plans
        for number in range(1, unseen.num_layers + 1):
            before = layer_of(unseen._active(number), number - 1)
            said = problem.says(before.stop - before.start, number)
            unseen.draft(said, number)
            growing = [one for one in seen if one.budget.num_layers >= number and one.layer.nodes]
            firsts = [
                plans[unseen_order(seen)[seen.index(one)]].parts[number - 1].first - before.start for one in growing
            ]
            if growing:
                rows = [said[first : first + len(one.layer.nodes)] for first, one in zip(firsts, growing, strict=True)]
                add_layer(growing, torch.cat(rows).cpu(), number)
            check_layer(unseen, seen, number)
            if number < unseen.num_layers:
                inputs = unseen.inputs(number)
                read = inputs.tokens, inputs.positions, *inputs.slots, inputs.ends, *inputs.tables
                assert all(part.data_ptr() % ALIGNMENT == 0 for part in read)
        unseen.replay()
    for theirs, own in zip(seen, replayed, strict=True):
        for name in ("tokens", "parents", "rows", "row_of", "places", "_masks", "depths"):
            assert getattr(own.forest, name) == getattr(theirs.forest, name)
        assert [table.tolist() for table in own.blocks] == [table.tolist() for table in theirs.blocks]
        assert (own.spare_blocks, own.num_layers) == (theirs.spare_blocks, theirs.num_layers)


@settings(max_examples=60, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10**9))
def test_forests_that_grow_unseen_are_those_of_the_host(seed: int) -> None:
    check(Problem(seed), by_kernels=False)


@settings(max_examples=15, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10**9), st.sampled_from([4, SLOTS[-1]]))
def test_forests_that_kernels_grow_are_those_of_the_host(seed: int, most_slots: int) -> None:
    check(Problem(seed), by_kernels=True, most_slots=most_slots)


@pytest.mark.parametrize("count", [3, 80])
def test_kernels_rank_what_goes_on_as_torch(count: int) -> None:
    """Whatever ends hypotheses is no draft."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    which, ends = torch.tensor([4, 0, 2], device=DEVICE), tuple(logits[4].topk(2).indices.tolist())
    keys = drafts.best_of_rows(logits, which, count + len(ends), drafts.kept_of(count + len(ends)))
    logprobs, tokens = (of_rows[:, :count] for of_rows in drafts.decoded(keys, ends))
    expected = logits[which].log_softmax(dim=1)
    expected[:, list(ends)] = NEVER
    best = expected.topk(count + len(ends), dim=1)
    for row in range(len(which)):
        goes_on = logprobs[row] > NEVER
        assert goes_on.sum() >= count - len(ends)
        assert tokens[row][goes_on].tolist() == best.indices[row][: goes_on.sum()].tolist()
        assert torch.allclose(logprobs[row][goes_on], best.values[row][: goes_on.sum()], atol=1e-5)
