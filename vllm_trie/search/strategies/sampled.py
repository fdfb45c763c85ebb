"""Each beam samples its next token independently: the first tokens of a search with `sample_first`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import NEVER, uploaded_for_search
from vllm_trie.search.filters import filtered_search_logprobs
from vllm_trie.search.rules import (
    SearchDecision,
    SearchInputs,
    SearchRules,
    SearchStrategy,
    search_candidates_ended,
    search_candidates_stopping,
    search_continuations_by_row,
)
from vllm_trie.search.sampling import sample_search_tokens, search_uniforms
from vllm_trie.search.step_result import SearchStepResult


@dataclass(frozen=True)
class RowSamplingStrategy(SearchStrategy):
    """Each beam takes one token sampled from what its row may take, or finishes with it.

    The slot of a beam that stops is dead; the search refills it once sampling ends.
    """

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """See `SearchStrategy`."""
        num_groups, num_rows, vocab_size = logprobs.shape
        chances = np.stack([search_uniforms(*key, rules.width) for key in inputs.sampling_keys])
        allowed = filtered_search_logprobs(beams.narrow(logprobs), rules.filters, vocab_size)
        tokens = sample_search_tokens(
            allowed, uploaded_for_search(chances, logprobs.device).view(num_groups, num_rows, -1)
        )
        sampled = search_continuations_by_row(tokens, allowed.gather(-1, tokens) + beams.scores[..., None])
        stops = search_candidates_stopping(rules, sampled, inputs.completes, vocab_size)
        alone = sampled._replace(scores=sampled.scores.masked_fill(stops, NEVER))
        return SearchDecision(SearchStepResult(*alone, search_candidates_ended(rules, sampled, stops)), logprobs)
