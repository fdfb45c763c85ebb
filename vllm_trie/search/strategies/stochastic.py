"""Stochastic beam search: whole hypotheses are drawn without replacement, by noise that they keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import filtered
from vllm_trie.search.gumbel import stochastic_step
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import RankScores, Step
from vllm_trie.search.strategies.means import Choice, Means, alive, ended


def stochastic(rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means) -> Choice:
    """The best continuations after noise become beams, or finish, drawn from what each row may take.

    Those that finish compete with all that is still running by their noise, and keep it. Source: Kool et al. 2019.
    """
    assert isinstance(means.random, Sequence), "beams are drawn without a generator for each group"
    scores, vocab_size = beams.scores, logprobs.shape[-1]
    perturbed = torch.zeros_like(scores) if beams.rank_scores is None else beams.rank_scores
    allowed = filtered(beams.narrow(logprobs), rules.filters)
    total = allowed.logsumexp(dim=-1, keepdim=True)
    allowed = (allowed - total).where(total > NEVER, NEVER)
    of_groups = [
        stochastic_step(*of_rows[:3], rules.width, of_rows[3])
        for of_rows in zip(scores, perturbed, allowed, means.random, strict=True)
    ]
    cells, sums, noisy = (torch.stack(fields) for fields in zip(*of_groups, strict=True))
    noisy = noisy.float()
    drawn = Candidates(cells // vocab_size, cells % vocab_size, sums.float().where(noisy > NEVER, NEVER))
    stops = rules.stops.end(drawn, means.completes)
    of_slots = alive(drawn, stops), rules.width, scores.shape[1]
    with_noise = RankScores(means.select_next(drawn._replace(scores=noisy), *of_slots).scores, noisy)
    step = Step(*means.select_next(drawn, *of_slots), ended(rules, drawn, stops), rank_scores=with_noise)
    return Choice(step, allowed)
