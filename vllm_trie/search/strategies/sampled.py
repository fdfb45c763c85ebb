"""Each beam draws its next token for itself, as the first tokens of a search that `sample_first` begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER, uploaded
from vllm_trie.search.filters import filtered
from vllm_trie.search.rules import Choice, Means, SelectRules, Strategy, by_row, ended
from vllm_trie.search.sampling import draw, uniforms
from vllm_trie.search.step_result import Step


@dataclass(frozen=True)
class SampledEach(Strategy):
    """Each beam takes one token that is drawn from what its row may take, or finishes with it.

    The slot of a beam that stops is dead; the search displaces it once nothing is drawn any more.
    """

    def choose(self, rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means) -> Choice:
        """See `Strategy`."""
        num_groups, num_rows, vocab_size = logprobs.shape
        chances = np.stack([uniforms(*seeds, rules.width) for seeds in means.draws])
        allowed = filtered(beams.narrow(logprobs), rules.filters, vocab_size)
        tokens = draw(allowed, uploaded(chances, logprobs.device).view(num_groups, num_rows, -1))
        drawn = by_row(tokens, allowed.gather(-1, tokens) + beams.scores[..., None])
        stops = rules.stops.end(drawn, means.completes, vocab_size)
        alone = drawn._replace(scores=drawn.scores.masked_fill(stops, NEVER))
        return Choice(Step(*alone, ended(rules, drawn, stops)), logprobs)
