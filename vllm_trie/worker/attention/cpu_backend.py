"""vLLM's CPU attention backend, whose layers read shared blocks once where that pays off.

`use_cpu_attention_backend` puts it in place of CPU_ATTN. In every step the runner announces to the metadata builders of
its layers which rows share what; a builder that cannot use it leaves everything to vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_trie.supported_engines import has_beams, plugin_config_of
from vllm_trie.worker.attention import compiled
from vllm_trie.worker.attention.compiled import CompiledAttentionPlan
from vllm_trie.worker.attention.shared_rows import Scoring, SharesAttentionPrefixes, shared_attention_tokens
from vllm_trie.worker.attention.split_batch import (
    AttendsApart,
    SetApart,
    attention_rows_other_than,
    is_decoder_attention,
    replace_attention_backend,
)
from vllm_trie.worker.kv.kv_caches import ByToken

logger = init_logger("vllm.trie_beam.attention")

WITHOUT_KERNEL = "Attention reads shared blocks once per row, as in vLLM, and does not support draft trees: %s"


def use_cpu_attention_backend() -> None:
    """Registers this backend in place of CPU_ATTN for engines of this process."""
    replace_attention_backend(AttentionBackendEnum.CPU_ATTN, SharedPrefixAttentionBackend)


@dataclass
class SharedPrefixAttentionMetadata(SetApart, CPUAttentionMetadata):
    """The metadata of a step in which rows share blocks."""


class SharedPrefixAttentionBuilder(SharesAttentionPrefixes, CPUAttentionMetadataBuilder):
    """Sets apart the rows that share blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM derives builders from this one: for cross-attention, and for batches that are not the runner's.
        self._is_ours = type(self) is SharedPrefixAttentionBuilder or self.is_cross_attention
        self.option = plugin_config_of(self.vllm_config).shared_prefix_attention
        self.can_share = self.option != "off" and self._is_computed

    @property
    def takes_trees(self) -> bool:
        return self._is_computed and not self.is_cross_attention

    @cached_property
    def _is_computed(self) -> bool:
        """Whether the kernel computes all layers of this builder."""
        if not (self._is_ours and has_beams(self.vllm_config)):
            return False
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        is_known_kind = all(
            is_decoder_attention(layer.impl) and not layer.impl.is_fp8_kv_cache for layer in layers.values()
        )
        is_known_shape = (self.isa, self.dtype) in compiled.MATRICES and self.head_dim % compiled.HEAD_SIZES == 0
        if not (is_known_kind and is_known_shape):
            return False
        try:
            heads = self.num_heads, self.num_kv_heads, self.head_dim
            compiled.check_compiled_attention(*heads, self.block_size, self.dtype, self.isa)
        except compiled.CompilerError as error:
            if self.option == "on":
                raise ValueError(f'shared_prefix_attention="on" is not possible: {error}; use "auto"') from error
            logger.warning_once(WITHOUT_KERNEL, error)
            return False
        return True

    def takes(self, sharing: Sequence[tuple[int, int]], num_decoding: int) -> list[bool]:
        """See `SharesAttentionPrefixes`."""
        return [self._takes(*of_group) for of_group in sharing]

    def _takes(self, num_rows: int, num_shared: int) -> bool:
        if self.option == "on":
            return self.can_share and num_shared > 0
        was_measured = self.isa != "amx"  # only vLLM's kernel uses AMX's matrix units well
        heads = self.num_heads // self.num_kv_heads
        num_shared = min(num_shared, self.window_size) if self.window_size > 0 else num_shared
        return self.can_share and was_measured and shared_attention_pays(num_rows, num_shared, heads, self.dtype)

    def by_token(self, kv_cache: torch.Tensor) -> list[ByToken]:
        """See `SharesAttentionPrefixes`; shared_prefix.cpp documents the layout of blocks."""
        blocks, heads, block_size, of_both = kv_cache.shape
        size = of_both // 2
        keys, values = kv_cache.flatten(2).view(blocks, heads, 2, -1).unbind(2)
        if self.isa == "amx":
            keys = keys.view(blocks, heads, block_size // 16, size // 2, 16, 2).permute(0, 2, 4, 1, 3, 5)
            values = values.view(blocks, heads, size // 16, block_size // 2, 16, 2).permute(0, 3, 5, 1, 2, 4)
            return [ByToken(keys, (block_size // 16, 16)), ByToken(values, (block_size // 2, 2))]
        keys = keys.view(blocks, heads, size, block_size).permute(0, 3, 1, 2)
        values = values.view(blocks, heads, block_size, size).transpose(1, 2)
        return [ByToken(keys, (block_size,)), ByToken(values, (block_size,))]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> CPUAttentionMetadata:
        groups, self.groups, common = self.groups, (), common_attn_metadata
        if not groups or not (common.causal is True or self.is_cross_attention):
            self.rest()
            return super().build(common_prefix_len, common, *args, **kwargs)
        if not self.can_share:
            groups = [rows._replace(num_shared=0) for rows in groups]
        of_rows = common.query_start_loc.numpy(), common.seq_lens.numpy()
        shared = shared_attention_tokens(groups, *of_rows, self.block_size, sees_all=self.is_cross_attention)
        shared = shared.on_host()
        others = attention_rows_other_than(shared.rows, common)
        return SharedPrefixAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
            plan=CompiledAttentionPlan(shared, common.block_table_tensor, self.isa),
            others=None if others is None else super().build(0, others.common, *args, **kwargs),
            other_tokens=None if others is None else others.tokens,
        )


class SharedPrefixAttentionImpl(AttendsApart, CPUAttentionBackendImpl):
    """Attention of rows that share blocks, and in the same batch, of all others."""

    @property
    def scoring(self) -> Scoring:
        window = self.sliding_window if self.sliding_window > 0 else None
        sinks = None if self.sinks is None else self.sinks.float()
        return Scoring(self.scale, window, self.logits_soft_cap, sinks)


class SharedPrefixAttentionBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return SharedPrefixAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SharedPrefixAttentionBuilder


# By query heads per KV head, at least: from how many rows, and shared tokens, on it was measured to be faster,
# with heads of 32, 64 and 128. With several query heads vLLM already reads a key once for all of them.
PAYS_FROM = {1: (8, 64), 4: (16, 256)}
PAYS_FROM_BY_TWO = {1: (8, 64)}  # where the kernel multiplies pairs of bfloat16, as vLLM's does only with AMX


def shared_attention_pays(num_rows: int, num_shared: int, heads_per_kv_head: int, dtype: torch.dtype) -> bool:
    """Whether it is faster to read shared blocks once."""
    by_two = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    pays_from = PAYS_FROM_BY_TWO if by_two else PAYS_FROM
    least_rows, least_shared = pays_from[max(heads for heads in pays_from if heads <= heads_per_kv_head)]
    return num_rows >= least_rows and num_shared >= least_shared
