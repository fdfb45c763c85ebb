"""Stochastic beam search: whole hypotheses are drawn without replacement, by noise that they keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import filtered
from vllm_trie.search.gumbel import stochastic_step
from vllm_trie.search.parts import in_parts
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import Choice, Means, SelectRules, Strategy, alive, ended
from vllm_trie.search.sampling import generator
from vllm_trie.search.step_result import RankScores, Step


@dataclass(frozen=True)
class Stochastic(Strategy):
    """The best continuations after noise become beams, or finish, drawn from what each row may take.

    Those that finish compete with all that is still running by their noise, and keep it. Source: Kool et al. 2019.
    """

    def choose(self, rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means) -> Choice:
        """See `Strategy`."""
        scores, vocab_size = beams.scores, logprobs.shape[-1]

        def of_rows(logprobs: torch.Tensor, beams: Beams) -> tuple[torch.Tensor]:
            kept = filtered(beams.narrow(logprobs), rules.filters)
            total = kept.logsumexp(dim=-1, keepdim=True)
            return ((kept - total).masked_fill_(~(total > NEVER), NEVER),)

        (allowed,) = in_parts(logprobs.shape, of_rows, logprobs, beams)
        before = torch.zeros_like(scores) if beams.rank_scores is None else beams.rank_scores
        steps = [
            stochastic_step(own, noise, of_rows, rules.width, generator(*draw))
            for own, noise, of_rows, draw in zip(scores, before, allowed, means.draws, strict=True)
        ]
        cells, sums, noisy = (torch.stack(fields) for fields in zip(*steps, strict=True))
        noisy = noisy.float()
        drawn = Candidates(cells // vocab_size, cells % vocab_size, sums.float().where(noisy > NEVER, NEVER))
        stops = rules.stops.end(drawn, means.completes, vocab_size)
        into_slots = alive(drawn, stops), rules.width, scores.shape[1]
        noise = means.select_next(drawn._replace(scores=noisy), *into_slots).scores
        by_slot, ranks = means.select_next(drawn, *into_slots), RankScores(noise, noisy)
        step = Step(*by_slot, ended(rules, drawn, stops), rank_scores=ranks)
        return Choice(step, allowed)
