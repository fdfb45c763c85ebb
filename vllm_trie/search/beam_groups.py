"""Group beam search: the beams are in groups, of which each avoids what the groups before it have just taken.

Source: Vijayakumar et al. 2016, Diverse Beam Search, with the Hamming distance, as in transformers 4.56
`_group_beam_search`: the penalty stays in the scores of hypotheses, and a group that is done goes on as padding.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Completes, Step


class Select(Protocol):
    """Takes a step of one group of each search."""

    def __call__(
        self,
        rules: SelectRules,
        logprobs: torch.Tensor,
        scores: torch.Tensor,
        completes: Completes | None,
        *,
        penalties: torch.Tensor,
    ) -> Step[torch.Tensor]:
        """`penalties` [N, V] are taken off the log-probabilities [N, r, V]."""
        ...


def step_in_groups(
    rules: SelectRules, logprobs: torch.Tensor, scores: torch.Tensor, completes: Completes | None, select: Select
) -> tuple[Step[torch.Tensor], torch.Tensor]:
    """One step of N searches, group after group.

    Args:
        rules: Theirs; `rules.beam_groups` tells of the groups.
        logprobs: [N, r, V].
        scores: [N, r].
        completes: Tells which candidates complete a stop string.
        select: Takes the step of one group.

    Returns:
        The step, in which the prompt, where it is the only row, is that of the first slot of each group, so that every
        parent tells its group; and the log-probabilities [N, b, V] of slots, less penalties, if they are reported.
    """
    groups = rules.beam_groups
    assert groups is not None
    (num_searches, num_rows, vocab_size), device = logprobs.shape, logprobs.device
    width = rules.width // groups.number
    of_group = rules._replace(width=width, beam_groups=None)
    counts = torch.zeros(num_searches, vocab_size, dtype=torch.int32, device=device)
    steps, penalised = list[Step[torch.Tensor]](), list[torch.Tensor]()
    for first in range(0, rules.width, width):
        is_done = first // width in groups.done
        at = slice(0, 1) if num_rows == 1 else slice(first, first + width)
        penalties, of_rows = groups.penalty * counts, scores[:, at]
        if is_done:
            of_rows = torch.full_like(of_rows, NEVER)
        completed = _of_slots(completes, first if num_rows > 1 else 0)
        step = select(of_group, logprobs[:, at], of_rows, completed, penalties=penalties)
        if is_done and groups.padding is not None:
            counts[:, groups.padding] += width
        counts.scatter_add_(1, step.tokens, (step.scores > NEVER).int())
        finished = step.finished._replace(parents=step.finished.parents + first)
        steps.append(step._replace(parents=step.parents + first, finished=finished))
        if rules.num_logprobs is not None:
            penalised.append((logprobs[:, at] - penalties[:, None]).expand(-1, width, -1))
    beams = (torch.cat(fields, dim=1) for fields in zip(*(step[:3] for step in steps), strict=True))
    ended = (torch.cat(fields, dim=1) for fields in zip(*(step.finished for step in steps), strict=True))
    parents, tokens, of_beams = beams
    step = steps[0]._replace(parents=parents, tokens=tokens, scores=of_beams, finished=Candidates(*ended))
    return step, torch.cat(penalised, dim=1) if penalised else logprobs


def _of_slots(completes: Completes | None, first: int) -> Completes | None:
    """The same of candidates whose parents are counted from slot `first` on."""
    if completes is None or first == 0:
        return completes

    def completed(candidates: Candidates[np.ndarray]) -> np.ndarray:
        return completes(candidates._replace(parents=candidates.parents + first))

    return completed
