"""Samples tokens from logits [N, V], and computes their log-probabilities.

The random numbers are those of vLLM's kernels: a request with a seed samples the same tokens on any device.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu

HIGH_BITS = 0x9E3779B9  # the hash domain of the upper half of 64 bits


@replaces_on_cpu("sample.gumbel:_gumbel_sample_kernel")
def gumbel_sample_on_cpu(
    local_argmax: Array, local_max: Array, logits_cache: None, logits: Tensor, expanded_idx_mapping: Array,
    seeds: Array, pos: Array, temp: Array, use_fp64: bool,
) -> None:  # fmt: skip
    """Samples a token per row, and reports it from the vocabulary's first block [N, B], which beats all others."""
    assert logits_cache is None, "the logits of drafts are not kept on a CPU"
    temperature = np.where(expanded_idx_mapping >= 0, temp[expanded_idx_mapping], 0.0)
    local_max[:] = -np.inf
    local_max[:, 0] = 0.0
    local_argmax[:, 0] = sample_tokens_on_cpu(logits, temperature, seeds[expanded_idx_mapping], pos, use_fp64)


def sample_tokens_on_cpu(logits: Tensor, temperature: Array, seeds: Array, pos: Array, use_fp64: bool) -> Array:
    """[N] int64: a token sampled from each row of logits, or the best one where temperature [N] is 0.

    Args:
        logits: [N, V], divided by the temperature.
        seeds: [N] int64, of the requests.
        pos: [N] int64, positions of the tokens that logits are for, which make each sample of a request independent.
        use_fp64: Sample with 64 bits instead of 32.
    """
    rows = np.flatnonzero(temperature)
    if len(rows) == len(logits):
        noise = exponentials_on_cpu(seeds, pos, logits.shape[1], use_fp64).log_()  # Gumbel noise is -log(exponential)
        return torch.sub(logits, noise, out=noise).numpy().argmax(-1)
    tokens = best_tokens_on_cpu(logits)
    if len(rows):
        tokens[rows] = sample_tokens_on_cpu(logits[rows], temperature[rows], seeds[rows], pos[rows], use_fp64)
    return tokens


def best_tokens_on_cpu(logits: Tensor) -> Array:
    """[N] int64: the argmax of each row, for which numpy takes a tenth of torch's time."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy().argmax(-1)


def exponentials_on_cpu(seeds: Array, pos: Array, vocab_size: int, use_fp64: bool) -> Tensor:
    """[N, V]: exponential random numbers for seeds and positions [N]."""
    bits = murmur3_hash_on_cpu(seeds, pos, vocab_size)
    if not use_fp64:
        return torch.from_numpy(bits.astype(np.float32)).add_(0.5).mul_(-(2.0**-32)).log1p_().neg_()
    high = murmur3_hash_on_cpu(seeds, pos, vocab_size, HIGH_BITS).astype(np.uint64)
    random53 = (high << np.uint64(32) | bits) >> np.uint64(11)
    return torch.from_numpy((random53 + 0.5) * 2.0**-53).clamp_(max=1 - 2.0**-53).log_().neg_()


def murmur3_hash_on_cpu(seeds: Array, pos: Array, vocab_size: int, domain: int = 0) -> Array:
    """[N, V] uint32: vLLM's `murmur3_hash32` of seeds and positions [N] int64 and all tokens."""
    keys = (np.stack((seeds, seeds >> 32, pos)) & 0xFFFFFFFF).astype(np.uint32) * np.uint32(0xCC9E2D51)
    keys = ((keys << np.uint32(15)) | (keys >> np.uint32(17))) * np.uint32(0x1B873593)
    h = np.full(len(seeds), domain, np.uint32)
    for key in keys:
        h ^= key
        h = ((h << np.uint32(13)) | (h >> np.uint32(19))) * np.uint32(5) + np.uint32(0xE6546B64)
    h = ((h << np.uint32(13)) | (h >> np.uint32(19)))[:, None] ^ _rotated_tokens_on_cpu(vocab_size)
    h *= np.uint32(5)  # in place: there may be millions
    h += np.uint32(0xE6546B64)
    h ^= np.uint32(16)
    shifted = h >> np.uint32(16)
    for factor, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
        h ^= shifted
        h *= np.uint32(factor)
        np.right_shift(h, np.uint32(shift), out=shifted)
    h ^= shifted
    return h


@cache
def _rotated_tokens_on_cpu(vocab_size: int) -> Array:
    """By token, the rotated term of the last round: rotating combined bits equals combining rotated bits."""
    keys = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0xCC9E2D51)
    keys = ((keys << np.uint32(15)) | (keys >> np.uint32(17))) * np.uint32(0x1B873593)
    return (keys << np.uint32(13)) | (keys >> np.uint32(19))


@replaces_on_cpu("sample.logprob:_topk_log_softmax_kernel")
def topk_log_softmax_on_cpu(output: Tensor, logits: Tensor, topk_ids: Tensor) -> None:
    """The log-probabilities [N, K] of tokens [N, K]."""
    torch.gather(logits.float().log_softmax(-1), 1, topk_ids, out=output)


@replaces_on_cpu("sample.logprob:_ranks_kernel")
def token_ranks_on_cpu(output: Tensor, logits: Tensor, token_ids: Tensor) -> None:
    """How many tokens are at least as likely as each of token_ids [N]."""
    torch.sum(logits >= logits.gather(1, token_ids[:, None].long()), dim=1, out=output)


@replaces_on_cpu("sample.logprob:_fill_logprob_token_ids_kernel")
def fill_logprob_token_ids_on_cpu(
    out_token_ids: Tensor, out_valid_mask: Tensor, sampled_token_ids: Tensor, topk_indices: Tensor,
    expanded_idx_mapping: Tensor, num_per_req_token_ids: Tensor, per_req_token_ids: Tensor, num_topk: int,
) -> None:  # fmt: skip
    """Which tokens need log-probabilities [N, 1 + K]: the sampled one, and the request's own list or the best."""
    out_token_ids[:, 0], out_valid_mask[:, 0] = sampled_token_ids, True
    num_own = num_per_req_token_ids[expanded_idx_mapping]
    best = (num_own == 0).nonzero()[:, 0]
    out_token_ids[best, 1 : 1 + num_topk] = topk_indices[best, :num_topk].long()
    out_valid_mask[best, 1 : 1 + num_topk] = True
    row, place = (torch.arange(out_token_ids.shape[1] - 1) < num_own[:, None]).nonzero(as_tuple=True)
    out_token_ids[row, 1 + place] = per_req_token_ids[expanded_idx_mapping[row], place].long()
    out_valid_mask[row, 1 + place] = True


@replaces_on_cpu("metrics.logits:_num_nans_kernel")
def num_nans_on_cpu(logits: Tensor, num_nans: Tensor) -> None:
    """How many logits of each row are NaN."""
    num_nans.copy_(logits.isnan().sum(-1))
