"""Forests that grow unseen are those that the host grows: nodes, rows, masks, blocks and slots, layer by layer.

So are what the target reads of them, and what the host reads at last.
"""

from __future__ import annotations

from types import SimpleNamespace
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
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rank import NO_KEY, SCORE_UNIT
from vllm_trie.search.rules import SearchPhase
from vllm_trie.speculation.search.forest import Forest, Layer
from vllm_trie.speculation.worker import best_drafts, device_forests
from vllm_trie.speculation.worker.device_forests import DeviceForests
from vllm_trie.speculation.worker.forest_growth import forest_growth_layer
from vllm_trie.speculation.worker.forest_layout import NO_CHILD, PARENT_UNIT
from vllm_trie.speculation.worker.forest_step import NO_BLOCK, ForestStep, add_forest_layer
from vllm_trie.speculation.worker.grown_forests import GrownForests, children_in_grown_forests
from vllm_trie.speculation.worker.kernels import drafts
from vllm_trie.speculation.worker.kernels import forest_growth as growth_kernels
from vllm_trie.speculation.worker.kernels.forest_growth import SLOTS
from vllm_trie.speculation.worker.searched_forest import SearchedForestStep
from vllm_trie.worker import launches
from vllm_trie.worker.attention.shared_rows import WORD
from vllm_trie.worker.rows.rows import BatchRows

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
        random, found, num_slots = np.random.default_rng(self.seed), [], 0
        for start, (num_layers, width, draft_width, most) in zip(self.starts, self.sizes, strict=True):
            filters = SearchFilters(random.choice([0.7, 1.0, 1.0]))  # torch ranks tokens with a temperature
            rules = rules_of(1, stops=STOPS[: self.num_stops], filters=filters)
            numbers, blocks, spare = iter(random.permutation(2000) + 1), [], []
            for size in self.block_sizes:
                column, has_next = start // size, random.random() < 0.5
                table = np.full((width, max((start + most) // size, column + has_next) + 1), NO_BLOCK, np.int32)
                for row in table:
                    row[: column + 1 + has_next] = [next(numbers) for _ in range(column + 1 + has_next)]
                table[:, : random.integers(0, column + 1)] = NO_BLOCK  # behind a window
                blocks.append(table)
                spare.append([int(next(numbers)) for _ in range(width * table.shape[1])])
            phases = [SearchPhase()] * num_layers
            budget = SpeculationBudget(num_layers, most, [], spare, draft_width=draft_width, phases=phases)
            scores = -random.integers(0, 4, width).astype(np.float32)
            scores[random.random(width) < 0.2] = NEVER
            layer, forest = (
                Layer([*range(width)], scores, width),
                Forest(random.integers(0, 9, width).tolist(), most),
            )
            slots = num_slots + np.arange(width)
            group: Any = SimpleNamespace(row_ids=["row"] * width, slots=slots, search=rules, rules=rules)
            num_slots += width
            step = GroupStep(phases[0], selects=True, budget=budget, num_shared=[4] * len(self.block_sizes))
            found.append(SearchedForestStep(step, group, start, self.block_sizes, forest, layer, blocks, spare, {}))
        return found

    def says(self, count: int, number: int) -> torch.Tensor:
        """[count, V] log-probabilities, many of which are equal."""
        random = torch.Generator().manual_seed(self.seed + 1000 * number)
        logprobs = -torch.randint(0, 5, (count, VOCAB_SIZE), generator=random).float()
        return logprobs.where(torch.rand(count, VOCAB_SIZE, generator=random) < 0.7, NEVER).to(DEVICE)


def rank(forest_step: ForestStep, logits: torch.Tensor, _: States, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `best_drafts.rank_drafts_after_nodes`, of log-probabilities, of equal ones the lowest tokens first."""
    going_on = logits.clone()
    going_on[:, list(forest_step.rules[number - 1].stops.token_ids)] = NEVER
    order = going_on.sort(dim=1, descending=True, stable=True)
    return order.values[:, : forest_step.budget.draft_width], order.indices[:, : forest_step.budget.draft_width]


def best_of_rows(logits: torch.Tensor, which: torch.Tensor, count: int, kept: int) -> torch.Tensor:
    """As `drafts.launch_best_drafts`, of log-probabilities."""
    keys = logits[which].abs().view(torch.int32).long() * SCORE_UNIT + torch.arange(VOCAB_SIZE, device=DEVICE)
    found = torch.full((len(which), kept), NO_KEY, device=DEVICE)
    found[:, torch.randperm(kept)[: min(count, VOCAB_SIZE)]] = keys.sort(dim=1).values[:, :count]
    return found


def check_layer(unseen: DeviceForests, seen: list[ForestStep], number: int) -> None:
    """Raise AssertionError unless a layer, of which there is one more, is the same there as on the host."""
    growing = unseen._growing
    for plan in unseen._plans:
        forest_step = seen[unseen_order(seen).index(plan.place)]
        if forest_step.budget.num_layers < number:
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
        assert sees_of(growing.masks[own]) == [seen_by(forest, node) for node in nodes]
        for group, table in enumerate(forest_step.blocks):
            assert growing.tables[group, plan.rows, : table.shape[1]].tolist() == table.tolist()
            assert growing.slots[group, own].tolist() == forest_step.slots_of(group, rows, places).tolist()
        nowhere = slice(own.stop, part.first + part.size)
        assert not growing.tokens[nowhere].any()
        assert growing.ends[nowhere].eq(forest_step.start + 1).all()
        assert not growing.slots[:, nowhere].any()
        assert growing.masks[nowhere, 0].eq(1).all()
        assert growing.masks[nowhere, 1:].eq(0).all()


def sees_of(masks: torch.Tensor) -> list[set[int]]:
    """Of masks [n, words] the places that each sees."""
    bits = (masks[..., None] >> torch.arange(WORD, device=masks.device) & 1).flatten(1)
    return [set(np.flatnonzero(of_node).tolist()) for of_node in bits.cpu().numpy()]


def seen_by(forest: Forest, node: int) -> set[int]:
    """The places that a node sees of its row."""
    return {forest.places[passed] for passed in forest.path(node)}


def check_batch(grown: GrownForests, planted: list[ForestStep], seen: list[ForestStep], seed: int) -> None:
    """Raise AssertionError unless the target reads of a batch what the host's forests say, in whichever rows.

    Args:
        grown: Forests, which the host has not read.
        planted: Of these.
        seen: The same forests, grown by the host.
        seed: Of the order of rows, among which there is an ordinary one.
    """
    slots = np.random.default_rng(seed).permutation(1 + sum(one.num_beams for one in seen)) - 1
    slots[slots < 0] = len(slots)
    counts, num_logits = np.full((2, len(slots) + 1), 7)
    num_logits[len(slots)] = 1
    for one in planted:
        counts[one.group.slots] = num_logits[one.group.slots] = one.counts
    starts, cu_num_logits = (np.append(0, of_slots[slots].cumsum()) for of_slots in (counts, num_logits))
    untouched, num_tables = -5, len(seen[0].blocks)
    tables = torch.full((num_tables, len(slots) + 1, 200), untouched, dtype=torch.int32, device=DEVICE)
    grown.write_blocks(tables.unbind(0))
    for one in seen:
        for table, known, column in zip(tables, one.blocks, one.columns, strict=True):
            of_rows = table[one.group.slots]
            assert of_rows[:, column + 1 : known.shape[1]].tolist() == known[:, column + 1 :].tolist()
            assert of_rows[:, : column + 1].eq(untouched).all()
            assert of_rows[:, known.shape[1] :].eq(untouched).all()
    tokens, positions, *slot_mappings = torch.full((2 + num_tables, starts[-1]), untouched, device=DEVICE)
    slot_mappings, known = torch.stack(slot_mappings), {"query_start_loc_np": starts, "cu_num_logits_np": cu_num_logits}
    batch: Any = SimpleNamespace(idx_mapping_np=slots, num_reqs=len(slots), **known)
    batch.input_ids, batch.positions = tokens.int(), positions
    rows = BatchRows(batch, len(slots) + 1)
    trees = [one.trees(rows) for one in planted]
    grown.place(rows, slot_mappings)
    (ordinary,) = rows.places(np.array([len(slots)]))
    for of_batch in (batch.input_ids, positions, *slot_mappings):
        assert of_batch[starts[ordinary] : starts[ordinary + 1]].eq(untouched).all()
        assert of_batch.ne(untouched).sum() == starts[-1] - 7
    for one, theirs, own in zip(seen, planted, trees, strict=True):
        forest, places = one.forest, rows.places(one.group.slots)
        at = theirs.nodes_at(starts[places])
        nodes, others = at[: forest.num_nodes], at[forest.num_nodes :]
        assert batch.input_ids[nodes].tolist() == forest.tokens
        assert positions[nodes].tolist() == [one.start + depth for depth in forest.depths]
        of_nodes = np.array(forest.row_of), np.array(forest.places)
        for number, slots_of in enumerate(slot_mappings):
            assert slots_of[nodes].tolist() == one.slots_of(number, *of_nodes).tolist()
        assert own.rows is not None
        assert own.ends is not None
        assert own.rows.tolist() == places[forest.row_of].tolist() + [places[0]] * len(others)
        assert own.ends.tolist() == [one.start + 1 + place for place in forest.places] + [one.start + 1] * len(others)
        assert isinstance(own.masks, torch.Tensor)
        assert sees_of(own.masks) == [seen_by(forest, node) for node in range(forest.num_nodes)] + [{0}] * len(others)
        assert batch.input_ids[others].eq(0).all()
        assert positions[others].eq(one.start).all()
        assert not slot_mappings[:, others].any()
    grown.read()
    for one, theirs in zip(seen, planted, strict=True):
        keys, nodes, logits = (of_forest[0].cpu().numpy() for of_forest in children_in_grown_forests([theirs.grown]))
        assert (keys[:-1] <= keys[1:]).all()
        assert keys[-1] == NO_CHILD
        children = {
            (int(np.searchsorted(theirs.grown.nodes, key // PARENT_UNIT)), int(key % PARENT_UNIT)): node
            for key, node in zip(keys.tolist(), np.searchsorted(theirs.grown.nodes, nodes).tolist(), strict=True)
            if key != NO_CHILD
        }
        assert children == one.forest._children
        first_logits = cu_num_logits[rows.places(one.group.slots)]
        assert logits[theirs.grown.nodes].tolist() == theirs.nodes_at(first_logits)[: one.forest.num_nodes].tolist()


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
        for module in (best_drafts, device_forests):
            patch.setattr(module, "rank_drafts_after_nodes", rank)
        patch.setattr(drafts, "launch_best_drafts", best_of_rows)
        patch.setattr(growth_kernels, "SLOTS", (most_slots,))
        patch.setattr(launches, "worker_runs_kernels_on", lambda _: by_kernels)
        seen, planted = problem.planted(), problem.planted()
        unseen = DeviceForests(planted, problem.block_sizes, DEVICE)
        plans = unseen._plans
        for number in range(1, unseen.num_layers + 1):
            before = forest_growth_layer(unseen._active(number), number - 1)
            said = problem.says(before.stop - before.start, number)
            unseen.draft(said, number)
            growing = [one for one in seen if one.budget.num_layers >= number and one.layer.nodes]
            firsts = [
                plans[unseen_order(seen)[seen.index(one)]].parts[number - 1].first - before.start for one in growing
            ]
            if growing:
                rows = [said[first : first + len(one.layer.nodes)] for first, one in zip(firsts, growing, strict=True)]
                add_forest_layer(growing, torch.cat(rows).cpu(), number)
            check_layer(unseen, seen, number)
            if number < unseen.num_layers:
                inputs = unseen.inputs(number)
                read = inputs.tokens, inputs.positions, *inputs.slots, inputs.ends, *inputs.tables
                assert all(part.data_ptr() % ALIGNMENT == 0 for part in read)
        check_batch(unseen.finish(), planted, seen, problem.seed)
    for theirs, own in zip(seen, planted, strict=True):
        for name in ("tokens", "parents", "rows", "row_of", "places", "_children", "depths"):
            assert getattr(own.forest, name) == getattr(theirs.forest, name)
        for row in range(own.num_beams):
            assert own.forest.attention_mask(row).tolist() == theirs.forest.attention_mask(row).tolist()
        assert [table.tolist() for table in own.blocks] == [table.tolist() for table in theirs.blocks]
        assert own.num_layers == theirs.num_layers


@settings(max_examples=60, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10**9))
def test_forests_that_grow_unseen_are_those_of_the_host(seed: int) -> None:
    check(Problem(seed), by_kernels=False)


@settings(max_examples=9, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 10**9), st.sampled_from([4, SLOTS[-1]]))
def test_forests_that_kernels_grow_are_those_of_the_host(seed: int, most_slots: int) -> None:
    check(Problem(seed), by_kernels=True, most_slots=most_slots)


@pytest.mark.parametrize("count", [3, 80])
def test_kernels_rank_what_goes_on_as_torch(count: int) -> None:
    """Whatever ends hypotheses is no draft."""
    logits = torch.randn(5, 700, generator=torch.Generator().manual_seed(count)).to(DEVICE)
    which, ends = torch.tensor([4, 0, 2], device=DEVICE), tuple(logits[4].topk(2).indices.tolist())
    keys = drafts.launch_best_drafts(logits, which, count + len(ends), drafts.kept_by_draft_kernels(count + len(ends)))
    logprobs, tokens = (of_rows[:, :count] for of_rows in drafts.decode_draft_kernel_keys(keys, ends))
    expected = logits[which].log_softmax(dim=1)
    expected[:, list(ends)] = NEVER
    best = expected.topk(count + len(ends), dim=1)
    for row in range(len(which)):
        goes_on = logprobs[row] > NEVER
        assert goes_on.sum() >= count - len(ends)
        assert tokens[row][goes_on].tolist() == best.indices[row][: goes_on.sum()].tolist()
        assert torch.allclose(logprobs[row][goes_on], best.values[row][: goes_on.sum()], atol=1e-5)
