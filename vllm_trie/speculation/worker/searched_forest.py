"""A searched forest: drafts are the draft model's own beams, and beam search continues where they lead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.devices import is_searched_on_host
from vllm_trie.search.step_result import SearchStepResult, unpack_search_steps
from vllm_trie.speculation.search.forest import draft_forest_layer
from vllm_trie.speculation.worker.best_drafts import best_drafts_of_layer
from vllm_trie.speculation.worker.forest_nodes import ROOT_OF_DEAD, VerifiedForestNodes
from vllm_trie.speculation.worker.forest_step import ForestOutcome, ForestStep
from vllm_trie.speculation.worker.forest_walk import VerifyingWalk, verifying_walks_of

DEAD = np.float32(-np.inf)


@dataclass(slots=True)
class SearchedForestStep(ForestStep):
    """The forest of a beam search."""

    @classmethod
    def grow(cls, growing: Sequence[tuple[ForestStep, np.ndarray]], logits: torch.Tensor, number: int) -> None:
        """See `ForestStep`. For host-readable devices; on others, such forests grow by `device_forests`."""
        forest_steps = [forest_step for forest_step, _ in growing]
        best = best_drafts_of_layer(forest_steps, logits, [rows for _, rows in growing], number)
        for forest_step, of_group in zip(forest_steps, best, strict=True):
            forest, budget = forest_step.forest, forest_step.budget
            forest.open(forest_step.num_open(number))
            forest_step.layer = draft_forest_layer(
                forest, forest_step.layer, of_group, forest_step.num_beams, budget.draft_width
            )

    @classmethod
    def search(cls, nodes: Sequence[VerifiedForestNodes]) -> list[ForestOutcome]:
        """See `ForestStep`. Waits for the device once, for all groups together, and in each step for stop strings."""
        walks = verifying_walks_of(nodes)
        found = dict[VerifiedForestNodes, ForestOutcome]()
        for walk, steps in zip(walks, _searched_forests_on_host(walks), strict=True):
            for place, (of_group, of_steps) in enumerate(zip(walk.nodes, steps, strict=True)):
                assert isinstance(of_group.forest_step, SearchedForestStep)
                found[of_group] = of_group.forest_step.follow(walk, place, of_steps)
        return [found[of_group] for of_group in nodes]

    def follow(self, walk: VerifyingWalk, place: int, taken: Iterable[SearchStepResult[np.ndarray]]) -> ForestOutcome:
        """Plain beam search's own steps, until one depends on a beam that was not drafted.

        A beam that was not drafted bounds the score of its descendants: as long as everything that lives on is better,
        no step depends on it.
        """
        steps, beams, accepted = list[SearchStepResult](), [list(range(self.num_beams))], [0]
        unseen = DEAD
        for rules, step in zip(self.rules, taken, strict=False):
            if unseen > DEAD and not (step.num_beams == rules.width and step.scores.min() > unseen):
                break
            steps.append(step)
            chosen = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
            drafts = [self.forest.child(beams[-1][parent], token) for parent, token in chosen]
            is_seen = np.array([draft is not None for draft in drafts])
            may_go_on = is_seen.any() if rules.ranks_together else is_seen.all()
            if len(steps) == len(self.rules) or rules.is_last or step.num_beams < len(drafts) or not may_go_on:
                break
            unseen = step.scores[~is_seen].max(initial=DEAD)
            beams.append([ROOT_OF_DEAD if draft is None else draft for draft in drafts])
            accepted.append(int(is_seen.sum()))
        last = walk.steps[len(steps) - 1]
        newest = last.taken.going.tokens[place].long()
        return ForestOutcome(steps, beams[: len(steps)], accepted[: len(steps)], newest, last.after, place)


def _searched_forests_on_host(walks: Sequence[VerifyingWalk]) -> Iterator[list[Iterable[SearchStepResult[np.ndarray]]]]:
    """By walk and group, the steps: from a device, all by one copy; on the host, one after the other."""
    if is_searched_on_host(walks[0].device):
        for walk in walks:  # not all at once: a walk holds its logits until its steps are dropped
            yield [(unpack_search_steps(taken.words.numpy(), taken.layout)[0] for taken in walk)]
        return
    taken = [[*walk] for walk in walks]
    words = torch.cat([step.words.flatten() for of_walk in taken for step in of_walk]).cpu().numpy()
    at = 0
    for of_walk in taken:
        by_step = []
        for step in of_walk:
            size = step.words.numel()
            by_step.append(unpack_search_steps(words[at : at + size].reshape(step.words.shape), step.layout))
            at += size
        yield [*zip(*by_step, strict=True)]
