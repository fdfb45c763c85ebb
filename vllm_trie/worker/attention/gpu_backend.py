"""vLLM's FlashAttention backend, whose layers read shared blocks once where that pays off.

`use_gpu_attention_backend` puts it in place of FLASH_ATTN; layers of other backends stay unchanged. FlashAttention
itself reads shared blocks, see `prefix_suffix`. trie_beam's Triton kernels compute trees and, in steps with trees, also
the other rows that share blocks. Decoding steps without such rows replay vLLM's full CUDA graphs; those with them
replay others (`startup.shared_step_graphs`) or, where there are none, piecewise ones, which do not contain attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.supported_engines import has_beams, plugin_config_of
from vllm_trie.worker.attention.prefix_suffix import (
    AttentionSequences,
    Calls,
    Layer,
    PrefixSuffixAttention,
    PrefixSuffixGraphs,
)
from vllm_trie.worker.attention.shared_rows import (
    Scoring,
    SharedRows,
    SharesAttentionPrefixes,
    attention_row_by_row,
    attention_token_by_token,
    shared_attention_tokens,
)
from vllm_trie.worker.attention.split_batch import (
    AttendsApart,
    SetApart,
    attention_rows_other_than,
    is_causal_attention,
    replace_attention_backend,
)
from vllm_trie.worker.attention.triton_kernels import MOST_HEAD_SIZE, TILE, TritonAttentionPlan
from vllm_trie.worker.kv.kv_caches import ByToken

# By the major version of FlashAttention: sequences of the first call in a full CUDA graph. 3 and 4 find on the device
# which of them have queries; 2 launches blocks for each, as if it had all queries of a step.
SEQUENCES_IN_GRAPHS = {2: 16, 3: 256, 4: 256}
# Entries in the tables of all rows of a graph: every step writes and reads them, as wide as the longest possible
# sequence.
MOST_TABLE_ENTRIES = 1 << 25
SPLIT_QUERIES = 512  # of the widest step that vLLM captures by itself
OF_BATCH = ("num_actual_tokens", "max_query_len", "query_start_loc", "seq_lens", "slot_mapping")


def use_gpu_attention_backend() -> None:
    """Registers this backend in place of FLASH_ATTN for engines of this process."""
    replace_attention_backend(AttentionBackendEnum.FLASH_ATTN, SharedPrefixAttentionBackend)


@dataclass
class SharedPrefixAttentionMetadata(SetApart, FlashAttentionMetadata):
    """The metadata of a step in which rows share blocks.

    Args:
        prefix_suffix: Attention of all rows by FlashAttention; None where Triton kernels compute those set apart.
    """

    prefix_suffix: PrefixSuffixAttention | None = None


class SharedPrefixAttentionBuilder(SharesAttentionPrefixes, FlashAttentionMetadataBuilder):
    """Sets apart the rows that share blocks.

    Properties that depend on CUDA graphs are computed late: vLLM chooses the graphs' mode once it has all builders.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM derives builders from this one for batches that are not the runner's.
        self._is_for_beams = has_beams(self.vllm_config) and type(self) is SharedPrefixAttentionBuilder
        self.option = plugin_config_of(self.vllm_config).shared_prefix_attention
        self.graphs: PrefixSuffixGraphs | None = None

    @cached_property
    def can_share(self) -> bool:  # type: ignore[override]
        """See `SharesAttentionPrefixes`."""
        return self.option != "off" and (self.splits or self.takes_trees)

    @property
    def hindrance(self) -> str | None:  # type: ignore[override]
        """See `SharesAttentionPrefixes`."""
        if not (self._is_for_beams and self._has_mixed_graphs):
            return None
        return (
            f'shared_prefix_attention="on" and cudagraph_mode={self.compilation_config.cudagraph_mode.name} exclude '
            f"each other, as full graphs hold vLLM's attention; use FULL_AND_PIECEWISE, or leave "
            f"shared_prefix_attention out"
        )

    @cached_property
    def _has_mixed_graphs(self) -> bool:
        return self.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL

    @cached_property
    def _host_us(self) -> int:
        has_no_parts = self.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY
        return HOST_US_WITHOUT_GRAPHS if has_no_parts else HOST_US

    @cached_property
    def _layers(self) -> list[SharedPrefixAttentionImpl]:
        """The implementations of this builder's layers, if it is known how all of them weigh keys; else none."""
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, self.layer_names)
        known = [layer.impl for layer in layers.values() if is_causal_attention(layer.impl)]
        is_known = (
            self._is_for_beams
            and len(known) == len(layers)
            and not self._has_mixed_graphs
            and self.rswa_window is None
            and not self.model_config.is_mm_prefix_lm
            and not self.parallel_config.use_ubatching
            and not envs.VLLM_BATCH_INVARIANT
        )
        return known if is_known else []

    @cached_property
    def splits(self) -> bool:
        """Whether FlashAttention computes prefix and suffix apart in some layers: windows hide what rows share."""
        return any(layer.scoring.window is None for layer in self._layers) and not self.fa4_hd256

    @cached_property
    def takes_trees(self) -> bool:
        """Whether the Triton kernels compute all layers of this builder."""
        return (
            bool(self._layers)
            and self.kv_cache_dtype == self.model_config.dtype
            and self.headdim % 16 == 0
            and self.headdim <= MOST_HEAD_SIZE
            and self.num_heads_q // self.num_heads_kv <= TILE
        )

    def takes(self, sharing: Sequence[tuple[int, int]], num_decoding: int) -> list[bool]:
        """See `SharesAttentionPrefixes`."""
        again = sum((num_rows - 1) * num_shared for num_rows, num_shared in sharing) * self._bytes_per_token
        num_sharing = sum(num_shared > 0 for _, num_shared in sharing)
        graphs = self.graphs if num_decoding else None
        in_graph = graphs is not None and graphs.hold(num_decoding, num_sharing)
        pays_off = self.option == "on" or (
            self.splits and shared_attention_pays(again, self.layer_bytes, 0 if in_graph else self._host_us)
        )
        return [self.may_take and pays_off and num_shared > 0 for _, num_shared in sharing]

    @property
    def _bytes_per_token(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return self.kv_cache_spec.page_size_bytes // self.block_size

    @cached_property
    def may_take(self) -> bool:
        """Whether there are groups for which it reads shared blocks once."""
        return self.can_share and (self.splits or self.option == "on")

    @property
    def graph_hindrance(self) -> str | None:
        """Why full CUDA graphs cannot contain shared reads of these layers, if they cannot."""
        if not self.splits:
            return "Triton kernels read them"
        versions = {layer.vllm_flash_attn_version for layer in self._layers}
        if unknown := versions - SEQUENCES_IN_GRAPHS.keys():
            return f"FlashAttention {unknown.pop()} computes them"
        if self.aot_schedule and versions != {3}:
            return f"vLLM schedules for FlashAttention 3, but version {min(versions - {3})} computes them"
        # 2 allows numbers of queries that differ from replay to replay if it is captured with more than one.
        if versions != {2} and self._cudagraph_support != AttentionCGSupport.ALWAYS:
            return f"this vLLM captures FlashAttention {max(versions)} for equal numbers of queries alone"
        return None

    @property
    def most_rows_in_graphs(self) -> int:
        """Rows of the widest graph whose tables are not too large."""
        return MOST_TABLE_ENTRIES // -(-self.model_config.max_model_len // self.block_size)

    @property
    def least_rows_to_share(self) -> int:
        """Rows of the narrowest step for which a full graph with shared reads may pay off."""
        if self.option == "on":
            return 2
        return 1 - -LEAST_READ_AGAIN // (self._bytes_per_token * self.model_config.max_model_len)

    def capture_in_graphs(self, sizes: Sequence[int]) -> int:
        """Prepares shared reads for full CUDA graphs of steps with so many rows, which are yet to be captured.

        Returns:
            The most groups of a step.
        """
        num_sequences = min(SEQUENCES_IN_GRAPHS[layer.vllm_flash_attn_version] for layer in self._layers)
        self.graphs = PrefixSuffixGraphs(sizes, num_sequences, self._scheduled, self.device)
        self.rest()  # unannounced steps are left to vLLM
        return self.graphs.most_groups

    def holds_in_graphs(self, num_groups: int) -> bool:
        """See `SharesAttentionPrefixes`."""
        return not self.may_take or (self.graphs is not None and num_groups <= self.graphs.most_groups)

    def _scheduled(self, sequences: AttentionSequences, causal: bool) -> dict[str, Any]:
        """What vLLM gives FlashAttention ahead of a call in a full graph: bounds, and a schedule by these."""
        num_queries = max(sequences.most_queries, len(sequences.lengths))
        num_splits = _splits_within_memory(self.max_num_splits, num_queries)
        metadata = self._get_scheduler_metadata(
            aot_schedule=self.aot_schedule,
            batch_size=len(sequences.lengths),
            cu_query_lens=sequences.starts,
            max_query_len=sequences.most_queries,
            seqlens=sequences.lengths,
            max_seq_len=sequences.most_keys,
            causal=causal,
            max_num_splits=num_splits,
        )
        return {"scheduler_metadata": metadata, "num_splits": num_splits}

    def _graphs_of(self, common: CommonAttentionMetadata, groups: Sequence[SharedRows]) -> PrefixSuffixGraphs | None:
        """The graphs that may be captured or replayed for a batch, if any."""
        graphs = self.graphs
        is_held = graphs is not None and common.max_query_len == 1 and common.num_reqs in graphs.sizes
        return graphs if is_held and self.holds_in_graphs(len(groups)) else None

    def _is_apart(self, group: SharedRows) -> bool:
        """Whether each row of a group of trees is its own group: one tree's queries may fill a tile."""
        if group.trees is None or group.trees.rows is not None:  # in the latter case the host knows no rows
            return False
        if not self.can_share:
            return True
        nodes = 1 if isinstance(group.trees.masks, torch.Tensor) else max(map(len, group.trees.masks))
        return self.option != "on" and nodes * (self.num_heads_q // self.num_heads_kv) >= TILE

    def by_token(self, kv_cache: torch.Tensor) -> list[ByToken]:
        """See `SharesAttentionPrefixes`; [blocks, KV heads, block size, 2 * head size] in vLLM."""
        return [ByToken(kv_cache.transpose(1, 2), kv_cache.shape[2:3])]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> FlashAttentionMetadata:
        groups, self.groups, common = self.groups, (), common_attn_metadata
        graphs = self._graphs_of(common, groups)
        self.rest()  # until the next announcement
        if not (groups or graphs) or common.causal is not True:
            return super().build(common_prefix_len, common, *args, **kwargs)
        assert common.seq_lens_cpu_upper_bound is not None
        has_trees = any(rows.trees is not None for rows in groups)
        if self.splits and not has_trees:
            # Only windows read it. The first metadata of all finds out which windows there are.
            stock = super().build(common_prefix_len, common, fast_build=self.aot_sliding_window is not None)
            num_splits = _splits_within_memory(stock.max_num_splits, common.num_actual_tokens)
            return SharedPrefixAttentionMetadata(
                **_attention_metadata_fields(stock),
                prefix_suffix=PrefixSuffixAttention(groups, common, self.block_size, num_splits, graphs),
            )
        groups = [
            part for group in groups for part in (attention_row_by_row([group]) if self._is_apart(group) else [group])
        ]
        bounds, tables = common.seq_lens_cpu_upper_bound.numpy(), common.block_table_tensor
        shared = shared_attention_tokens(groups, common.query_start_loc_cpu.numpy(), bounds, self.block_size)
        if shared.unseen and not self.can_share:
            shared = attention_token_by_token(shared, self.block_size)
        num_later = uploaded_for_search((bounds[shared.rows] - shared.lengths).astype(np.int32), self.device)
        rows = uploaded_for_search(shared.rows.astype(np.int64), self.device)
        plan = TritonAttentionPlan(
            shared, common.seq_lens[rows] - num_later, tables, (self.num_heads_q, self.num_heads_kv)
        )
        others = attention_rows_other_than(shared.rows, common)
        if others is None:  # only its fields are read, and there may be more rows than requests
            stock = super().build(common_prefix_len, common, fast_build=True)
        else:
            stock = super().build(common_prefix_len, others.common, *args, **kwargs)
        batch = (
            _attention_metadata_fields(stock)
            | {name: getattr(common, name) for name in OF_BATCH}
            | {"block_table": tables}
        )
        if others is None:
            return SharedPrefixAttentionMetadata(**batch, plan=plan)
        return SharedPrefixAttentionMetadata(**batch, plan=plan, others=stock, other_tokens=others.tokens)


def _attention_metadata_fields(metadata: FlashAttentionMetadata) -> dict[str, Any]:
    return {field.name: getattr(metadata, field.name) for field in fields(metadata)}


class SharedPrefixAttentionImpl(AttendsApart, FlashAttentionImpl):
    """Attention of rows that share blocks, and in the same batch, of all others."""

    @property
    def scoring(self) -> Scoring:
        before, _ = self.sliding_window
        return Scoring(self.scale, before + 1 if before >= 0 else None, self.logits_soft_cap or 0.0, self.sinks)

    def attend(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Any, output: torch.Tensor) -> bool:
        """See `AttendsApart`."""
        if step.prefix_suffix is None:
            return super().attend(layer, query, kv_cache, step, output)
        if not step.prefix_suffix.computes(self.scoring.window):
            return False
        by_token = kv_cache.transpose(1, 2)
        keys, values = by_token[..., : self.head_size], by_token[..., self.head_size :]
        keys, values = canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)
        if flash_attn.is_quantized_kv_cache(self.kv_cache_dtype):
            keys, values = (part.view(current_platform.fp8_dtype()) for part in (keys, values))
        scales = {"k_descale": layer._k_scale, "v_descale": layer._v_scale}
        if self.supports_quant_query_input:
            scales["q_descale"] = layer._q_scale
        calls = Calls(flash_attn.flash_attn_varlen_func, flash_attn.merge_attn_states)
        of_layer = Layer(query, output, keys, values, self.scoring, scales, self.vllm_flash_attn_version)
        step.prefix_suffix.attend(calls, of_layer)
        return True


class SharedPrefixAttentionBackend(FlashAttentionBackend):
    """Takes the place of FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return SharedPrefixAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return SharedPrefixAttentionBuilder


# A cost model of a layer on an H200, fitted to docs/results/gpu.md: bytes that it reads per microsecond, of weights and
# of what rows read again; the host's microseconds for two calls, a merge and the graphs around them; and roughly, for
# all operations of a layer, where there are only full graphs.
WEIGHTS_PER_US, AGAIN_PER_US, HOST_US, HOST_US_WITHOUT_GRAPHS = 4_000_000, 6_000_000, 300, 1000
LEAST_READ_AGAIN = 1 << 27  # for less, two calls and a merge take the device longer than one call


def shared_attention_pays(read_again: int, layer_bytes: int, host_us: int = HOST_US) -> bool:
    """Whether it is faster to read shared blocks once.

    Where a step with shared blocks replays no full graph, the host launches each layer's attention: two calls and a
    merge. That does not pay off where vLLM's full graph would be done with the layer by then.

    Args:
        read_again: Bytes of one layer's keys and values that rows would read again, each by itself.
        layer_bytes: Bytes of its weights on one device.
        host_us: The host's microseconds for such a layer; 0 in a full graph.
    """
    by_full_graph = layer_bytes / WEIGHTS_PER_US + read_again / AGAIN_PER_US
    return read_again >= LEAST_READ_AGAIN and by_full_graph >= host_us


def _splits_within_memory(most_splits: int, num_queries: int) -> int:
    """Into how many parts FlashAttention may split the keys of a call; 0 leaves it to FlashAttention.

    Each part has outputs of its own for all queries. FlashAttention splits nothing of a thousand sequences, but it does
    where as many rows are one sequence.

    Args:
        most_splits: vLLM's bound.
        num_queries: Of the call. Beyond `SPLIT_QUERIES`, the parts together have no more outputs than those would have.
    """
    return most_splits and max(most_splits * SPLIT_QUERIES // max(num_queries, SPLIT_QUERIES), 1)
