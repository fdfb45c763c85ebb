"""Forests without a draft model: how the newest tokens of beams continued in the prompt and in the group's histories.

Nothing is computed on the device. Where nothing is found, a group takes a plain step.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from vllm_trie.messages import GroupStep
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rules import SearchRules
from vllm_trie.speculation.search.draft_lookup import DraftPaths, DraftPromptIndex, NGrams, look_up_drafts
from vllm_trie.speculation.worker.draft import Drafter, Forests
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.speculation.worker.roots import ForestRoots, forest_roots_of
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.step_context import RunnerStepContext

MOST_OF_BEAM = 4  # different continuations of a beam
NO_TOKEN = -1


class LookupDrafter(Drafter):
    """Drafts from the tokens that the group already has."""

    @cached_property
    def _ngrams(self) -> NGrams:
        config = self._runner.speculative_config
        return NGrams(config.prompt_lookup_min, config.prompt_lookup_max)

    def forests(self, context: RunnerStepContext, groups: dict[str, GroupRows]) -> Forests:
        """See `Drafter`."""
        forests, drafting = dict[str, ForestStep](), [groups[group_id] for group_id in context.speculating]
        roots = forest_roots_of(self._selector.rows, drafting, [len(group.prompt) for group in drafting])
        for group_id, group, of_group in zip(context.speculating, drafting, roots, strict=True):
            step = context.steps[group_id]
            found, scores = self._look_up(step, group, of_group), of_group.scores
            found.tokens[scores[found.beams] == NEVER] = NO_TOKEN
            if _drafts_may_lead_on(found, group.rules, scores):
                forests[group_id] = self._make_forest(step, group, of_group)
                forests[group_id].add_layers(found)
        self.compare(forests)
        return forests

    def _look_up(self, step: GroupStep, group: GroupRows, roots: ForestRoots) -> DraftPaths:
        """Possible continuations of a group's beams. Waits for the device if there are constraints."""
        rows, budget = self._selector.rows, step.budget
        assert budget is not None
        if group.prompt_index is None:
            group.prompt_index = DraftPromptIndex(group.prompt)
        end = rows.num_computed(group) + 1
        found = look_up_drafts(group.prompt_index, roots.tokens, self._ngrams, budget.num_layers, MOST_OF_BEAM)
        found.tokens[group.rules.stops.lead_nowhere(found.tokens)] = NO_TOKEN
        beams = self._selector.row_beams.before_drafts(group.rules, group, end, budget.num_layers)
        if beams.states and len(found.beams):
            self._keep_to_constraints(found, beams)
        return found

    def _keep_to_constraints(self, found: DraftPaths, beams: SearchBeams) -> None:
        """Ends continuations where they leave what the constraints allow."""
        paths, tokens = map(self._selector.rows.upload, found)
        leads_on, beams = torch.ones_like(tokens, dtype=torch.bool), beams.gather(paths[None])
        for depth, of_layer in enumerate(tokens.clamp(min=0).T):
            leads_on[:, depth] = beams.lead_on(of_layer[None])[0]
            beams = beams.advance(of_layer[None])
        found.tokens[~leads_on.cpu().numpy()] = NO_TOKEN


def _drafts_may_lead_on(found: DraftPaths, rules: SearchRules, scores: np.ndarray) -> bool:
    """Whether these drafts may lead to a second step: the best beam has one and, if all beams count, so has each.

    Args:
        scores: [b], of the beams; `NEVER` for a dead one.
    """
    has_draft = np.zeros(len(scores), dtype=bool)
    has_draft[found.beams[found.tokens[:, 0] >= 0]] = True
    return bool(has_draft[scores.argmax()] and (rules.ranks_together or has_draft[scores > NEVER].all()))
