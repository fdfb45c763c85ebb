"""What finishes in vLLM's own beam search: those of each beam's best 2b continuations that stop.

Source: vLLM 0.32 `BeamSearchOfflineMixin._beam_search_step`.
"""

from __future__ import annotations

import torch

from vllm_trie.search.constraints.stops import StopStringConstraint
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import SearchCandidates, SearchRankingLimits, rank_search_candidates, search_topk
from vllm_trie.search.rules import SearchRules, search_candidates_stopping, search_continuations_by_row


def own_strategy_stops(
    rules: SearchRules, allowed: torch.Tensor, scores: torch.Tensor, completes: StopStringConstraint | None
) -> SearchCandidates[torch.Tensor]:
    """The continuations that stop among each row's own best 2b, whatever their rank among all; the others have -inf.

    Without stop strings, they compete by sums alone, so the best b are enough.
    """
    num_rows, vocab_size = allowed.shape[1:]
    if completes is not None:
        own_best, tokens = search_topk(allowed, min(2 * rules.width, vocab_size))
        own = search_continuations_by_row(tokens, own_best + scores[..., None])
        return own._replace(
            scores=own.scores.where(search_candidates_stopping(rules, own, completes, vocab_size), NEVER)
        )
    if num_rows * len(rules.stops.ending_token_ids) > rules.width:
        among = SearchRankingLimits(
            rules.stops.biases(vocab_size, allowed.device, ends=True), _least_of_strategy_best(rules, allowed)
        )
        return rank_search_candidates(allowed, scores, rules.width, among)
    stop_ids = rules.stops.columns(vocab_size, allowed.device)
    logprobs = own_strategy_logprobs(rules, allowed, stop_ids)
    return search_continuations_by_row(stop_ids.expand_as(logprobs), logprobs + scores[..., None])


def own_strategy_logprobs(rules: SearchRules, allowed: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[G, r, n], log-probabilities of tokens [n]; -inf unless a token is among the row's best 2b."""
    own = allowed.index_select(-1, tokens)
    if not own.numel() or 2 * rules.width >= allowed.shape[-1]:
        return own
    if len(tokens) == 1:  # faster for one token
        is_best = (allowed > own).sum(dim=-1, keepdim=True, dtype=torch.int32) < 2 * rules.width
    else:
        is_best = own >= _least_of_strategy_best(rules, allowed)[..., None]
    return own.where(is_best, NEVER)


def _least_of_strategy_best(rules: SearchRules, allowed: torch.Tensor) -> torch.Tensor:
    """[G, r], the lowest log-probability of each row's best 2b tokens."""
    best, _ = search_topk(allowed, min(2 * rules.width, allowed.shape[-1]))
    return best[..., -1]
