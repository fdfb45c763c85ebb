"""A forest that is searched: drafts are the draft model's own beams, and beam search goes on where they lead."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.forest import grow
from vllm_trie.search.step import draft_logprobs
from vllm_trie.search.step_result import Step
from vllm_trie.worker.forest_nodes import ROOT_OF_DEAD, Nodes
from vllm_trie.worker.forest_step import ForestStep, Found

DEAD = np.float32(-np.inf)


@dataclass(slots=True)
class SearchedForest(ForestStep):
    """The forest of a beam search."""

    def grow(self, logits: torch.Tensor, number: int) -> None:
        """See `ForestStep`."""
        before = self.beams_at(self.layer.nodes, Beams(self.layer.scores[None]))
        (logprobs,) = draft_logprobs(self.rules[number - 1], logits[None], before)
        self.forest.open(math.sqrt(number / self.budget.num_layers))  # or the first layers would take all
        self.layer = grow(self.forest, self.layer, logprobs, self.num_beams, self.budget.draft_width)

    def search(self, nodes: Nodes) -> Found:
        """Plain beam search's own steps, until one depends on a beam that was not drafted.

        A beam that was not drafted bounds the score of everything that descends from it: as long as whatever lives on
        is better, no step depends on it.
        """
        carried = self.group.beams
        steps, beams, accepted = list[Step](), [list(range(self.num_beams))], [0]
        before, unseen = carried, DEAD
        for rules in self.rules:
            step, after = nodes.step(rules, beams[-1], before)
            if unseen > DEAD and not (step.num_beams == rules.width and step.scores.min() > unseen):
                break
            steps.append(step)
            carried = after
            chosen = zip(step.parents.tolist(), step.tokens.tolist(), strict=True)
            drafts = [self.forest.child(beams[-1][parent], token) for parent, token in chosen]
            is_seen = np.array([draft is not None for draft in drafts])
            may_go_on = is_seen.any() if rules.ranks_together else is_seen.all()
            if rules is self.rules[-1] or rules.is_last or step.num_beams < len(drafts) or not may_go_on:
                break
            unseen = step.scores[~is_seen].max(initial=DEAD)
            before = after if is_seen.all() else after.only(torch.from_numpy(is_seen).to(after.scores.device)[None])
            beams.append([ROOT_OF_DEAD if draft is None else draft for draft in drafts])
            accepted.append(int(is_seen.sum()))
        return Found(steps, beams[: len(steps)], accepted[: len(steps)], carried)
