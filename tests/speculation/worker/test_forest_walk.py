"""Searches that walk through forests together, unseen, find what each finds step by step."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.steps import rules_of
from tests.support.unseen import paths_before, pretend_unseen
from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import SearchFilters
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.step import is_light_search_step, take_packed_search_step
from vllm_trie.search.step_result import SearchStepResult, unpack_search_steps
from vllm_trie.speculation.search.forest import Forest, Layer
from vllm_trie.speculation.worker import forest_walk
from vllm_trie.speculation.worker.device_forests import DeviceForests
from vllm_trie.speculation.worker.forest_nodes import VerifiedForestNodes
from vllm_trie.speculation.worker.forest_step import ForestOutcome, add_forest_layer
from vllm_trie.speculation.worker.searched_forest import SearchedForestStep
from vllm_trie.worker import launches
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.select.select import Selector

NUM_LAYERS, VOCAB_SIZE, STOP = 3, 300, 7
NUM_GROUPS, MOST_ROWS, MOST_TOGETHER = 4, 64, 7  # groups, rows, and rows where these need much memory
MOST_DRAFTS = 99, 5  # by group, in turn
RULES = {
    "one beam": rules_of(1, stops=(STOP,)),
    "hf": rules_of(3, stops=(STOP, 8)),
    "tridecode": rules_of(3, "tridecode", (STOP,)),
    "vllm": rules_of(3, "vllm", (STOP,)),
    "log-probabilities": rules_of(3, num_logprobs=2),
    "a nucleus": rules_of(3, filters=SearchFilters(0.7, top_p=0.9)),
}


class Planted:
    """Forests of some groups, and what the target says after every node, or whatever else a beam may be.

    Args:
        rules: Of all of them.
        seed: Of what the models say; the draft model says about the same as the target.
        is_coarse: Many tokens are as good as others.
        num_groups: G.
        are_unseen: The forests grow as on a GPU.
    """

    def __init__(
        self, rules: SearchRules, seed: int, is_coarse: bool, num_groups: int = NUM_GROUPS, are_unseen: bool = False
    ) -> None:
        self.random, self.seed, self.is_coarse = torch.Generator().manual_seed(seed), seed, is_coarse
        phases = [SearchPhase(is_last=number == NUM_LAYERS) for number in range(NUM_LAYERS + 1)]
        self.forest_steps, self.logits = list[SearchedForestStep](), torch.zeros(0, VOCAB_SIZE)
        for number in range(num_groups):
            most = MOST_DRAFTS[number % len(MOST_DRAFTS)]
            budget = SpeculationBudget(NUM_LAYERS, most, [[]], [[]], draft_width=2 * rules.width, phases=phases[1:])
            scores, slots = -torch.rand(rules.width, generator=self.random), np.arange(rules.width)
            request: Any = SimpleNamespace(req_id=str(number), prompt_token_ids=[1], prompt_embeds=None)
            row_ids = [f"{number}#{row}" for row in slots]
            group = GroupRows(request, rules, row_ids, SearchBeams(scores[None]), torch.zeros(rules.width), slots=slots)
            layer = Layer(slots.tolist(), scores.numpy(), rules.width)
            step, blocks = GroupStep(phases[0], selects=True, budget=budget), [np.ones((rules.width, 9), np.int32)]
            forest = Forest([0] * rules.width, most)
            self.forest_steps.append(SearchedForestStep(step, group, 5, [16], forest, layer, blocks, [[]], {}))
        if are_unseen:
            self._grow_unseen()
            return
        for number in range(1, NUM_LAYERS + 1):
            growing = [(at, one) for at, one in enumerate(self.forest_steps) if one.layer.nodes]
            said = [self._drafted_after(at, *self._path(at, node)) for at, one in growing for node in one.layer.nodes]
            add_forest_layer([one for _, one in growing], torch.stack(said), number)

    def _grow_unseen(self) -> None:
        unseen = DeviceForests(self.forest_steps, [16], torch.device("cpu"))
        for number in range(1, NUM_LAYERS + 1):
            paths = [(plan.place, path or [0]) for plan, path in paths_before(unseen, number)]
            unseen.draft(torch.stack([self._drafted_after(at, *path) for at, path in paths]), number)
        grown = unseen.finish()
        starts, most = np.zeros(99, np.int64), sum(one.grown.num_tokens for one in self.forest_steps)
        inputs = {"input_ids": torch.zeros(most, dtype=torch.int32), "positions": torch.zeros(most, dtype=torch.int64)}
        batch = SimpleNamespace(query_start_loc_np=starts, cu_num_logits_np=starts, **inputs)
        rows: Any = SimpleNamespace(places=lambda slots: slots, batch=batch)
        grown.place(rows, torch.zeros(1, most, dtype=torch.int64))
        grown.read()

    def says(self, number: int, root: int, *tokens: int) -> torch.Tensor:
        """The target's logits, of a group, after a root and what follows it."""
        random = torch.Generator().manual_seed(hash((self.seed, number, root, *tokens)) & (1 << 32) - 1)
        logits = 3 * torch.randn(VOCAB_SIZE, generator=random)
        return logits.round() if self.is_coarse else logits

    def _drafted_after(self, number: int, root: int, *tokens: int) -> torch.Tensor:
        """What the draft model says, likewise."""
        random = torch.Generator().manual_seed(hash((number, root, *tokens, self.seed)) & (1 << 32) - 1)
        return self.says(number, root, *tokens) + 0.3 * torch.randn(VOCAB_SIZE, generator=random)

    def _after(self, number: int, node: int) -> torch.Tensor:
        return self.says(number, *self._path(number, node))

    def _path(self, number: int, node: int) -> list[int]:
        forest = self.forest_steps[number].forest
        root, *drafts = forest.path(node)
        return [root, *(forest.tokens[draft] for draft in drafts)]

    def nodes(self) -> list[VerifiedForestNodes]:
        """Those of all groups, whose logits lie anywhere."""
        counts = [one.forest.num_nodes for one in self.forest_steps]
        order = torch.randperm(sum(counts), generator=self.random)
        every = torch.stack([self._after(at, node) for at, count in enumerate(counts) for node in range(count)])
        values = torch.empty_like(every)
        values[order] = every
        selector: Any = object.__new__(Selector)
        selector._max_num_reqs, selector._most_together = MOST_ROWS, MOST_TOGETHER
        rows: Any = SimpleNamespace(places=lambda slots: slots, first_logits=lambda places: places)
        found = []
        for one, at in zip(self.forest_steps, np.split(order.numpy(), np.cumsum(counts)[:-1]), strict=True):
            found.append(VerifiedForestNodes(selector, rows, one, values))
            found[-1].at = at
            if one.grown is not None:
                one.grown.forests.laid.at[one.grown.place, one.grown.nodes] = torch.from_numpy(at)
        return found


def step_by_step(planted: Planted, number: int) -> list[Any]:
    """What plain beam search finds of one group, wherever its beams come: what lives and what ends, by step."""
    forest_step, found = planted.forest_steps[number], []
    histories: list[tuple[int, ...]] = [(root,) for root in range(forest_step.num_beams)]
    beams = forest_step.group.beams
    for rules in forest_step.rules:
        logits = torch.stack([planted.says(number, *history) for history in histories])
        going, words, layout = take_packed_search_step(rules, logits[None], beams)
        (on_host,) = unpack_search_steps(words.numpy(), layout)
        found.append(of_step(on_host))
        chosen = zip(on_host.parents.tolist(), on_host.tokens.tolist(), strict=True)
        histories, beams = (
            [(*histories[parent], token) for parent, token in chosen],
            beams.after(going),
        )
    return found


def of_step(step: SearchStepResult) -> tuple[list[tuple[int, ...]], list[tuple[float, ...]]]:
    """The beams of a step by slot, and what ends in it, in order: parents, tokens and scores."""
    beams, ended = (
        [*zip(*(field.tolist() for field in candidates), strict=True)] for candidates in (step[:3], step.finished)
    )
    return [beam if beam[2] > NEVER else () for beam in beams], [one for one in ended if one[2] > NEVER]


def steps_of(found: ForestOutcome) -> list[list[list[float]]]:
    return [[field.tolist() for field in step[:3]] for step in found.steps]


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_groups_that_walk_together_find_what_each_finds_alone(
    rules: SearchRules, is_coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    for seed in range(4):
        planted = Planted(rules, seed, is_coarse)
        alone = SearchedForestStep.search(planted.nodes())
        with monkeypatch.context() as patch:
            pretend_unseen(patch)
            together = SearchedForestStep.search(nodes := planted.nodes())
            assert len(forest_walk.verifying_walks_of(nodes)) == (1 if is_light_search_step(rules) else 2)
        for number, (own, found) in enumerate(zip(alone, together, strict=True)):
            assert steps_of(found) == steps_of(own)
            assert (found.beams, found.accepted) == (own.beams, own.accepted)
            assert found.tokens.tolist() == found.steps[-1].tokens.tolist()
            assert found.carried.at(found.place).scores[0].tolist() == found.steps[-1].scores.tolist()
            assert [*map(of_step, found.steps)] == step_by_step(planted, number)[: len(found.steps)]
            num_steps += len(found.steps)
    assert num_steps > 1.5 * 4 * NUM_GROUPS


def test_by_kernels_they_draft_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(2, "tridecode", (STOP,))
    by_torch = Planted(rules, 1, is_coarse=False, num_groups=2)
    expected = SearchedForestStep.search(by_torch.nodes())
    pretend_unseen(monkeypatch)
    monkeypatch.setattr(launches, "worker_runs_kernels_on", lambda _: True)
    by_kernels = Planted(rules, 1, is_coarse=False, num_groups=2, are_unseen=True)
    for own, theirs in zip(by_kernels.forest_steps, by_torch.forest_steps, strict=True):
        assert (own.forest.tokens, own.forest.parents) == (theirs.forest.tokens, theirs.forest.parents)
    for found, theirs in zip(SearchedForestStep.search(by_kernels.nodes()), expected, strict=True):
        assert (found.beams, found.accepted, len(found.steps)) == (theirs.beams, theirs.accepted, len(theirs.steps))
        for step, plain in zip(found.steps, theirs.steps, strict=True):
            lives = plain.scores > NEVER
            assert step.parents.tolist() == plain.parents.tolist()
            assert step.tokens[lives].tolist() == plain.tokens[lives].tolist()
            assert step.scores == pytest.approx(plain.scores, abs=1e-5)


@pytest.mark.parametrize("is_host_readable", [True, False])
def test_no_two_groups_hold_processed_logits_at_a_time(is_host_readable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are float32, and hold a prefix as often as paths share it."""
    planted = Planted(rules_of(3)._replace(is_controlled=True), 1, is_coarse=False, num_groups=3)
    made = list[weakref.ref[torch.Tensor]]()

    def processed(_: Any, logits: torch.Tensor, *of_paths: Any) -> torch.Tensor:
        assert not any(of_another() is not None for of_another in made)
        values = logits.clone()
        made.append(weakref.ref(values))
        return values

    selector: Any = object.__new__(Selector)
    selector._max_num_reqs, selector._most_together, selector.processed = MOST_ROWS, MOST_TOGETHER, processed
    rows: Any = SimpleNamespace(places=lambda slots: slots, first_logits=lambda places: places)
    logits = torch.randn(99, VOCAB_SIZE, generator=planted.random)
    if not is_host_readable:
        pretend_unseen(monkeypatch)
    found = SearchedForestStep.search(
        [VerifiedForestNodes(selector, rows, one, logits) for one in planted.forest_steps]
    )
    assert len(found) == len(made) == 3
    assert all(of_group() is None for of_group in made)
