"""Stochastic beam search: samples whole hypotheses without replacement, by noise that they keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import filtered_search_logprobs
from vllm_trie.search.gumbel import stochastic_search_step
from vllm_trie.search.parts import in_search_parts
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import (
    SearchDecision,
    SearchInputs,
    SearchRules,
    SearchStrategy,
    search_candidates_alive,
    search_candidates_ended,
    search_candidates_stopping,
)
from vllm_trie.search.sampling import search_generator
from vllm_trie.search.step_result import SearchRankScores, SearchStepResult


@dataclass(frozen=True)
class StochasticStrategy(SearchStrategy):
    """The best continuations after noise become beams or finish, sampled from what each row may take.

    Those that finish keep their noise, and compete by it with all that still run. Source: Kool et al. 2019.
    """

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """See `SearchStrategy`."""
        scores, vocab_size = beams.scores, logprobs.shape[-1]

        def of_rows(logprobs: torch.Tensor, beams: SearchBeams) -> tuple[torch.Tensor]:
            kept = filtered_search_logprobs(beams.narrow(logprobs), rules.filters)
            total = kept.logsumexp(dim=-1, keepdim=True)
            return ((kept - total).masked_fill_(~(total > NEVER), NEVER),)

        (allowed,) = in_search_parts(logprobs.shape, of_rows, logprobs, beams)
        before = torch.zeros_like(scores) if beams.rank_scores is None else beams.rank_scores
        steps = [
            stochastic_search_step(own, noise, of_rows, rules.width, search_generator(*key))
            for own, noise, of_rows, key in zip(scores, before, allowed, inputs.sampling_keys, strict=True)
        ]
        cells, sums, noisy = (torch.stack(fields) for fields in zip(*steps, strict=True))
        noisy = noisy.float()
        sampled = SearchCandidates(cells // vocab_size, cells % vocab_size, sums.float().where(noisy > NEVER, NEVER))
        stops = search_candidates_stopping(rules, sampled, inputs.completes, vocab_size)
        into_slots = search_candidates_alive(sampled, stops), rules.width, scores.shape[1]
        noise = inputs.select_next(sampled._replace(scores=noisy), *into_slots).scores
        by_slot, ranks = inputs.select_next(sampled, *into_slots), SearchRankScores(noise, noisy)
        step = SearchStepResult(*by_slot, search_candidates_ended(rules, sampled, stops), rank_scores=ranks)
        return SearchDecision(step, allowed)
