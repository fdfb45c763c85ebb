"""vLLM's FlashAttention backend, whose layers read shared blocks once by kernels of ours, where an engine asks for it.

`use_shared_prefixes` puts it in the place of FLASH_ATTN; layers that another backend computes stay as they are. Steps
without such rows replay full CUDA graphs as ever, steps with them piecewise ones: attention is not in those.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_trie.selection import config_of, has_beams
from vllm_trie.worker.attention.shared_rows import Scoring, SharesPrefixes, row_by_row, tokens_of
from vllm_trie.worker.attention.split_batch import AttendsApart, SetApart, is_causal, others_than, replace_backend
from vllm_trie.worker.attention.triton_kernels import MOST_HEAD_SIZE, TILE, Plan
from vllm_trie.worker.kv_slots import ByToken

OF_BATCH = ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "slot_mapping")


def use_shared_prefixes() -> None:
    """Let engines of this process find this backend where they look for FLASH_ATTN."""
    replace_backend(AttentionBackendEnum.FLASH_ATTN, SharedPrefixBackend)


@dataclass
class SharedPrefixMetadata(SetApart, FlashAttentionMetadata):
    """A step in which rows share blocks."""


class SharedPrefixBuilder(SharesPrefixes, FlashAttentionMetadataBuilder):
    """Sets the rows apart that share blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM derives builders of its own from this one, for batches that are not the runner's.
        self._is_for_beams = has_beams(self.vllm_config) and type(self) is SharedPrefixBuilder
        is_asked = self._is_for_beams and config_of(self.vllm_config).shared_prefix_attention == "on"
        mode = self.compilation_config.cudagraph_mode
        self._has_mixed_graphs = mode.mixed_mode() == CUDAGraphMode.FULL
        if is_asked and self._has_mixed_graphs:
            raise ValueError(
                f'shared_prefix_attention="on" and cudagraph_mode={mode.name} exclude each other, as full graphs hold '
                f"vLLM's attention; use FULL_AND_PIECEWISE, or leave shared_prefix_attention out"
            )
        self.can_share = is_asked and self.takes_trees

    @cached_property
    def takes_trees(self) -> bool:
        """Whether all layers of this builder are of a kind that the kernels compute."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        return (
            self._is_for_beams
            and not self._has_mixed_graphs
            and all(is_causal(layer.impl) for layer in layers.values())
            and self.kv_cache_dtype == self.model_config.dtype
            and self.headdim % 16 == 0
            and self.headdim <= MOST_HEAD_SIZE
            and self.num_heads_q // self.num_heads_kv <= TILE
            and self.rswa_window is None
            and not self.model_config.is_mm_prefix_lm
            and not self.parallel_config.use_ubatching
            and not envs.VLLM_BATCH_INVARIANT
        )

    def takes(self, num_rows: int, num_shared: int) -> bool:
        """See `SharesPrefixes`."""
        return self.can_share and num_shared > 0

    def by_token(self, kv_cache: torch.Tensor) -> list[ByToken]:
        """See `SharesPrefixes`; [blocks, KV heads, block size, 2 * head size] in vLLM."""
        return [ByToken(kv_cache.transpose(1, 2), kv_cache.shape[2:3])]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> FlashAttentionMetadata:
        groups, self.groups, common = self.groups, (), common_attn_metadata
        if not groups or common.causal is not True:
            return super().build(common_prefix_len, common, *args, **kwargs)
        assert common.seq_lens_cpu_upper_bound is not None
        if not self.can_share:
            groups = row_by_row(groups)
        bounds, tables = common.seq_lens_cpu_upper_bound.numpy(), common.block_table_tensor
        shared = tokens_of(groups, common.query_start_loc_cpu.numpy(), bounds, self.block_size)
        behind = async_tensor_h2d(bounds[shared.rows] - shared.lengths, device=self.device, dtype=torch.int32)
        rows = async_tensor_h2d(shared.rows, device=self.device, dtype=torch.int64)
        plan = Plan(shared, common.seq_lens[rows] - behind, tables, (self.num_heads_q, self.num_heads_kv))
        others = others_than(shared.rows, common)
        stock = super().build(common_prefix_len, common if others is None else others.common, *args, **kwargs)
        batch = {field.name: getattr(stock, field.name) for field in fields(stock)}
        batch |= {name: getattr(common, name) for name in OF_BATCH} | {"block_table": tables}
        if others is None:
            return SharedPrefixMetadata(**batch, plan=plan)
        return SharedPrefixMetadata(**batch, plan=plan, others=stock, other_tokens=others.tokens)


class SharedPrefixImpl(AttendsApart, FlashAttentionImpl):
    """Attention of rows that share blocks, and beside them of all others."""

    @property
    def scoring(self) -> Scoring:
        before, _ = self.sliding_window
        return Scoring(self.scale, before + 1 if before >= 0 else None, self.logits_soft_cap or 0.0, self.sinks)


class SharedPrefixBackend(FlashAttentionBackend):
    """Stands for FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SharedPrefixBuilder
