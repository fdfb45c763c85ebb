"""Beam search: the best continuations go on, or finish by the rules of transformers, vLLM or the trie paper."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_trie.search import search_part_on_demand
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER, search_constant
from vllm_trie.search.filters import (
    NO_PRUNING,
    filtered_search_logprobs,
    prune_search_logprobs,
    pruned_search_logprobs,
)
from vllm_trie.search.parts import in_search_parts
from vllm_trie.search.rank import (
    SearchCandidates,
    SearchRankingLimits,
    pick_search_candidates,
    rank_search_candidates,
    search_candidates_in_order,
)
from vllm_trie.search.rules import (
    SearchDecision,
    SearchInputs,
    SearchPhase,
    SearchRules,
    SearchSizes,
    SearchStrategy,
    first_search_candidates,
    search_candidates_alive,
    search_candidates_ended,
    search_candidates_going_on,
    search_candidates_stopping,
    search_continuations_by_row,
)
from vllm_trie.search.step_result import SearchStepResult

FEW_STOPS = 3  # tokens: up to this many, one longer ranking of all continuations is faster than two


class _BestStrategy(NamedTuple):
    semantics: str = "hf"
    eos_score_factor: tuple[int, float] | None = None


class BestStrategy(_BestStrategy, SearchStrategy):
    """Beam search: the best continuations go on.

    Args:
        semantics: Whose rules decide what finishes: "hf", "vllm" or "tridecode".
        eos_score_factor: A token, and the factor by which its score is multiplied for comparisons.
    """

    @property
    def has_one_ranking(self) -> bool:
        """See `SearchStrategy`."""
        return self.semantics != "vllm"

    def in_phase(self, phase: SearchPhase) -> BestStrategy:
        """See `SearchStrategy`."""
        return self._replace(eos_score_factor=phase.eos_score_factor)

    def sizes(self, rules: SearchRules, num_rows: int) -> SearchSizes:
        """See `SearchStrategy`."""
        stops, width = rules.stops, rules.width
        num_going, num_stops = rules.num_beams or width, len(stops.ending_token_ids)
        if self.semantics == "hf" or rules.are_sparse:
            return SearchSizes(width, rules.num_ending or num_going, num_rows)
        if self.semantics == "tridecode":
            return SearchSizes(width, num_going + width, num_rows)
        num_stopping = num_rows * 2 * width if stops.may_complete else min(width, num_rows * num_stops)
        return SearchSizes(width, num_stopping + (num_going if rules.is_last else 0), num_rows)

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """See `SearchStrategy`."""
        if beams.states and (sparse := beams.sparse) is not None:
            best_strategy_continuations = search_part_on_demand(
                "strategies.best_continuations:best_strategy_continuations"
            )
            return best_strategy_continuations(rules, logprobs, beams, inputs, sparse)
        scores, completes, width = beams.scores, inputs.completes, rules.num_beams or rules.width
        num_rows, vocab_size = logprobs.shape[1:]
        num_stops, count = len(rules.stops.ending_token_ids), width + rules.width
        while True:
            of_row = max(count + num_stops, 2 * rules.width)
            allowed = _allowed_by_strategy(rules, logprobs, beams, inputs, of_row)
            candidates = self._ranked(rules, allowed, scores, count)
            stops = search_candidates_stopping(rules, candidates, completes, vocab_size)
            if completes is None or count >= num_rows * vocab_size or completes.num_going_on >= width:
                break
            count *= 2  # so many complete a stop string that too few would go on
        if self.semantics != "vllm":
            num_finished = self.sizes(rules, num_rows).num_finished
            finished = self._finished(rules, candidates, stops, num_finished)
        else:
            finished = search_part_on_demand("strategies.own_stops:own_strategy_stops")(
                rules, allowed, scores, completes
            )
            if self.eos_score_factor is not None:
                candidates = self._ranked_with_factor(rules, allowed, scores, candidates)
                stops = search_candidates_stopping(rules, candidates, completes, vocab_size)
            if rules.is_last:
                lives = search_candidates_alive(candidates, stops)
                at_last = search_candidates_ended(rules, candidates, stops, lives)
                finished = SearchCandidates.join([finished, first_search_candidates(at_last, lives, width)])
        by_slot = inputs.select_next(
            candidates, search_candidates_going_on(rules, candidates, stops), rules.width, num_rows
        )
        return SearchDecision(SearchStepResult(*by_slot, finished), logprobs)

    def _finished(
        self, rules: SearchRules, candidates: SearchCandidates[torch.Tensor], stops: torch.Tensor, count: int
    ) -> SearchCandidates[torch.Tensor]:
        """The candidates that finish; in the last step, also those that would go on.

        Args:
            count: As many as may finish, or more.
        """
        if self.semantics == "hf":  # what stops finishes among the best b; source: transformers 5.19 `_beam_search`
            parents, tokens, scores = candidates
            best = SearchCandidates(parents[:, :count], tokens[:, :count], scores[:, :count])
            return search_candidates_ended(rules, best, stops[:, :count])
        # "tridecode": what ranks before the b-th that goes on; source: the trie paper's published code
        may_end = (~stops).cumsum(dim=1) + stops.int() <= (rules.num_beams or rules.width)
        if len(rules.stops.ending_token_ids) > 1 or rules.stops.strings:  # a pool can keep no more than b that stop
            may_end &= (stops.cumsum(dim=1) <= rules.width) | ~stops
            return first_search_candidates(search_candidates_ended(rules, candidates, stops, may_end), may_end, count)
        return search_candidates_ended(rules, candidates, stops, may_end)

    def _ranked(
        self, rules: SearchRules, allowed: torch.Tensor, scores: torch.Tensor, count: int
    ) -> SearchCandidates[torch.Tensor]:
        """The best of what goes on and, of what ends, as many as may finish: `count` in all, or a few more.

        In vLLM's semantics, which rank what finishes separately, it may be only what goes on.
        """
        stops, as_vllm, factor = rules.stops, self.semantics == "vllm", self.eos_score_factor
        num_stops, leaves_one_out = len(stops.ending_token_ids), as_vllm and factor is not None
        if num_stops <= FEW_STOPS and not leaves_one_out:
            return rank_search_candidates(allowed, scores, count + max(num_stops - 1, 0) * rules.width)
        if not as_vllm:
            apart = []  # what goes on and what ends, so that the cost does not depend on the number of stop tokens
            for most, ends in ((count - rules.width, False), (rules.width, True)):
                among = SearchRankingLimits(stops.biases(allowed.shape[-1], allowed.device, ends=ends))
                apart.append(rank_search_candidates(allowed, scores, most, among))
            return search_candidates_in_order(SearchCandidates.join(apart), allowed.shape[-1])
        others = stops.biases(allowed.shape[-1], allowed.device, ends=False)
        if factor is not None:
            others[factor[0] : factor[0] + 1] = NEVER
        return rank_search_candidates(allowed, scores, count, SearchRankingLimits(others))

    def _ranked_with_factor(
        self, rules: SearchRules, allowed: torch.Tensor, scores: torch.Tensor, others: SearchCandidates[torch.Tensor]
    ) -> SearchCandidates[torch.Tensor]:
        """Re-ranks continuations: one token competes by its score times a factor, and only among a row's best.

        Args:
            others: The best continuations without that token.
        """
        assert self.eos_score_factor is not None
        token_id, factor = self.eos_score_factor
        tokens = search_constant((token_id,), allowed.device)
        logprobs = search_part_on_demand("strategies.own_stops:own_strategy_logprobs")(rules, allowed, tokens)
        both = SearchCandidates.join(
            [others, search_continuations_by_row(tokens.expand_as(logprobs), logprobs + scores[..., None])]
        )
        rank_scores = both.scores.double()
        rank_scores = torch.where(both.tokens == token_id, factor * rank_scores, rank_scores)
        return pick_search_candidates(both, rank_scores.argsort(dim=1, descending=True, stable=True))


def _allowed_by_strategy(
    rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs, count: int
) -> torch.Tensor:
    """[G, r, V], log-probabilities with boosts, -inf for what constraints, filters and pruning leave out.

    Args:
        count: How many continuations of a row may matter.

    Returns:
        A new tensor, or `logprobs` itself if none of these apply.
    """
    allowed, boosts = logprobs, inputs.boosts

    def of_rows(logprobs: torch.Tensor, beams: SearchBeams, boosts: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        allowed = filtered_search_logprobs(beams.narrow(logprobs), rules.filters, count if boosts is None else None)
        return (allowed if boosts is None else allowed + boosts,)

    if boosts is not None or beams.are_narrowed or rules.filters.leave_out(logprobs.shape[-1]):
        of_parts = logprobs, beams, *([] if boosts is None else [boosts.expand_as(logprobs)])
        (allowed,) = in_search_parts(logprobs.shape, of_rows, *of_parts)
    if rules.pruning == NO_PRUNING:
        return allowed
    prune = pruned_search_logprobs if allowed is logprobs else prune_search_logprobs
    return prune(allowed, beams.scores, rules.pruning)
