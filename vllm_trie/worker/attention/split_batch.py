"""Splits a batch into rows that share blocks and the others, which are described as a batch of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.attention.shared_rows import Scoring


def replace_attention_backend(stock: AttentionBackendEnum, backend: type[AttentionBackend]) -> None:
    """Registers our backend in place of one of vLLM's for engines of this process."""
    register_backend(stock, f"{backend.__module__}.{backend.__qualname__}")
    _cached_get_attn_backend.cache_clear()


class OtherRows(NamedTuple):
    """Rows of a batch without those of some groups."""

    common: CommonAttentionMetadata
    tokens: torch.Tensor  # [M] int64 on the device, the indices of their tokens in the batch


def attention_rows_other_than(rows: np.ndarray, common: CommonAttentionMetadata) -> OtherRows | None:
    """The rest of a batch; None if nothing is left.

    Args:
        rows: The rows to leave out.
        common: The batch; its rows attend to all earlier tokens.
    """
    is_other = np.ones(common.num_reqs, dtype=bool)
    is_other[rows] = False
    if not is_other.any():
        return None
    device, lengths = common.seq_lens.device, np.diff(common.query_start_loc_cpu.numpy())
    others, counts = is_other.nonzero()[0], lengths[is_other]
    tokens = uploaded_for_search(np.repeat(is_other, lengths).nonzero()[0], device)
    starts = torch.from_numpy(np.append(0, counts.cumsum()).astype(np.int32))
    at, on_host = uploaded_for_search(others, device), torch.from_numpy(others)
    bounds, is_prefilling = common.seq_lens_cpu_upper_bound, common.is_prefilling
    of_others = replace(
        common,
        query_start_loc=uploaded_for_search(starts.numpy(), device),
        query_start_loc_cpu=starts,
        seq_lens=common.seq_lens[at],
        seq_lens_cpu_upper_bound=None if bounds is None else bounds[on_host],
        num_reqs=len(others),
        num_actual_tokens=len(tokens),
        max_query_len=int(counts.max()),
        block_table_tensor=common.block_table_tensor[at],
        slot_mapping=common.slot_mapping[tokens],
        positions=None if common.positions is None else common.positions[tokens],
        is_prefilling=None if is_prefilling is None else is_prefilling[on_host],
        req_idx=None if common.req_idx is None else common.req_idx[others],
    )
    return OtherRows(of_others, tokens)


class AttentionPlan(Protocol):
    """Attention of the rows that share blocks, laid out for one step."""

    def attend(self, queries: torch.Tensor, outputs: torch.Tensor, kv_cache: torch.Tensor, scoring: Scoring) -> None:
        """Computes it for one layer: [N, H, D] of the whole batch; reads and writes only these rows' tokens."""
        ...


@dataclass
class SetApart:
    """What the metadata of a step in which rows share blocks has besides the backend's own.

    Args:
        plan: Attention of these rows.
        others: vLLM's metadata of all other rows; None if there are none.
        other_tokens: [M] int64, the indices of their tokens in the batch.
    """

    plan: AttentionPlan | None = None
    others: Any | None = None
    other_tokens: torch.Tensor | None = None


class AttendsApart:
    """A layer's attention: by the plan for rows that share blocks, by the backend for all others."""

    attn_type: str
    alibi_slopes: Any

    @property
    def scoring(self) -> Scoring:
        """How the layer weighs keys."""
        raise NotImplementedError

    def attend(self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Any, output: torch.Tensor) -> bool:
        """Computes the rows that are set apart in a step; returns whether there are any."""
        if step.plan is None:
            return False
        step.plan.attend(query, output, kv_cache, self.scoring)
        return True

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """See vLLM's `AttentionImpl.forward`."""
        stock = super().forward  # type: ignore[misc]
        if not isinstance(attn_metadata, SetApart) or not self.attend(layer, query, kv_cache, attn_metadata, output):
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if attn_metadata.others is not None:
            at = attn_metadata.other_tokens
            queries, of_others = query[at], torch.empty_like(output[at])
            stock(layer, queries, key, value, kv_cache, attn_metadata.others, of_others, *args, **kwargs)
            output[at] = of_others
        return output


def is_causal_attention(impl: Any) -> bool:
    """Whether trie_beam's kernels compute a layer's kind of attention: causal, by products of queries and keys."""
    return is_decoder_attention(impl) and impl.attn_type == AttentionType.DECODER


def is_decoder_attention(impl: Any) -> bool:
    """As `is_causal_attention`, or the attention of a decoder to an encoder's output."""
    known = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    return isinstance(impl, AttendsApart) and impl.attn_type in known and impl.alibi_slopes is None
