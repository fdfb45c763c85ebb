"""FlashAttention's functions as vLLM calls them, in torch and float64: of paged keys and values, for rows of a batch.

As on a GPU, what a row reads beyond its keys must not matter, a token that sees no key gets zeros, and tokens of no row
anything.
"""

from __future__ import annotations

from typing import Any

import torch

NO_KEYS = torch.inf  # what FlashAttention 2 gives as a logarithm of nothing; 3 gives -inf


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    block_table: torch.Tensor,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    s_aux: torch.Tensor | None = None,
    no_keys: float = NO_KEYS,
    **unused: Any,
) -> Any:
    """[tokens, heads, head size], and [heads, tokens] float32 logarithms of the sums of weights."""
    num_rows = len(seqused_k)
    assert cu_seqlens_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert len(cu_seqlens_q) == num_rows + 1 == len(block_table) + 1
    assert int(cu_seqlens_q[0]) == 0 <= int(cu_seqlens_q.diff().min())
    assert int(cu_seqlens_q[-1]) <= len(q)
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
    assert int(seqused_k.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    assert block_table.stride(1) == q.stride(2) == k.stride(3) == v.stride(3) == 1
    heads = q.shape[1] // k.shape[2]
    outputs, logs = torch.zeros_like(q, dtype=torch.float64), torch.full(q.shape[:2], no_keys, dtype=torch.float64)
    for row, (first, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        length, count = int(seqused_k[row]), end - first
        if not count:
            continue
        keys, values = (
            (
                cache[block_table[row].long()].flatten(0, 1)[:length].double()
                * _scale(scale, row, num_rows, k.shape[2])
            ).repeat_interleave(heads, 1)
            for cache, scale in ((k, k_descale), (v, v_descale))
        )
        queries = (
            q[first:end].double().unflatten(1, (-1, heads)) * _scale(q_descale, row, num_rows, k.shape[2])[..., None, :]
        ).flatten(1, 2)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        position = torch.arange(length - count, length)[:, None]
        before, after = window_size or (-1, -1)
        sees = torch.ones(count, length, dtype=torch.bool)
        sees &= (torch.arange(length) <= position + (0 if causal else after)) | (not causal and after < 0)
        sees &= (torch.arange(length) >= position - before) | (before < 0)
        scores = scores.masked_fill(~sees, -torch.inf)
        if s_aux is not None:
            scores = torch.cat([scores, s_aux.double()[:, None, None].expand(-1, count, -1)], dim=-1)
        log = scores.logsumexp(-1) if scores.shape[-1] else torch.full(scores.shape[:2], -torch.inf)
        weights = (scores - log[..., None]).exp()[..., :length].nan_to_num(0.0)
        outputs[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
        logs[first:end] = log.T.where(log.T.isfinite(), no_keys)
    outputs[int(cu_seqlens_q[-1]) :] = logs[int(cu_seqlens_q[-1]) :] = torch.nan
    found = outputs.to(q.dtype)
    if out is not None:
        found = out.copy_(found)
    return (found, logs.T.float()) if return_softmax_lse else found


def _scale(scale: torch.Tensor | None, row: int, num_rows: int, num_kv_heads: int) -> torch.Tensor:
    """[KV heads, 1] float64, of one row."""
    if scale is None:
        return torch.ones(num_kv_heads, 1, dtype=torch.float64)
    assert scale.shape == (num_rows, num_kv_heads)
    return scale[row, :, None].double()
