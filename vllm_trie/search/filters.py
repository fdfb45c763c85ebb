"""Leaves out continuations of a row: vLLM's sampling filters, and pruning."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import inf, log
from operator import or_
from typing import NamedTuple

import torch

from vllm_trie.search.devices import NEVER, is_searched_on_host
from vllm_trie.search.parts import in_search_parts, search_parts, split_for_search

LONG_ROW = 1 << 18  # longer than a vocabulary
SUM_BITS = 61  # of a row's sum, so that nothing overflows
LEAST_EXPONENT = -900  # of a sum that is not 0
FIRST_RANKED = 64  # most distributions hold most of their mass in fewer tokens


class SearchFilters(NamedTuple):
    """The fields of `SamplingParams` with the same names; the defaults do nothing."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    def leave_out(self, vocab_size: int) -> bool:
        """Whether the filters may leave out any of `vocab_size` tokens."""
        return self.min_p > 0 or 0 < self.top_k < vocab_size or self.top_p < 1


class SearchPruning(NamedTuple):
    """Bounds on what a continuation may trail by, see `BeamParams`; the defaults drop nothing."""

    relative: float | None = None
    absolute: float | None = None
    relative_local: float | None = None
    per_parent: int | None = None

    @property
    def margin(self) -> float:
        """How far below the best a continuation's score may be, in nats."""
        relative = inf if self.relative is None else -log(self.relative)
        return relative if self.absolute is None else min(relative, self.absolute)


NO_PRUNING = SearchPruning()


def filtered_search_logprobs(logprobs: torch.Tensor, filters: SearchFilters, most: int | None = None) -> torch.Tensor:
    """Log-probabilities [..., V] with -inf for what `min_p`, `top_k` and `top_p`, applied in this order, leave out.

    The rest is not renormalised: a filter removes continuations, it does not reward the others.
    `top_k` keeps all that tie for its last place; of those that tie, `top_p` keeps the lower tokens.
    Source: vLLM 0.32 `MinPLogitsProcessor` and `apply_top_k_top_p`.

    Args:
        most: Only this many of each row's best matter: the others may be left out in any case; None: all matter.

    Returns:
        A new tensor, or `logprobs` itself if nothing filters.
    """
    if not filters.leave_out(logprobs.shape[-1]):
        return logprobs
    rows = logprobs.reshape(1, -1, logprobs.shape[-1])
    (allowed,) = in_search_parts(rows.shape, lambda part: (filter_search_logprobs(part, filters, most, part),), rows)
    return allowed.view_as(logprobs)


def filter_search_logprobs(
    logprobs: torch.Tensor, filters: SearchFilters, most: int | None = None, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """`filtered_search_logprobs`, in place except for `kept`, log-probabilities that must not change."""
    vocab_size = logprobs.shape[-1]
    if filters.min_p > 0:
        threshold = logprobs.amax(dim=-1, keepdim=True) + log(filters.min_p)
        logprobs = _search_logprobs_without(logprobs, logprobs < threshold, kept)
    if 0 < filters.top_k < vocab_size:
        last = logprobs.topk(filters.top_k, dim=-1).values[..., -1:]
        logprobs = _search_logprobs_without(logprobs, logprobs < last, kept)
    if filters.top_p < 1:
        count, last = _search_nucleus(logprobs, filters.top_p, min(most or vocab_size, vocab_size))
        logprobs = _search_logprobs_without(logprobs, ~best_search_tokens(logprobs, count, last), kept)
    return logprobs


def _search_logprobs_without(logprobs: torch.Tensor, dropped: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Log-probabilities with -inf for what is dropped, in place unless they are `kept`."""
    return logprobs.masked_fill(dropped, NEVER) if logprobs is kept else logprobs.masked_fill_(dropped, NEVER)


def pruned_search_logprobs(logprobs: torch.Tensor, scores: torch.Tensor, pruning: SearchPruning) -> torch.Tensor:
    """Log-probabilities with -inf for every continuation that pruning drops.

    Let s be the score of a continuation (its row's plus its own log-probability) and w its own log-probability
    alone. It is dropped if s < log(relative) + max s, if s < max s - absolute, if w < log(relative_local) + max w,
    or if `per_parent` continuations of its row are better; of equal ones the lower tokens are kept. The maxima run
    over everything that live rows may take, before anything is dropped; each rule drops a row's worst, so their
    order does not matter. Both bounds together can drop everything: then the search ends. Source: Freitag and
    Al-Onaizan 2017, Beam Search Strategies for Neural Machine Translation, section 3; in the log domain.

    Args:
        logprobs: [G, r, V] float32, -inf where a row may not take a token.
        scores: [G, r] float32, of each row; -inf if it is dead.

    Returns:
        A new tensor, or `logprobs` itself if nothing prunes.
    """
    if not (rules := _search_pruning_by_rule(logprobs, scores, pruning)):
        return logprobs

    def of_rows(own: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor]:
        return (own.masked_fill(_pruned_in_search(own, scores, rules), NEVER),)

    (kept,) = in_search_parts(logprobs.shape, of_rows, logprobs, scores)
    return kept


def prune_search_logprobs(logprobs: torch.Tensor, scores: torch.Tensor, pruning: SearchPruning) -> torch.Tensor:
    """`pruned_search_logprobs` in place; returns `logprobs`."""
    if rules := _search_pruning_by_rule(logprobs, scores, pruning):
        for rows in search_parts(logprobs.shape):
            own = logprobs[:, rows]
            own.masked_fill_(_pruned_in_search(own, scores[:, rows], rules), NEVER)
    return logprobs


Drops = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of log-probabilities [G, k, V] and scores [G, k]


def _search_pruning_by_rule(logprobs: torch.Tensor, scores: torch.Tensor, pruning: SearchPruning) -> list[Drops]:
    """For each rule, a function that finds the continuations it drops; arguments as for `pruned_search_logprobs`."""
    rules = list[Drops]()
    if pruning.margin < inf:
        least = (logprobs.amax(dim=-1) + scores).amax(dim=-1)[:, None, None] - pruning.margin
        rules.append(lambda own, scores: own + scores[..., None] < least)
    if pruning.relative_local is not None:
        leader = logprobs.amax(dim=-1).masked_fill(scores == NEVER, NEVER).amax(dim=-1)[:, None, None]
        least_local = leader + log(pruning.relative_local)
        rules.append(lambda own, _: own < least_local)
    if (count := pruning.per_parent) is not None and count < logprobs.shape[-1]:
        rules.append(lambda own, _: ~best_search_tokens(own, count, own.topk(count, dim=-1).values[..., -1:]))
    return rules


def _pruned_in_search(logprobs: torch.Tensor, scores: torch.Tensor, rules: list[Drops]) -> torch.Tensor:
    return reduce(or_, (rule(logprobs, scores) for rule in rules))


def best_search_tokens(logprobs: torch.Tensor, count: torch.Tensor | int, last: torch.Tensor) -> torch.Tensor:
    """bools [..., V], the best `count` of each row; of those that tie, the lower tokens.

    Args:
        count: [..., 1], or one number for all rows.
        last: [..., 1], the least of the best `count`.
    """
    above, ties = logprobs > last, logprobs == last
    return above | (ties & (ties.cumsum(dim=-1, dtype=torch.int32) <= count - above.sum(dim=-1, keepdim=True)))


def search_running_sum(values: torch.Tensor) -> torch.Tensor:
    """Sums along [..., N] of values that are not negative, the same whenever they are computed on a device.

    On CUDA, torch scans a single row by a kernel whose float sums depend on what else the device does, which would make
    tensor-parallel ranks differ; of several rows it scans each alone, on few processors. Source: torch 2.13 `scan_dim`.
    """
    if is_searched_on_host(values.device):
        return values.cumsum(dim=-1)
    if values.shape[-1] > LONG_ROW:
        return _search_sum_in_fixed_point(values)
    if values.numel() != values.shape[-1]:
        return values.cumsum(dim=-1)
    return torch.stack([values, values]).cumsum(dim=-1)[0]


def _search_sum_in_fixed_point(values: torch.Tensor) -> torch.Tensor:
    """`search_running_sum` by integers, whose sums do not depend on order: the whole device scans all rows as one.

    The unit is a power of 2, which rounding of the total does not change where this is about 1. What is less than
    2 ** -60 of its row may count as 0.
    """
    total = values.sum(dim=-1, keepdim=True, dtype=torch.float64)
    unit = torch.frexp(1.5 * total).exponent.clamp(min=LEAST_EXPONENT) - SUM_BITS
    counts = torch.ldexp(values.double(), -unit).long()
    first = counts[..., :1].clone()
    sums = counts.view(-1).cumsum_(dim=0).view_as(counts)
    sums.sub_(sums[..., :1] - first)
    return sums.double().ldexp_(unit).to(values.dtype)


def _search_nucleus(logprobs: torch.Tensor, top_p: float, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest best tokens of each row that hold `top_p` of its mass, or the `most` best if these are fewer.

    Returns:
        How many tokens they are, [R, 1], and the least of them, [R, 1].
    """
    if not is_searched_on_host(logprobs.device) and len(split_for_search(logprobs)) > 1:
        return _search_nucleus_of_long_rows(logprobs, top_p)
    total = logprobs.logsumexp(dim=-1, keepdim=True)
    num_ranked = min(FIRST_RANKED, most) if is_searched_on_host(logprobs.device) else most
    while True:
        best_first = logprobs.topk(num_ranked, dim=-1).values
        held = search_running_sum((best_first - total).exp_().nan_to_num_())
        if num_ranked == most or ((held[..., -1:] >= top_p) | (total == NEVER)).all():
            break
        num_ranked = min(4 * num_ranked, most)
    count = (1 + (held < top_p).sum(dim=-1, keepdim=True)).clamp_(max=num_ranked)
    return count, best_first.gather(-1, count - 1)


def _search_nucleus_of_long_rows(logs: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`_search_nucleus` of rows [R, N], at most 0, that are too long to sort: finds the least, float64, by bisection.

    Floats of one sign compare as their bits do, so there are at most as many halvings as bits.
    """
    greatest = logs.amax(dim=-1, keepdim=True).double()

    def mass_from(least: torch.Tensor) -> torch.Tensor:
        """[R, 1], in units of the greatest's mass."""
        held = torch.zeros_like(greatest)
        for part in split_for_search(logs):
            held += (part - greatest).exp_().masked_fill_(part < least, 0.0).sum(dim=-1, keepdim=True)
        return held

    wanted = top_p * mass_from(torch.full_like(greatest, NEVER))
    above, held = torch.full_like(greatest, -1, dtype=torch.int64), torch.zeros_like(greatest)
    last = torch.full_like(greatest, inf).view(torch.int64)
    for _ in range(63):
        middle = (above + (last - above) // 2).clamp_(min=0)  # a sum of both might be too large
        mass = mass_from(-middle.view(torch.float64))
        is_enough = mass >= wanted
        last, above, held = middle.where(is_enough, last), above.where(is_enough, middle), held.where(is_enough, mass)
    least = -last.view(torch.float64)
    num_ties = ((wanted - held) / (least - greatest).exp_()).ceil_().nan_to_num_().clamp_(min=1)
    return (logs > least).sum(dim=-1, keepdim=True) + num_ties.long(), least
