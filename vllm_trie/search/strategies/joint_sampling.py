"""Beam sampling: the next beams are sampled from one joint distribution over all continuations of all beams.

Source: DSBD paper. Plain steps sample by this strategy; forests sample drafts from the same distribution, verify them
against it (`speculation.search.rejection`), then continue by `take_strategy_cells`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER, search_arange
from vllm_trie.search.rank import SearchCandidates, choose_search_slots, in_search_slots
from vllm_trie.search.rules import (
    SearchDecision,
    SearchInputs,
    SearchRules,
    SearchSizes,
    SearchStrategy,
    search_candidates_alive,
    search_candidates_ended,
    search_candidates_stopping,
)
from vllm_trie.search.sampling import joint_search_probabilities, sample_search_continuations, search_generator
from vllm_trie.search.step_result import SearchStepResult, SearchTokenLogprobs


class _JointSamplingStrategy(NamedTuple):
    replacement: bool
    min_width: int
    threshold: float | None
    keeps_one: bool
    accept_top_k: int | None = None


class JointSamplingStrategy(_JointSamplingStrategy, SearchStrategy):
    """Beam sampling: the next beams are sampled from one joint distribution over all continuations of all beams.

    Args:
        replacement: The same continuation may be sampled more than once.
        min_width: Beams of a verified layer, at least.
        threshold: The probability with which `min_width` beams must be accepted; None: all beams, always.
        keeps_one: Of the beams after one forward pass of the target, only the best goes on.
        accept_top_k: Accept drafts among this many best continuations, which is not exact; None: exactly.
    """

    scales_logits = False  # the temperature divides cumulative sums instead

    def sizes(self, rules: SearchRules, num_rows: int) -> SearchSizes:
        """See `SearchStrategy`."""
        sizes = super().sizes(rules, num_rows)
        return sizes._replace(num_beams=1) if self.keeps_one else sizes

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """See `SearchStrategy`."""
        p = joint_search_probabilities(beams.scores, beams.narrow(logprobs), rules.filters)
        rngs = [search_generator(*key) for key in inputs.sampling_keys]
        sampled = sample_search_continuations(p.flatten(1), rules.width, self.replacement, rngs)
        found = _sampled_strategy_continuations(logprobs, beams.scores, *sampled)
        stops = search_candidates_stopping(rules, found, inputs.completes, logprobs.shape[-1])
        by_slot = inputs.select_next(found, search_candidates_alive(found, stops), rules.width, beams.scores.shape[1])
        return SearchDecision(
            self.going_on(SearchStepResult(*by_slot, search_candidates_ended(rules, found, stops))), logprobs
        )

    def going_on(self, step: SearchStepResult[Any]) -> SearchStepResult[Any]:
        """What goes on after a forward pass of the target: all beams, or the best one; on the device or on the host."""
        return best_beam_of_strategy(step) if self.keeps_one else step


def take_strategy_cells(
    rules: SearchRules, logprobs: torch.Tensor, scores: torch.Tensor, cells: torch.Tensor, inputs: SearchInputs
) -> tuple[SearchDecision, torch.Tensor]:
    """Continues with cells sampled for one group from its joint distribution.

    Args:
        logprobs: [I, V], as `joint_search_distribution` returns them.
        scores: [I].
        cells: [K] int64, parent * V + token, at most b.

    Returns:
        The decision for the group, and the slot of each cell, [K]; -1 where it finishes.
    """
    num_sampled = len(cells)
    cells = torch.nn.functional.pad(cells, (0, rules.width - num_sampled))[None]
    is_possible = search_arange(rules.width, cells.device) < num_sampled
    found = _sampled_strategy_continuations(logprobs[None], scores[None], cells, is_possible)
    stops = search_candidates_stopping(rules, found, inputs.completes, logprobs.shape[-1])
    chosen = choose_search_slots(found.parents, search_candidates_alive(found, stops), rules.width)
    step = SearchStepResult(*in_search_slots(found, chosen, len(scores)), search_candidates_ended(rules, found, stops))
    takes = chosen[0, :, None] == search_arange(num_sampled, cells.device)  # [b, K]
    slots = torch.where(takes.any(dim=0), takes.int().argmax(dim=0), -1)
    return SearchDecision(step, logprobs[None]), slots


def best_beam_of_strategy(step: SearchStepResult[Any]) -> SearchStepResult[Any]:
    """The step with only the best beam of each group going on; on the device or on the host."""
    along: Any = np.take_along_axis if isinstance(step.scores, np.ndarray) else torch.take_along_dim
    best = step.scores.argmax(-1, keepdims=True)
    parents, tokens, scores = (along(field, best, -1) for field in step[:3])
    reported = step.beam_logprobs and SearchTokenLogprobs(*(along(field, best, -1) for field in step.beam_logprobs))
    return step._replace(parents=parents, tokens=tokens, scores=scores, beam_logprobs=reported)


def _sampled_strategy_continuations(
    logprobs: torch.Tensor, scores: torch.Tensor, cells: torch.Tensor, is_possible: torch.Tensor
) -> SearchCandidates[torch.Tensor]:
    """Continuations at `cells` [G, K], parent * V + token, in the order sampled."""
    vocab_size = logprobs.shape[-1]
    parents = cells // vocab_size
    total = logprobs.flatten(1).gather(1, cells) + scores.gather(1, parents)
    return SearchCandidates(parents, cells % vocab_size, total.where(is_possible, NEVER))
