"""Runs search steps on a verified forest until one needs a beam that was not drafted."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.messages import Decided, Drafted
from vllm_trie.search.beams import Beams
from vllm_trie.search.rejection import Verified, verified_layers
from vllm_trie.search.rules import Means, SelectRules
from vllm_trie.search.spans import spans
from vllm_trie.search.step import joint_distribution, reported, take_step
from vllm_trie.search.step_result import Step, packed, unpacked
from vllm_trie.search.strategies.drawn import Drawn, best_of, take_cells
from vllm_trie.worker.accept_path import accept_path
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.group_rows import BatchRows
from vllm_trie.worker.select import Selector
from vllm_trie.worker.step_context import StepContext

NO_SLOT = -1
DEAD = np.float32(-np.inf)
ROOT_OF_DEAD = 0  # what stands for the node of a beam that is dead, and which nothing continues


def verify(
    selector: Selector,
    context: StepContext,
    rows: BatchRows,
    logits: torch.Tensor,
    sampled: torch.Tensor,
    num_sampled: np.ndarray,
) -> dict[str, Decided]:
    """Take as many steps as the forest holds of every group that speculates. Waits for the device.

    Args:
        selector: Takes the steps.
        context: Has the forests; the groups' scores and newest tokens are updated.
        rows: Where their rows are.
        logits: [N, V], of all nodes among others, unprocessed.
        sampled: [R, steps] int64, receives the new tokens of every beam's row.
        num_sampled: [2, R], receives how many these are, and how many tokens each row has computed for nothing.

    Returns:
        What was decided, by group.
    """
    decided = {}
    for group_id, forest_step in context.forests.items():
        search = _beam_sampling if isinstance(forest_step.step.rules.strategy, Drawn) else _beam_search
        steps, beams, accepted, forest_step.group.beams = search(_Nodes(selector, rows, forest_step, logits))
        tokens = accept_path(selector.rows, forest_step, steps, beams)
        places = rows.places(forest_step.slots)
        at = async_tensor_h2d(places[: forest_step.num_beams], device=sampled.device, dtype=torch.int64)
        sampled[at, : tokens.shape[1]] = async_tensor_h2d(tokens, device=sampled.device, dtype=torch.int64)
        num_sampled[0, places[: forest_step.num_beams]] = len(steps)
        num_sampled[1, places] = rows.num_logits(places) - num_sampled[0, places]
        forest_step.group.tokens = async_tensor_h2d(steps[-1].tokens, device=sampled.device, dtype=torch.int64)
        forest, num_beams = forest_step.forest, forest_step.num_beams
        size = forest.num_nodes - num_beams, forest.num_row_tokens - num_beams, forest_step.num_layers
        drafted = Drafted(*size, forest_step.budget.draft_width, context.draft_seconds, accepted)
        decided[group_id] = Decided(steps, drafted)
    return decided


class _Nodes:
    """The nodes of one group's forest, and what the target says after each.

    Args:
        selector: Takes steps.
        rows: Of the batch.
        forest_step: The group's.
        logits: [N, V], of the batch, unprocessed.
    """

    def __init__(self, selector: Selector, rows: BatchRows, forest_step: ForestStep, logits: torch.Tensor) -> None:
        self.forest_step = forest_step
        self.forest = forest_step.forest
        self.rules = forest_step.rules
        self._selector = selector
        lengths = np.array([len(path) for path in self.forest.rows])
        starts = lengths.cumsum() - lengths
        index = spans(rows.first_logits(rows.places(forest_step.slots)), lengths)
        if self.rules[0].is_controlled:
            roots = [path[0] for path in self.forest.rows]
            slots, depths = np.repeat(forest_step.slots[roots], lengths), spans(np.zeros_like(lengths), lengths)
            self._logits = selector.processed(rows, logits, index, slots, forest_step.start + 1 + depths, depths)
        else:
            self._logits = logits[async_tensor_h2d(index, device=logits.device, dtype=torch.int64)]
        # By node: where its logits are, in the first row that leads through it.
        depth_of = [path.index(node) for node, path in enumerate(map(self.forest.path, range(self.forest.num_nodes)))]
        self._at = starts[self.forest.row_of] + np.array(depth_of)

    def logits(self, nodes: list[int]) -> torch.Tensor:
        """[nodes, V]."""
        at = async_tensor_h2d(self._at[nodes], device=self._logits.device, dtype=torch.int64)
        return self._logits[at]

    def step(self, rules: SelectRules, nodes: list[int], beams: Beams) -> tuple[Step[np.ndarray], Beams]:
        """One step of the search from beams at `nodes`, and what its beams carry."""
        beams = self.forest_step.beams_at(nodes, beams)
        step = take_step(rules, self.logits(nodes)[None], beams, self.means(rules, nodes))
        return _on_host(step), beams.after(step)

    def means(self, rules: SelectRules, nodes: list[int]) -> Means:
        """What a step from beams at `nodes` is taken with."""

        def history(_: int, beam: int) -> tuple[list[int], list[int]]:
            root, *path = self.forest.path(nodes[beam])
            prompt, generated = self._selector.history(self.forest_step.group, root)
            return prompt, generated + [self.forest.tokens[node] for node in path]

        return Means(completes=self._selector.completes(rules, history))


def _on_host(step: Step) -> Step:
    tensor, layout = packed(step)
    (of_group,) = unpacked(tensor.cpu().numpy(), layout)
    return of_group


class Found(NamedTuple):
    """What came of a forest."""

    steps: list[Step[np.ndarray]]
    beams: list[list[int]]  # the nodes of the beams before each step
    accepted: list[int]  # how many drafts each accepted
    carried: Beams  # by the beams after the last


def _beam_search(nodes: _Nodes) -> Found:
    """Plain beam search's own steps, until one depends on a beam that was not drafted.

    A beam that was not drafted bounds the score of everything that descends from it: as long as whatever lives on is
    better, no step depends on it.
    """
    forest, carried = nodes.forest, nodes.forest_step.group.beams
    steps, beams, accepted = list[Step](), [list(range(nodes.forest_step.num_beams))], [0]
    before, unseen = carried, DEAD
    for rules in nodes.rules:
        step, after = nodes.step(rules, beams[-1], before)
        if unseen > DEAD and not (step.num_beams == rules.width and step.scores.min() > unseen):
            break
        steps.append(step)
        carried = after
        chosen = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
        drafts = [forest.child(beams[-1][parent], token) for parent, token in chosen]
        is_seen = np.array([draft is not None for draft in drafts])
        may_go_on = is_seen.any() if rules.ranks_together else is_seen.all()
        if rules is nodes.rules[-1] or rules.is_last or step.num_beams < len(drafts) or not may_go_on:
            break
        unseen = step.scores[~is_seen].max(initial=DEAD)
        before = after if is_seen.all() else after.only(torch.from_numpy(is_seen).to(after.scores.device)[None])
        beams.append([ROOT_OF_DEAD if draft is None else draft for draft in drafts])
        accepted.append(int(is_seen.sum()))
    return Found(steps, beams[: len(steps)], accepted[: len(steps)], carried)


def _beam_sampling(nodes: _Nodes) -> Found:
    """Layers that are distributed as beam sampling's, until one was not drafted in full."""
    forest_step = nodes.forest_step
    assert forest_step.rng is not None
    steps, beams, accepted = list[Step](), [list(range(forest_step.num_beams))], list[int]()
    slots_of_rows = np.arange(forest_step.num_beams)  # by row of the distribution: the beam that it continues
    before = forest_step.group.beams
    scores = before.scores[0]
    logprobs: torch.Tensor  # of the beams before the newest step
    newest: Step[torch.Tensor]

    def target(verified: Verified | None) -> torch.Tensor:
        """The target's joint distribution; after the first layer with a row for each draft of the layer before."""
        nonlocal before, logprobs
        before = forest_step.beams_at(beams[-1], Beams(scores[None]))
        joint, of_beams = joint_distribution(nodes.rules[len(steps)], nodes.logits(beams[-1])[None], before)
        logprobs = of_beams[0]
        of_rows = joint[0][np.maximum(slots_of_rows, 0)]
        of_rows[slots_of_rows < 0] = 0.0
        return of_rows

    def take(cells: np.ndarray) -> tuple[Step, np.ndarray]:
        nonlocal newest
        rules, drawn = nodes.rules[len(steps)], torch.from_numpy(cells).to(logprobs.device)
        choice, slots = take_cells(rules, logprobs, scores, drawn, nodes.means(rules, beams[-1]))
        newest = reported(rules, choice)
        return _on_host(newest), slots.cpu().numpy()

    for verified in verified_layers(forest_step.drafts, target, forest_step.draft_rules, forest_step.rng):
        rows, tokens = np.divmod(verified.cells, logprobs.shape[-1])
        step, slots = take(slots_of_rows[rows] * logprobs.shape[-1] + tokens)
        steps.append(step)
        accepted.append(int((verified.drafts >= 0).sum()))
        if not verified.is_complete or step.num_beams == 0 or nodes.rules[len(steps) - 1].is_last:
            break
        layer = forest_step.nodes[len(steps) - 1]
        slots_of_rows, scores = np.full(len(layer), NO_SLOT), torch.from_numpy(step.scores).to(logprobs.device)
        slots_of_rows[verified.drafts] = slots
        at = {int(slot): layer[draft] for slot, draft in zip(slots, verified.drafts, strict=True) if slot >= 0}
        beams.append([at.get(slot, ROOT_OF_DEAD) for slot in range(len(step.scores))])
    if not steps:  # nothing is possible any more: the search ends
        steps.append(take(np.zeros(0, dtype=np.int64))[0])
        accepted.append(0)
    strategy = forest_step.step.rules.strategy
    if not (isinstance(strategy, Drawn) and strategy.keeps_one):
        return Found(steps, beams[: len(steps)], accepted, before.after(newest))
    kept = best_of(newest)
    return Found([*steps[:-1], _on_host(kept)], beams[: len(steps)], accepted, before.after(kept))
