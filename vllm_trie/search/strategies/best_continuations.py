"""Beam search where rows have few continuations, as along a catalog: the best go on or, if complete, finish."""

from __future__ import annotations

from functools import partial

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.constraint import Constraint, ConstraintOutcomes
from vllm_trie.search.devices import NEVER, is_searched_on_host
from vllm_trie.search.filters import NO_PRUNING, filtered_search_logprobs, prune_search_logprobs
from vllm_trie.search.parts import in_search_parts, search_parts
from vllm_trie.search.rank import SearchCandidates, rank_search_candidates
from vllm_trie.search.rules import SearchDecision, SearchInputs, SearchRules, search_candidates_going_on
from vllm_trie.search.step_result import SearchStepResult
from vllm_trie.search.strategies.few_ends import few_ends_for_strategy, most_room_for_strategy


def best_strategy_continuations(
    rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs, sparse: Constraint
) -> SearchDecision:
    """The best continuations become beams, and those among the best b that are complete finish.

    A continuation may do both, where an item is the beginning of another: so what finishes and what goes on are ranked
    separately, each with its own boosts. A row's few children are ranked like a vocabulary of that size. With
    `rules.num_ending`, that many may finish, and the host decides which do.

    Args:
        sparse: The constraint that lists continuations.
    """
    (num_rows, vocab_size), width, scores = logprobs.shape[1:], rules.num_beams or rules.width, beams.scores
    num_ending = rules.num_ending or width
    boosts = inputs.boosts if inputs.boosts is None else inputs.boosts.expand_as(logprobs)
    most = sparse.most_continuations(beams.states[sparse], vocab_size, beams.length)
    # Where stop tokens end hypotheses, all else goes on; otherwise a row's best children may all be mere ends.
    most_of_row = num_ending + sparse.num_ends if boosts is None and sparse.num_ends else None

    def of_rows(
        logprobs: torch.Tensor, beams: SearchBeams, boosts: torch.Tensor | None = None, *, are_over: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found = sparse.continuations(beams.states[sparse], most)
        tokens, targets, ends = found.tokens, found.targets, None
        if inputs.level is not None:
            found = found._replace(tokens=torch.searchsorted(inputs.level, tokens).clamp_(max=vocab_size - 1))
        if has_end_boosts(are_over):
            ends = sparse.end(targets) if are_over else sparse.end(targets) > sparse.go_on(targets)  # that is, and not
        own = sparse.logprobs_of(beams.narrow(logprobs, done=sparse), found)
        del found  # frees memory
        allowed = filtered_search_logprobs(own, rules.filters, most_of_row)
        if boosts is not None:
            added = boosts.gather(-1, tokens)
            added = added if ends is None else _strategy_end_boosts(logprobs, beams, tokens).where(ends, added)
            allowed = allowed + added
        fields = allowed, tokens.int(), targets
        return few_ends_for_strategy(fields, beams.scores, sparse.num_ends, width, rules.pruning)

    def has_end_boosts(are_over: bool) -> bool:
        # Without pruning, what only ends is left out anyway unless it is over.
        return inputs.has_pending and (are_over or rules.pruning != NO_PRUNING)

    def ranked(are_over: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[G, r, B], the scores of continuations, their tokens and targets.

        Args:
            are_over: All that end compete as ended hypotheses; otherwise only those that do not go on do.
        """
        shape = *scores.shape, most + most_room_for_strategy(sparse.num_ends, width, rules.pruning)
        of_each = partial(of_rows, are_over=are_over)
        allowed, tokens, targets = in_search_parts(
            shape, of_each, logprobs, beams, *([] if boosts is None else [boosts])
        )
        return prune_search_logprobs(allowed, scores, rules.pruning), tokens, targets

    def outcomes(candidates: SearchCandidates[torch.Tensor]) -> ConstraintOutcomes:
        return sparse.outcomes(_strategy_values_at(targets, candidates))

    allowed, tokens, targets = ranked(are_over=True)
    over = live = _best_strategy_places(allowed, scores, num_ending)
    of_over = of_live = outcomes(over)
    ends = (of_over.is_complete if rules.is_last else of_over.ends) & (not rules.bar_ends)
    finished = over._replace(tokens=_strategy_values_at(tokens, over).long(), scores=over.scores.where(ends, NEVER))
    is_one_ranking = is_searched_on_host(scores.device) and not inputs.has_pending
    if not (is_one_ranking and bool((of_over.goes_on | (over.scores == NEVER)).all())):
        if inputs.has_pending:
            del allowed, tokens, targets
            allowed, tokens, targets = ranked(are_over=False)
        for rows in search_parts(allowed.shape):
            allowed[:, rows].masked_fill_(~sparse.go_on(targets[:, rows]), NEVER)
        live = _best_strategy_places(allowed, scores, width)
        of_live = outcomes(live)
    by_slot = inputs.select_next(live, search_candidates_going_on(rules, live, ~of_live.goes_on), rules.width, num_rows)
    states = {sparse: outcomes(by_slot).states}
    by_slot = by_slot._replace(tokens=_strategy_values_at(tokens, by_slot).long())
    return SearchDecision(SearchStepResult(*by_slot, finished, states=states), logprobs)


def _strategy_end_boosts(logprobs: torch.Tensor, beams: SearchBeams, tokens: torch.Tensor) -> torch.Tensor:
    """[G, r, B], what tokens add to hypotheses that end with them."""
    boosts = beams.boosts(logprobs, is_end=True)
    assert boosts is not None
    return boosts.gather(-1, tokens)


def _strategy_values_at(values: torch.Tensor, candidates: SearchCandidates[torch.Tensor]) -> torch.Tensor:
    """The values [G, r, B] of continuations at the places of candidates [G, K]."""
    return values.flatten(1).gather(1, candidates.tokens)


def _best_strategy_places(allowed: torch.Tensor, scores: torch.Tensor, count: int) -> SearchCandidates[torch.Tensor]:
    """The best `count` of continuations [G, r, B]; `tokens` are their places among all of a group."""
    ranked = rank_search_candidates(allowed, scores, count)
    return ranked._replace(tokens=ranked.parents * allowed.shape[-1] + ranked.tokens)
