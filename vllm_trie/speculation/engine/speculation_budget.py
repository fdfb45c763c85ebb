"""Shares the tokens and KV blocks that a step leaves unused among groups that speculate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_trie.engine.group import BeamGroup, BeamGroupForests
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.engine.speculation import DraftingCandidate, SchedulerBudgets
from vllm_trie.messages import CANNOT_DRAFT, MOST_DRAFTS, DecidedMessage, DraftedMessage, SpeculationBudget
from vllm_trie.options import BeamParams
from vllm_trie.options.speculation import options_speculate
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy
from vllm_trie.speculation.engine.adaptive_forests import AdaptiveForests
from vllm_trie.speculation.engine.group_forests import GroupForests
from vllm_trie.speculation.engine.lookahead import lend_lookahead
from vllm_trie.speculation.search.forest import useful_forest_layers
from vllm_trie.speculation.search.forest_size import ForestSize

MOST_REST = 16  # steps, of a group with n-gram drafting
NEVER_AGAIN = 1 << 40  # steps


class SpeculationBudgets(SchedulerBudgets):
    """Shares what steps leave unused among groups that speculate.

    Args:
        config: The engine's speculative config.
        kv_cache_manager: Lends KV blocks.
    """

    def __init__(self, config: SpeculativeConfig, kv_cache_manager: BeamKVCacheManager) -> None:
        self._num_layers, self._by_ngrams = config.num_speculative_tokens, config.use_ngram()
        self._draft_max_model_len = config.draft_model_config.max_model_len
        self._max_model_len = config.target_model_config.max_model_len
        self._kv_cache_manager = kv_cache_manager
        self.adaptive = AdaptiveForests(config.num_speculative_tokens)

    def forests(self, params: BeamParams, width: int) -> BeamGroupForests:
        """See `SchedulerBudgets`."""
        return GroupForests(params, width) if options_speculate(params) else BeamGroupForests()

    def share_out(
        self,
        candidates: Sequence[DraftingCandidate],
        output: SchedulerOutput,
        num_tokens: int,
        spare_tokens: int,
        num_rows: int,
    ) -> None:
        """Gives each group that speculates an equal share; what one cannot use is left to the groups after it."""
        speculating = [one for one in candidates if _group_may_speculate(one.group, 0)]
        sizes = [self._size(one, num_tokens) for one in speculating]
        num_kept = 0
        if num_rows:  # those that do not wait for this step may need blocks before any return
            num_waiting = sum(one.group.num_rows for one in speculating if _group_may_speculate(one.group, 1))
            num_kept = self._kv_cache_manager.most_blocks_of_next_step(num_rows - num_waiting)
        self._share_out(speculating, sizes, spare_tokens, num_kept)
        drafts = output.scheduled_spec_decode_tokens
        is_steady = all(n == 1 + len(drafts.get(id_, ())) for id_, n in output.num_scheduled_tokens.items())
        if output.num_scheduled_tokens:  # otherwise vLLM only waits for results
            self.adaptive.scheduled(num_tokens, is_steady)

    def _size(self, candidate: DraftingCandidate, num_tokens: int) -> ForestSize:
        """The size of the forest that a group may draft; without layers it takes a plain step."""
        group, request, _ = candidate
        forests = _group_forests_of(group)
        # The draft model may have a shorter maximum length.
        within_draft = self._draft_max_model_len - request.num_computed_tokens
        if within_draft < 1:
            forests.rest(group.length, NEVER_AGAIN)
        size = ForestSize(min(self._num_layers, group.num_steps_left - 1, within_draft), forests.draft_width)
        if forests.is_adaptive and size.num_layers > 0:
            size = self.adaptive.choose(forests, group.length, size.num_layers, num_tokens)
        return size

    def _share_out(
        self, candidates: Sequence[DraftingCandidate], sizes: Sequence[ForestSize], spare_tokens: int, num_kept: int
    ) -> None:
        for position, ((group, request, step), size) in enumerate(zip(candidates, sizes, strict=True)):
            num_layers, draft_width = size
            share, least = len(candidates) - position, least_drafts_to_speculate(group.plan.search)
            within_model = self._max_model_len - request.num_computed_tokens  # all drafts may be in one row
            most = min(spare_tokens // share, within_model, MOST_DRAFTS)
            num_layers = self._useful_layers(group, most, size)
            most = min(most, num_layers * draft_width)
            if num_layers < 1 or most < least:
                continue
            lookahead = lend_lookahead(self._kv_cache_manager, group, num_layers, range(least, most + 1), num_kept)
            if lookahead is None:
                continue
            lent = ForestSize(lookahead.num_layers, draft_width)
            lookahead = replace(lookahead, num_layers=self._useful_layers(group, lookahead.max_drafts, lent))
            phases = [group.next_phase(ahead) for ahead in range(1, lookahead.num_layers + 1)]
            step.budget = SpeculationBudget(**vars(lookahead), draft_width=draft_width, phases=phases)
            spare_tokens -= lookahead.max_drafts

    def _useful_layers(self, group: BeamGroup, max_drafts: int, size: ForestSize) -> int:
        """The layers of a forest of this size that may lead on, if it has so many drafts.

        Sampled forests, and those of n-grams, divide drafts among layers in other ways.
        """
        if self._by_ngrams or isinstance(group.plan.search.strategy, JointSamplingStrategy):
            return size.num_layers
        return min(size.num_layers, useful_forest_layers(max_drafts, *size, group.plan.width))

    def finished(self, decided: Iterable[DecidedMessage]) -> None:
        """See `SchedulerBudgets`."""
        self.adaptive.finished(decided)

    def learn(self, group: BeamGroup, drafted: DraftedMessage, num_steps: int) -> None:
        """See `SchedulerBudgets`.

        Drafting costs more than a plain step, and n-grams draft in vain where texts do not repeat themselves: after
        three forests in a row that led nowhere, a group rests for one step, then for 2, 4, ...
        """
        forests = _group_forests_of(group)
        if drafted == CANNOT_DRAFT:
            forests.rest(group.length, NEVER_AGAIN)
        elif forests.is_adaptive:
            self.adaptive.learn(forests, drafted, num_steps)
        elif self._by_ngrams:
            forests.num_failed = 0 if num_steps > 1 else forests.num_failed + 1
            forests.rest(group.length, min(2**forests.num_failed // 8, MOST_REST))


def _group_may_speculate(group: BeamGroup, num_more: int) -> bool:
    """Whether a group may take several steps at once, from so many tokens more than all its results have."""
    return group.length + num_more >= group.forests.first_length


def _group_forests_of(group: BeamGroup) -> GroupForests:
    """The forests of a group that speculates."""
    assert isinstance(group.forests, GroupForests)
    return group.forests


def least_drafts_to_speculate(rules: SearchRules) -> int:
    """The fewest drafts of a forest whose verification may lead to a second step.

    Sampled layers have a minimum width. A search continues if everything that lives on was drafted, if need be after
    each root; or with a single draft, where worse beams do not matter.
    """
    return 1 if rules.ranks_together and not isinstance(rules.strategy, JointSamplingStrategy) else rules.width
