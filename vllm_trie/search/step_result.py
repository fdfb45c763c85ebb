"""What one step of beam search decides, and how it is packed into one tensor for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Generic, NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import STATELESS, NextSearchBeams, SearchBeams
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER
from vllm_trie.search.rank import Array, SearchCandidates

NONE = slice(0)


class SearchTopLogprobs(NamedTuple, Generic[Array]):
    """The best tokens of each row, best first: tensors [G, r, N]; on the host [r, N]."""

    tokens: Array
    logprobs: Array  # float32


class SearchTokenLogprobs(NamedTuple, Generic[Array]):
    """What is reported of the newest tokens of continuations: tensors [G, n]; on the host [n]."""

    logprobs: Array  # float32
    ranks: Array  # how many tokens of its row are at least as probable


class SearchRankScores(NamedTuple, Generic[Array]):
    """The scores that hypotheses compete by besides sums: float32 tensors [G, b] and [G, F]; on the host [b], [F]."""

    beams: Array
    finished: Array


class SearchStepResult(NamedTuple, Generic[Array]):
    """What one step decided: tensors [G, b] and [G, F]; on the host [b] and [F], for a single group."""

    parents: Array  # by slot: the slot whose beam this slot continues
    tokens: Array  # by slot
    scores: Array  # by slot, float32; -inf where there is no beam
    finished: SearchCandidates[Array]  # hypotheses that end here; ties keep this order
    # By parent; this and the next two if log-probabilities are reported.
    top_logprobs: SearchTopLogprobs[Array] | None = None
    beam_logprobs: SearchTokenLogprobs[Array] | None = None  # by slot
    finished_logprobs: SearchTokenLogprobs[Array] | None = None
    rank_scores: SearchRankScores[Array] | None = None  # what hypotheses compete by, if not `scores`
    states: Mapping[Constraint, torch.Tensor] | None = None  # by slot, only those known already; on the device
    finished_ranks: Array | None = None  # ranks among all continuations of what finishes, if needed; on the host

    @property
    def num_beams(self) -> int:
        """Live beams of a single group."""
        return int((np.asarray(self.scores) > NEVER).sum())


@dataclass(frozen=True)
class SearchResultLayout:
    """How a step is packed: the columns of each of its fields, integers first, then floats.

    `SearchRules.layout` makes it for a step before it is taken.

    Args:
        width: Beams that go on, b.
        num_finished: F, the most hypotheses that can finish, whatever the number of stop tokens.
        top_shape: [r, N], if log-probabilities are reported.
        has_ranks: The host must know how what finishes ranks among all continuations: its position gives the rank.
        has_rank_scores: Hypotheses compete by other scores than their sums.
    """

    width: int
    num_finished: int
    top_shape: tuple[int, int] | None = None
    has_ranks: bool = False
    has_rank_scores: bool = False

    @cached_property
    def ints(self) -> list[slice]:
        """Columns of each integer field."""
        return _columns_from(0, [self.width, self.width, self.num_finished, self.num_finished, *self._reported])

    @cached_property
    def floats(self) -> list[slice]:
        """Columns of each float field."""
        sides = [self.width, self.num_finished]
        return _columns_from(self.num_ints, [*sides, *self._reported, *(sides if self.has_rank_scores else ())])

    @property
    def num_ints(self) -> int:
        """Columns of all integers; the floats follow."""
        return self.ints[-1].stop

    @property
    def num_words(self) -> int:
        """Columns of all fields."""
        return self.floats[-1].stop

    @property
    def _reported(self) -> list[int]:
        return [] if self.top_shape is None else [self.width, self.num_finished, prod(self.top_shape)]


class PackedSearchStep(NamedTuple):
    """A step of G groups, packed for the host."""

    going: NextSearchBeams
    words: torch.Tensor  # [G, n] int32, as `pack_search_step` lays it out
    layout: SearchResultLayout


def next_search_beams(step: SearchStepResult[torch.Tensor]) -> NextSearchBeams:
    """The beams that live on after a step."""
    ranks = None if step.rank_scores is None else step.rank_scores.beams
    return NextSearchBeams(step.parents, step.tokens, SearchBeams(step.scores, ranks, step.states or STATELESS))


def pack_search_step(step: SearchStepResult[torch.Tensor], layout: SearchResultLayout) -> PackedSearchStep:
    """Packs a step into one tensor, to be copied to the host at once; floats keep their bits.

    Args:
        layout: The rules' layout; the scores that hypotheses compete by are added to it, if the step has them.
    """
    parents, tokens, scores, finished, top_logprobs, of_beams, of_finished, rank_scores, *_ = step
    if num_missing := layout.num_finished - finished.scores.shape[1]:  # there are fewer continuations
        finished = filled_up_search_candidates(finished, num_missing)
        of_finished = of_finished and SearchTokenLogprobs(*(_filled_up(field, num_missing) for field in of_finished))
        rank_scores = rank_scores and rank_scores._replace(finished=_filled_up(rank_scores.finished, num_missing))
    ints, floats = [parents, tokens, finished.parents, finished.tokens], [scores, finished.scores]
    if top_logprobs and of_beams and of_finished:
        ints += [of_beams.ranks, of_finished.ranks, top_logprobs.tokens.flatten(1)]
        floats += [of_beams.logprobs, of_finished.logprobs, top_logprobs.logprobs.flatten(1)]
    floats += rank_scores or ()
    words = torch.cat([torch.cat(ints, dim=1).int(), torch.cat(floats, dim=1).view(torch.int32)], dim=1)
    layout = layout if rank_scores is None else replace(layout, has_rank_scores=True)
    return PackedSearchStep(next_search_beams(step), words, layout)


def filled_up_search_candidates(
    candidates: SearchCandidates[torch.Tensor], num_missing: int
) -> SearchCandidates[torch.Tensor]:
    """The candidates, followed by `num_missing` that do not exist."""
    return SearchCandidates(*(_filled_up(field, num_missing) for field in candidates))


def _filled_up(field: torch.Tensor, num_missing: int) -> torch.Tensor:
    """[G, F] from [G, F - num_missing], filled up with hypotheses that do not finish."""
    return torch.cat([field, field.new_full((len(field), num_missing), NEVER if field.is_floating_point() else 0)], 1)


def unpack_search_steps(array: np.ndarray, layout: SearchResultLayout) -> list[SearchStepResult[np.ndarray]]:
    """The step of each group from what `pack_search_step` has packed; `finished` only has what finishes."""
    parents, tokens, ended_by, ended_in, *reported = [array[:, columns] for columns in layout.ints]
    array = array.view(np.float32)
    scores, ended_with, *logprobs = [array[:, columns] for columns in layout.floats]
    ends = ended_with > NEVER
    steps = []
    for at, is_ending in enumerate(map(any, ends.tolist())):
        which = at, ends[at] if is_ending else NONE
        finished = SearchCandidates(ended_by[which], ended_in[which], ended_with[which])
        step = SearchStepResult(parents[at], tokens[at], scores[at], finished)
        if layout.top_shape is not None:
            step = step._replace(
                top_logprobs=SearchTopLogprobs(
                    *(field[2][at].reshape(layout.top_shape) for field in (reported, logprobs))
                ),
                beam_logprobs=SearchTokenLogprobs(logprobs[0][at], reported[0][at]),
                finished_logprobs=SearchTokenLogprobs(logprobs[1][which], reported[1][which]),
            )
        if layout.has_ranks:
            step = step._replace(finished_ranks=np.flatnonzero(ends[at]))
        if layout.has_rank_scores:
            step = step._replace(rank_scores=SearchRankScores(logprobs[-2][at], logprobs[-1][which]))
        steps.append(step)
    return steps


def _columns_from(first: int, sizes: list[int]) -> list[slice]:
    """The columns of consecutive fields with these sizes."""
    return [slice(first + end - size, first + end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
