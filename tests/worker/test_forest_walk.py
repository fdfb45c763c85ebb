"""Searches that walk through forests together, unseen, find what each finds step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.steps import rules_of
from vllm_trie.messages import GroupStep, SpeculationBudget
from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.forest import Forest, Layer
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import take_step
from vllm_trie.search.step_result import packed, unpacked
from vllm_trie.worker import best_drafts, forest_walk, kernels, searched_forest
from vllm_trie.worker.forest_nodes import Nodes
from vllm_trie.worker.forest_step import Found, add_layer
from vllm_trie.worker.group_rows import GroupRows
from vllm_trie.worker.searched_forest import SearchedForest

NUM_LAYERS, VOCAB_SIZE, STOP = 3, 300, 7
NUM_GROUPS = 4
RULES = {
    "one beam": rules_of(1, stops=(STOP,)),
    "hf": rules_of(3, stops=(STOP, 8)),
    "tridecode": rules_of(3, "tridecode", (STOP,)),
    "vllm": rules_of(3, "vllm", (STOP,)),
    "log-probabilities": rules_of(3, num_logprobs=2),
}


class Planted:
    """Forests of some groups, and what the target says after every node.

    Args:
        rules: Of all of them.
        seed: Of what the models say; the draft model says about the same as the target.
        is_coarse: Many tokens are as good as others.
        num_groups: G.
    """

    def __init__(self, rules: SelectRules, seed: int, is_coarse: bool, num_groups: int = NUM_GROUPS) -> None:
        self.random, self.is_coarse = torch.Generator().manual_seed(seed), is_coarse
        of_steps = [rules._replace(is_last=number == NUM_LAYERS) for number in range(1, NUM_LAYERS + 1)]
        self.forest_steps, self.logits = list[SearchedForest](), torch.zeros(0, VOCAB_SIZE)
        for number in range(num_groups):
            budget = SpeculationBudget(NUM_LAYERS, 99, [[]], [[]], draft_width=2 * rules.width, rules=of_steps)
            scores, slots = -torch.rand(rules.width, generator=self.random), np.arange(rules.width)
            request: Any = SimpleNamespace(req_id=str(number), prompt_token_ids=[1])
            row_ids = [f"{number}#{row}" for row in slots]
            group = GroupRows(request, row_ids, Beams(scores[None]), torch.zeros(rules.width), slots=slots)
            layer = Layer(slots.tolist(), scores.numpy(), rules.width)
            step, blocks = GroupStep(rules, selects=True, budget=budget), [np.ones((rules.width, 9), np.int32)]
            forest = Forest([0] * rules.width, 99)
            self.forest_steps.append(SearchedForest(step, group, 5, [16], forest, layer, blocks, [[]], {}))
        self.by_node: list[list[torch.Tensor]] = [[] for _ in self.forest_steps]
        for number in range(1, NUM_LAYERS + 2):
            said = [self._says(of_group, one) for of_group, one in zip(self.by_node, self.forest_steps, strict=True)]
            if number <= NUM_LAYERS:
                noise = torch.randn(sum(map(len, said)), VOCAB_SIZE, generator=self.random)
                add_layer(self.forest_steps, torch.cat(said) + 0.3 * noise, number)

    def _says(self, of_group: list[torch.Tensor], forest_step: SearchedForest) -> torch.Tensor:
        logits = 3 * torch.randn(len(forest_step.layer.nodes), VOCAB_SIZE, generator=self.random)
        of_group += (logits := logits.round() if self.is_coarse else logits)
        return logits

    def nodes(self) -> list[Nodes]:
        """Those of all groups, whose logits lie anywhere."""
        counts = [one.forest.num_nodes for one in self.forest_steps]
        order = torch.randperm(sum(counts), generator=self.random)
        every = torch.cat([torch.stack(of_group) for of_group in self.by_node])
        values = torch.empty_like(every)
        values[order] = every
        selector: Any = SimpleNamespace(completes=lambda *_: None)
        rows: Any = SimpleNamespace(places=lambda slots: slots, first_logits=lambda places: places)
        found = []
        for one, at in zip(self.forest_steps, np.split(order.numpy(), np.cumsum(counts)[:-1]), strict=True):
            found.append(Nodes(selector, rows, one, values))
            found[-1].at = at
        return found


def step_by_step(forest_step: SearchedForest, logits: list[torch.Tensor]) -> list[list[list[float]]]:
    """What plain beam search finds of one group, as long as all beams are nodes: parents, tokens and scores by step."""
    nodes, beams, found = [*range(forest_step.num_beams)], forest_step.group.beams, []
    for rules in forest_step.rules:
        step = take_step(rules, torch.stack([logits[node] for node in nodes])[None], beams)
        (on_host,) = unpacked(*(lambda words, layout: (words.numpy(), layout))(*packed(step)))
        found.append([field.tolist() for field in on_host[:3]])
        chosen = zip(on_host.parents.tolist(), on_host.tokens.tolist(), strict=True)
        children = [forest_step.forest.child(nodes[parent], token) for parent, token in chosen]
        if None in children or rules.is_last or on_host.num_beams < len(children):
            break
        nodes, beams = [child for child in children if child is not None], beams.after(step)
    return found


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host sees nothing of what the device has."""
    for module in (forest_walk, searched_forest, best_drafts):
        monkeypatch.setattr(module, "sees", lambda _: False)


def steps_of(found: Found) -> list[list[list[float]]]:
    return [[field.tolist() for field in step[:3]] for step in found.steps]


@pytest.mark.parametrize("is_coarse", [False, True])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_groups_that_walk_together_find_what_each_finds_alone(
    rules: SelectRules, is_coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    for seed in range(4):
        planted = Planted(rules, seed, is_coarse)
        alone = SearchedForest.search(planted.nodes())
        with monkeypatch.context() as patch:
            as_on_a_gpu(patch)
            together = SearchedForest.search(nodes := planted.nodes())
            assert len(forest_walk.walks_of(nodes)) == 1
        for one, own, found, logits in zip(planted.forest_steps, alone, together, planted.by_node, strict=True):
            assert steps_of(found) == steps_of(own)
            assert (found.beams, found.accepted) == (own.beams, own.accepted)
            assert found.tokens.tolist() == found.steps[-1].tokens.tolist()
            assert found.carried.at(found.place).scores[0].tolist() == found.steps[-1].scores.tolist()
            plain = step_by_step(one, logits)
            assert steps_of(found)[: len(plain)] == plain
            num_steps += len(found.steps)
    assert num_steps > 1.5 * 4 * NUM_GROUPS


def test_by_kernels_they_draft_and_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = rules_of(2, "tridecode", (STOP,))
    by_torch = Planted(rules, 1, is_coarse=False, num_groups=2)
    expected = SearchedForest.search(by_torch.nodes())
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "run_on", lambda _: True)
    by_kernels = Planted(rules, 1, is_coarse=False, num_groups=2)
    for own, theirs in zip(by_kernels.forest_steps, by_torch.forest_steps, strict=True):
        assert (own.forest.tokens, own.forest.parents) == (theirs.forest.tokens, theirs.forest.parents)
    for found, theirs in zip(SearchedForest.search(by_kernels.nodes()), expected, strict=True):
        assert (found.beams, found.accepted, len(found.steps)) == (theirs.beams, theirs.accepted, len(theirs.steps))
        for step, plain in zip(found.steps, theirs.steps, strict=True):
            lives = plain.scores > NEVER
            assert step.parents.tolist() == plain.parents.tolist()
            assert step.tokens[lives].tolist() == plain.tokens[lives].tolist()
            assert step.scores == pytest.approx(plain.scores, abs=1e-5)


def test_kernels_rank_drafts_in_total_order_and_what_ends_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    forest_steps = Planted(RULES["hf"], 0, is_coarse=False, num_groups=2).forest_steps
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(kernels, "run_on", lambda _: True)
    logits = torch.randint(-4, 5, (5, VOCAB_SIZE), generator=torch.Generator().manual_seed(0)).float()
    logits[4, 20:] = NEVER
    rows = [np.arange(2), np.arange(2, 5)]
    found = best_drafts.best_drafts(forest_steps, logits, rows, 1)
    logprobs = logits.log_softmax(dim=-1)
    logprobs[:, [STOP, 8]] = NEVER
    for of_group, own in zip(found, rows, strict=True):
        best, tokens = logprobs[own].sort(dim=-1, descending=True, stable=True)
        keep = min(forest_steps[0].budget.draft_width, tokens.shape[1])
        for logprob, token, values, order in zip(*of_group, best, tokens, strict=True):
            going_on = logprob > NEVER
            assert token[going_on][:keep].tolist() == order[values > NEVER][:keep].tolist()
            assert logprob[going_on][:keep] == pytest.approx(values[:keep].numpy(), abs=1e-5)
