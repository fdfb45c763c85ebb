"""Enters the answer of a search into vLLM's prefix cache, so that the next turn of a chat computes only what is new.

A row consists of full blocks, which it may share, and a tail that only it has. When a hypothesis becomes the best of
its search, the row that it ended in holds the KV of all its tokens but the last, and the row's full blocks are never
written again, so they are hashed at once. They are not held: when no beam uses them any more, they return to the pool
like vLLM's own cached blocks, and are evicted last.

Only the best hypothesis is entered: the other n-1 share most of their blocks with it, and each further block that no
chat continues would evict one of a chat that is continued.
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
        has_draft_kv: Blocks also hold the KV of a draft model, which computes beams late: blocks are entered as far as
            it has come. With window attention none are, as blocks may have left the window by then.
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
        """Stop hashing a request that stands for a group: tokens that vLLM appends to it are not a row's history."""
        self._hasher, request._block_hasher = request._block_hasher, None

    def rehash(self, request: Request) -> None:
        """Hash a group's request again, whose generated tokens are now those that all rows have in common."""
        if self._hasher is not None:
            del request.block_hashes[request.num_prompt_tokens // self._hash_block_size :]
            request.block_hashes.extend(self._hasher(request))

    def enter(self, request: Request, group: BeamGroup, steps: Sequence[SearchStepResult], length: int) -> None:
        """Enter the best finished hypothesis, which ended in one of these steps, as far as a row holds its KV.

        KV that a forest computed beyond its roots is left out: rows hold it only for the beams after all steps.

        Args:
            request: Stands for the group.
            group: A decoding group. The forks of these steps are not yet replayed on its block tries.
            steps: The search steps of one forward pass, without those after the end of the search.
            length: Generated tokens of each row before these steps, all of them computed.
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
        """A hashed copy of the group's request that has generated its best hypothesis.

        Its prompt ends one token after the computed ones: with a window, vLLM caches only blocks from which a request
        with the same prompt can resume, as the next turn does.
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
