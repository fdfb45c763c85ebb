"""What a runner holds of its rows' histories: their tokens, their block tables, and KV blocks."""

from __future__ import annotations

from functools import cached_property

from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.kv_blocks import KVBlocks
from vllm_trie.worker.reorder import reorder_rows
from vllm_trie.worker.row_reorder import Reorders, RowReorder, Tables


class Histories:
    """Those of one runner, once it has its KV caches.

    Args:
        runner: vLLM's.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner

    @cached_property
    def tables(self) -> Tables:
        """The runner's block tables, those that say the same of all rows of a group left out."""
        tables, groups = self._runner.block_tables, self._runner.kv_cache_config.kv_cache_groups
        differing = [n for n, group in enumerate(groups) if not isinstance(group.kv_cache_spec, CrossAttentionSpec)]
        sizes = [tables.block_sizes[number] for number in differing]
        return Tables.of([tables.block_tables[number].gpu for number in differing], sizes)

    @cached_property
    def kv_blocks(self) -> KVBlocks:
        """The runner's KV caches, a draft model's among them."""
        return KVBlocks(self._runner.kv_caches, self._runner.kv_cache_config.num_blocks)

    def reorder(self, reorders: Reorders) -> RowReorder:
        """Let rows continue the histories of others. Returns which, on the device."""
        moved = reorders.on(self._runner.device)
        reorder_rows(moved, self._runner.req_states.all_token_ids.gpu, self.tables, self.kv_blocks)
        return moved
