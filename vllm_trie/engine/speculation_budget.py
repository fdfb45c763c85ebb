"""Shares out what a step leaves over to groups that speculate: tokens and KV blocks, down to a plain step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.config import SpeculativeConfig
from vllm.v1.request import Request

from vllm_trie.engine.adaptive_forests import AdaptiveForests
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.group_forests import GroupForests
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.messages import CANNOT_DRAFT, MOST_DRAFTS, Drafted, GroupStep, SpeculationBudget
from vllm_trie.search.forest_size import ForestSize
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.strategies.drawn import Drawn

MOST_REST = 16  # steps, of a group that drafts by n-grams
NEVER_AGAIN = 1 << 40  # steps


class Speculating(NamedTuple):
    """A group whose next step may be several."""

    group: BeamGroup
    forests: GroupForests
    request: Request
    step: GroupStep


class SpeculationBudgets:
    """Shares out what a step leaves over.

    Args:
        config: The engine's.
        kv_cache_manager: Lends the blocks.
    """

    def __init__(self, config: SpeculativeConfig, kv_cache_manager: BeamKVCacheManager) -> None:
        self._num_layers, self._by_ngrams = config.num_speculative_tokens, config.use_ngram()
        self._draft_max_model_len = config.draft_model_config.max_model_len
        self._max_model_len = config.target_model_config.max_model_len
        self._kv_cache_manager = kv_cache_manager
        self.adaptive = AdaptiveForests(config.num_speculative_tokens)

    def share_out(self, candidates: Sequence[Speculating], num_tokens: int, spare_tokens: int) -> None:
        """Give each group an equal share; what one cannot use is left to those after it.

        Args:
            candidates: Scheduled to compute one token per row in this step.
            num_tokens: That the step computes without forests.
            spare_tokens: Tokens of the step's budget that nobody computes.
        """
        for position, (group, forests, request, step) in enumerate(candidates):
            # What the draft model sees of a sequence may be shorter.
            within_draft = self._draft_max_model_len - request.num_computed_tokens
            size = ForestSize(min(self._num_layers, group.num_steps_left - 1, within_draft), forests.draft_width)
            if forests.is_adaptive and size.num_layers > 0:
                size = self.adaptive.choose(forests, group.length, size.num_layers, num_tokens)
            num_layers, draft_width = size
            share, least = len(candidates) - position, least_drafts(step.rules)
            within_model = self._max_model_len - request.num_computed_tokens  # all may be in one row
            most = min(num_layers * draft_width, spare_tokens // share, within_model, MOST_DRAFTS)
            if num_layers < 1 or most < least:
                continue
            # In memory mode no more than plain beams would hold.
            most_rows = step.rules.width - 1 if group.plan.params.memory_mode else None
            drafts = range(least, most + 1)
            lookahead = self._kv_cache_manager.allocate_lookahead(request, num_layers, drafts, most_rows)
            if lookahead is None:
                continue
            rules = [group.next_rules(ahead) for ahead in range(1, lookahead.num_layers + 1)]
            step.budget = SpeculationBudget(**vars(lookahead), draft_width=draft_width, rules=rules)
            spare_tokens -= lookahead.max_drafts

    def learn(self, forests: GroupForests, length: int, forest: Drafted, num_steps: int) -> None:
        """What came of a forest: so many steps of its group's search, whose beams have this length now.

        It costs more than a plain step, and where texts do not repeat themselves n-grams draft in vain: after three in
        a row that led nowhere, a group rests for one step, then for 2, 4, ...
        """
        if forest == CANNOT_DRAFT:
            forests.rest(length, NEVER_AGAIN)
        elif forests.is_adaptive:
            self.adaptive.learn(forests, forest, num_steps)
        elif self._by_ngrams:
            forests.num_failed = 0 if num_steps > 1 else forests.num_failed + 1
            forests.rest(length, min(2**forests.num_failed // 8, MOST_REST))


def least_drafts(rules: SelectRules) -> int:
    """How many drafts a forest must have, so that verifying it may lead to a second step.

    Layers that are drawn have a least width. A search goes on where all that lives on was drafted, if it need be
    after each root, or with one draft alone where others are too bad to matter.
    """
    return 1 if rules.ranks_together and not isinstance(rules.strategy, Drawn) else rules.width
