"""Group beam search: the beams are in groups, of which each avoids what the groups before it have just taken.

Source: Vijayakumar et al. 2016, Diverse Beam Search, with the Hamming distance, as in transformers 4.56
`_group_beam_search`: the penalty stays in the scores of hypotheses, and a group that is done goes on as padding.
"""

from __future__ import annotations

import numpy as np
import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import Candidates, Completes
from vllm_trie.search.rules import Best, InGroups, SelectRules
from vllm_trie.search.step_result import Step
from vllm_trie.search.strategies.best import best
from vllm_trie.search.strategies.means import Choice, Means


def in_groups(rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means) -> Choice:
    """One step of N searches, group after group.

    Returns:
        The step, in which the prompt, where it is the only row, is that of the first slot of each group, so that every
        parent tells its group; and the log-probabilities [N, b, V] of slots, less penalties, if they are reported.
    """
    groups = rules.strategy
    assert isinstance(groups, InGroups)
    (num_searches, num_rows, vocab_size), device = logprobs.shape, logprobs.device
    narrow = beams.narrow(logprobs)
    width = rules.width // groups.number
    of_group = rules._replace(width=width, strategy=Best())
    counts = torch.zeros(num_searches, vocab_size, dtype=torch.int32, device=device)
    beams_of_groups, finished_of_groups = list[Candidates[torch.Tensor]](), list[Candidates[torch.Tensor]]()
    penalised = list[torch.Tensor]()
    for first in range(0, rules.width, width):
        is_done = first // width in groups.done
        at = slice(0, 1) if num_rows == 1 else slice(first, first + width)
        penalties, of_rows = groups.penalty * counts, beams.scores[:, at]
        if is_done:
            of_rows = torch.full_like(of_rows, NEVER)
        completes = _of_slots(means.completes, first if num_rows > 1 else 0)
        step, _ = best(of_group, narrow[:, at], Beams(of_rows), means._replace(completes=completes), penalties)
        if is_done and groups.padding is not None:
            counts[:, groups.padding] += width
        counts.scatter_add_(1, step.tokens, (step.scores > NEVER).int())
        beams_of_groups.append(Candidates(step.parents + first, step.tokens, step.scores))
        finished_of_groups.append(step.finished._replace(parents=step.finished.parents + first))
        if rules.num_logprobs is not None:
            penalised.append((logprobs[:, at] - penalties[:, None]).expand(-1, width, -1))
    by_slot, finished = (
        Candidates(*(torch.cat(fields, dim=1) for fields in zip(*of_groups, strict=True)))
        for of_groups in (beams_of_groups, finished_of_groups)
    )
    return Choice(Step(*by_slot, finished), torch.cat(penalised, dim=1) if penalised else logprobs)


def _of_slots(completes: Completes | None, first: int) -> Completes | None:
    """The same of candidates whose parents are counted from slot `first` on."""
    if completes is None or first == 0:
        return completes

    def completed(candidates: Candidates[np.ndarray]) -> np.ndarray:
        return completes(candidates._replace(parents=candidates.parents + first))

    return completed
