"""A step of beam search by kernels: rows are ranked, then groups decide, and report log-probabilities.

With few beams per group it takes three launches: the best continuations of each row are kept, which pays off for few.
With many, five or six launches, and two or three of `torch.topk`, rank the continuations of a group together. Reports
take two more. `search.step` and `search.strategies.best` have it in torch, for all other rules as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import cast

import torch

from vllm_trie.search.beams import SearchBeams, States
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import NO_PRUNING
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import CHILDREN, SLOTS, KernelStepSizes, KernelVariants, TakeStep
from vllm_trie.worker.kernels.decide import SEMANTICS, KernelDecision, kernel_slots_of, kernel_slots_up_to
from vllm_trie.worker.kernels.items import (
    kernel_level_of,
    kernel_places_for_items,
    kernel_variants_of_logits,
    kernels_renormalise,
    kernels_take_items_alone,
    rank_items_of_few_by_kernel,
    rank_items_of_many_by_kernels,
)
from vllm_trie.worker.kernels.report import REPORTED, KernelReport
from vllm_trie.worker.kernels.tiles import (
    BLOCK,
    BOTH,
    KernelLogits,
    KernelRanking,
    KernelRowRanking,
    KernelTiles,
    RowRankingTask,
    can_filter_in_kernels,
    kernel_log_min_p,
    kernels_rank_rows,
    launch_tile_maxima,
)
from vllm_trie.worker.kernels.wide_keys import AmongBest, kernels_have_keys, launch_best_of_groups

MOST_BLOCKS = 128  # of a row: the most for which kernels that rank many beams are compiled
MOST_ENDS = 3  # tokens that end hypotheses of many beams in vLLM's semantics: better tokens are counted for each
VLLM = BestStrategy("vllm")
NOTHING_CLOSED = None, 0, 0  # see `kinds_in_kernel`


def can_take_by_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether kernels take a step by these rules; otherwise torch does."""
    stops, vocab_size = rules.stops, sizes.vocab_size
    if not (
        rules.strategy in SEMANTICS
        and rules.pruning == NO_PRUNING
        and can_filter_in_kernels(rules.filters)
        and not stops.may_complete
        and (rules.num_logprobs is None or kernels_rank_rows(rules.num_logprobs, vocab_size))
    ):
        return False
    is_few = beams_are_few_for_kernels(rules, sizes)
    if rules.are_sparse:
        return kernels_take_items_alone(rules) and (
            is_few or kernels_have_keys(rules.width, kernel_places_for_items(sizes))
        )
    return rules.constraints == () and (
        is_few
        or (
            (rules.strategy != VLLM or len(stops.ending_token_ids) <= MOST_ENDS)
            and vocab_size <= MOST_BLOCKS * BLOCK
            and kernels_have_keys(rules.width, vocab_size)
        )
    )


def beams_are_few_for_kernels(rules: SearchRules, sizes: KernelStepSizes) -> bool:
    """Whether each row of a group is ranked alone, keeping no more than may go on."""
    is_small = (
        sizes.most_children <= CHILDREN[-1] if rules.are_sparse else kernels_rank_rows(rules.width, sizes.vocab_size)
    )
    return is_small and rules.width <= SLOTS[-1] and rules.num_ending is None


class KernelStep(TakeStep):
    """Takes a step by rules that `can_take_by_kernels` accepts."""

    def __init__(self, rules: SearchRules, sizes: KernelStepSizes) -> None:
        layout, is_few = rules.layout(sizes.num_rows, sizes.vocab_size), beams_are_few_for_kernels(rules, sizes)
        ranking = _kernel_ranking(rules, sizes, is_few, rules.num_beams or rules.width)
        self._rank, self._decide = ranking.launch, KernelDecision(rules, sizes.num_rows, layout, ranking)
        self._report = None if layout.top_shape is None else KernelReport(layout, sizes.vocab_size)
        self._temperature, self._is_along = rules.filters.temperature, rules.are_sparse
        self._is_among_children = kernels_renormalise(rules)

    def __call__(
        self, logits: KernelLogits, beams: SearchBeams, places: torch.Tensor, sampled: torch.Tensor
    ) -> PackedSearchStep:
        """See `TakeStep`."""
        logits, scores = logits._replace(temperature=self._temperature), beams.scores.contiguous()
        if self._is_along:
            ((along, states),) = cast(dict[ConstraintAlongItems, torch.Tensor], beams.states).items()
            trie = along.trie
            nodes = states.contiguous(), trie.first_child, trie.tokens
            level = kernel_level_of(logits) if self._is_among_children else None
            tiles = launch_tile_maxima(logits) if level is None else KernelTiles(logits.arguments)
            closed = trie.closed.for_kernels if along.rules.excludes else NOTHING_CLOSED
            keys = self._rank(tiles, scores, level, *nodes, *closed).keys
            return self._decide(keys, places, sampled, (*nodes, trie.is_item.view(torch.int8), *closed), along)
        tiles = launch_tile_maxima(logits)
        taken = self._decide(self._rank(tiles, scores).keys, places, sampled)
        if self._report is not None:
            self._report(tiles, taken.words)
        return taken


def _kernel_ranking(rules: SearchRules, sizes: KernelStepSizes, is_few: bool, most: int) -> KernelRanking:
    """How rows are ranked if at most `most` continuations of a group go on."""
    (num_rows, vocab_size, _), log_min_p = sizes, kernel_log_min_p(rules.filters)
    if rules.are_sparse:
        rank_items = rank_items_of_few_by_kernel if is_few else rank_items_of_many_by_kernels
        return rank_items(sizes, rules.num_ending or most, log_min_p)
    if is_few:
        wanted = wanted_by_kernels(rules)
        return KernelRanking(KernelRowRanking(wanted, vocab_size), vocab_size, wanted.kept)
    ends = rules.stops if rules.strategy == VLLM else StopConstraints()
    count = min(rules.width, num_rows * vocab_size)
    among = AmongBest(ends, 2 * rules.width)
    return KernelRanking(partial(launch_best_of_groups, count=count, log_min_p=log_min_p, among=among), vocab_size)


def wanted_by_kernels(rules: SearchRules) -> RowRankingTask:
    """What each row of few beams keeps: as many as may go on, and as may finish."""
    slots, lists = kernel_slots_of(rules.width), BOTH if rules.stops.ending_token_ids else BOTH[:1]
    if rules.strategy == VLLM:
        return RowRankingTask(rules.width, 2 * slots, rules.filters, lists, among_best=2 * rules.width)
    return RowRankingTask(rules.width, slots, rules.filters, lists)


def warm_up_kernels(serving: KernelVariants) -> None:
    """Takes a step of few beams for each number of slots, children and log-probabilities; and steps of many."""
    nothing = torch.zeros(2, dtype=torch.int64, device=serving.device)
    row = nothing[:1]
    for logits in serving.logits:
        for rules in _kernel_variants(serving.most_beams):
            for most_children in CHILDREN if rules.constraints else (0,):
                trie = ConstraintTrie(nothing.int(), nothing.int(), nothing.bool(), [most_children])
                along: States = {key.on({"": trie}, ()): row[None] for key in rules.constraints}
                beams = SearchBeams(torch.zeros(1, 1, device=serving.device), states=along)
                for values in kernel_variants_of_logits(rules, logits):
                    if can_take_by_kernels(rules, sizes := KernelStepSizes.of(beams, values.shape[1])):
                        KernelStep(rules, sizes)(KernelLogits.of(values, row), beams, row, row[None].clone())


def _kernel_variants(most_beams: int) -> Iterator[SearchRules]:
    """Rules for few and for many beams, which keep a row's best once or twice as many; and rules that report."""
    for width in (*kernel_slots_up_to(most_beams), SLOTS[-1] + 1):
        yield SearchRules(width, BestStrategy(), StopConstraints((0,)))
        yield SearchRules(width, VLLM, StopConstraints((0,)))
        for renormalizes, excludes in product((False, True), repeat=2):
            items = ItemConstraint("", renormalizes=renormalizes, excludes=excludes)
            yield SearchRules(width, BestStrategy(), constraints=(items,))
    for num_logprobs in REPORTED:
        yield SearchRules(SLOTS[0], BestStrategy(), num_logprobs=num_logprobs)
