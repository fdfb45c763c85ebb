"""What a step leaves over is granted to the groups that speculate: rows, tokens and KV blocks, down to a plain step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm.config import SpeculativeConfig
from vllm.v1.request import Request

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.messages import Grant, GroupStep


class Speculating(NamedTuple):
    """A group whose next step may be several."""

    group: BeamGroup
    request: Request
    step: GroupStep


class SpeculationGrants:
    """Shares out what a step leaves over.

    Args:
        config: The engine's.
        kv_cache_manager: Lends the blocks.
    """

    def __init__(self, config: SpeculativeConfig, kv_cache_manager: BeamKVCacheManager) -> None:
        self._num_layers = config.num_speculative_tokens
        self._draft_max_model_len = config.draft_model_config.max_model_len
        self._kv_cache_manager = kv_cache_manager

    def share_out(self, eager: Sequence[Speculating], spare_rows: int, spare_tokens: int) -> None:
        """Give each group an equal share; what one cannot use is left to those after it.

        Args:
            eager: Scheduled to compute one token per row in this step.
            spare_rows: Rows of the batch that nobody takes.
            spare_tokens: Tokens of the step's budget that nobody computes.
        """
        for position, (group, request, step) in enumerate(eager):
            # What the draft model sees of a sequence may be shorter.
            within_draft = self._draft_max_model_len - request.num_computed_tokens
            num_layers = min(self._num_layers, group.num_steps_left - 1, within_draft)
            if num_layers < 1:
                continue
            share = len(eager) - position
            most_rows = min(spare_rows // share, num_layers * (group.draft_width - 1))
            lent = self._kv_cache_manager.lend(request, num_layers, most_rows)
            if lent is None:
                continue
            most_tokens = spare_tokens // share
            step.grant = Grant(
                lent.num_layers,
                group.draft_width,
                group.num_rows + most_tokens,
                lent.spare_rows,
                lent.next_blocks,
                [group.next_rules(ahead) for ahead in range(1, lent.num_layers + 1)],
            )
            spare_rows -= len(lent.spare_rows)
            spare_tokens -= most_tokens
