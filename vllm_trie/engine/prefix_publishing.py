"""The next turn: what a search answers enters vLLM's prefix cache. A chat that goes on from it computes its tail alone.

A row is full blocks that it shares with others, and a tail of its own. When a hypothesis becomes the best of its
search, the row that it ended in holds all of its KV but that of its last token, and the row's full blocks are never
written again: they get their hashes there and then, from tokens that are theirs. Nothing is held for it: when no beam
leads to these blocks any more, they go back to the pool as vLLM's own cached blocks do, and are evicted last.

The best hypothesis alone is entered: the other n-1 have most of their blocks in common with it, and each block of
theirs that a chat does not go on from would evict one of somebody's chat that does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import partial

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request
from vllm.v1.utils import ConstantList

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.search.step_result import SearchStepResult

Hasher = Callable[[Request], list[BlockHash]]


class GroupPrefixCache:
    """Enters hypotheses of groups into the prefix cache, in engines that have one.

    Args:
        kv_cache_manager: Has the rows' blocks.
        has_draft_kv: Blocks hold the KV of a draft model too, which computes beams late: they are entered as far as it
            has come. Where attention sees a window, what it should see may have left it by then, and none are.
    """

    def __init__(self, kv_cache_manager: BeamKVCacheManager, has_draft_kv: bool) -> None:
        self._kv_cache_manager = kv_cache_manager
        groups = kv_cache_manager.kv_cache_config.kv_cache_groups
        has_windows = any(not isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups)
        self._has_draft_kv = has_draft_kv
        self._enters = kv_cache_manager.enable_caching and not (has_draft_kv and has_windows)
        self._hash_block_size = kv_cache_manager.block_pool.hash_block_size
        self._hasher: Hasher | None = None  # vLLM's; None without prefix caching or a KV connector

    def open(self, request: Request) -> None:
        """A request will stand for a group: its prompt is hashed already, and what vLLM appends is no row's history."""
        self._hasher, request._block_hasher = request._block_hasher, None

    def rehash(self, request: Request) -> None:
        """What a group's request says that it has generated is true again: all rows have it in common."""
        if self._hasher is not None:
            del request.block_hashes[request.num_prompt_tokens // self._hash_block_size :]
            request.block_hashes.extend(self._hasher(request))

    def enter(self, request: Request, group: BeamGroup, steps: Sequence[SearchStepResult], length: int) -> None:
        """Enter the best finished hypothesis, which ended in one of these steps, as far as a row holds it.

        What a forest computed beyond its roots is left out: rows hold it of the beams alone that all steps led to.

        Args:
            request: Stands for the group.
            group: It has decoded. The forks of these steps are not replayed on its block tries yet.
            steps: Which one forward of the model led to, as far as they count.
            length: Tokens that each row had generated before them, all of them computed.
        """
        ended_at, row = group.best_end
        if self._hasher is None or not self._enters:
            return
        for step in reversed(steps[: ended_at - length]):
            row = int(step.parents[row])
        computed = min(length, group.forests.drafted_length) if self._has_draft_kv else length
        num_tokens = request.num_prompt_tokens + computed
        history = partial(self._with_history, request, group, num_tokens)
        self._kv_cache_manager.cache_row(request.request_id, row, num_tokens, history)

    def _with_history(self, request: Request, group: BeamGroup, num_tokens: int) -> Request:
        """A request like the group's, hashed, that has generated its best hypothesis.

        Its prompt ends behind the tokens that are computed: of a window vLLM caches only what a request can resume from
        that brings the same prompt, which is what the next turn does.
        """
        assert self._hasher is not None
        history = copy(request)
        (history._output_token_ids,) = group.hypotheses.tokens(group.pool.best(1).leaves)
        history._all_token_ids = request._all_token_ids[: request.num_prompt_tokens] + history._output_token_ids
        history.output_token_ids = ConstantList(history._output_token_ids)
        history.all_token_ids = ConstantList(history._all_token_ids)
        history.num_prompt_tokens = num_tokens + 1
        history.block_hashes = request.block_hashes[: request.num_prompt_tokens // self._hash_block_size]
        history.block_hashes.extend(self._hasher(history))
        return history
