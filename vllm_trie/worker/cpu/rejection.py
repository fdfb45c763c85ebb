"""Verifies a draft model's tokens for ordinary requests.

R requests have N rows of logits: each request's last row is for one more token, the others verify its drafts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_trie.search import search_spans
from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu
from vllm_trie.worker.cpu.sampling import best_tokens_on_cpu, sample_tokens_on_cpu

SMALLEST = 4.6566127342e-10  # the smallest of Triton's random numbers other than 0


@replaces_on_cpu("spec_decode.rejection_sampler:_gather_draft_sampled_kernel")
def gather_draft_sampled_on_cpu(
    draft_sampled: Tensor, pos: Tensor, input_ids: Tensor, positions: Tensor, logits_indices: Tensor,
    expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, prefill_len: Tensor,
) -> None:  # fmt: skip
    """The input token and position of each row of logits [N]; -1 for drafts in place of prompt tokens."""
    pos.copy_(positions[logits_indices])
    is_placeholder = (expanded_local_pos > 0) & (pos - expanded_local_pos < prefill_len[expanded_idx_mapping])
    draft_sampled.copy_(input_ids[logits_indices].masked_fill(is_placeholder, -1))


@replaces_on_cpu("spec_decode.rejection_sampler:_flatten_sampled_kernel")
def flatten_sampled_on_cpu(flat_sampled: Array, sampled: Array, num_sampled: Array, cu_num_logits: Array) -> None:
    """Lays out tokens [R, 1 + drafts] as logits are [N]; each row has the first num_sampled [R] of its tokens."""
    row, local = np.repeat(np.arange(len(num_sampled)), num_sampled), search_spans(0, num_sampled)
    flat_sampled[cu_num_logits[row] + local] = sampled[row, local]


@replaces_on_cpu("spec_decode.rejection_sampler_utils:rejection_sample", imported_by="spec_decode.rejection_sampler")
def rejection_sample_on_cpu(
    target_logits: Tensor, draft_logits: None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
    idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor, seed: Tensor,
    num_speculative_steps: int, synthetic_conditional_rates: None = None, use_fp64: bool = False, **unsupported: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Accepts drafts until one is rejected, and samples one more token.

    A draft is accepted with its probability under the target, because the draft model proposes it with certainty; at
    temperature 0, if it is the best token. After a rejection the target is sampled without the draft.

    Args:
        target_logits: [N, V], with temperatures applied.
        draft_sampled: [N], the token before each row of logits; -1 is never accepted.
        pos: [N], positions of those tokens.
        temperature: [S], like `seed`.

    Returns:
        Tokens [R, 1 + drafts] int64, and how many each row has, [R] int32.
    """
    temperatures, seeds = temperature[expanded_idx_mapping], seed[expanded_idx_mapping]
    draft = torch.full_like(draft_sampled, -1, dtype=torch.int64)  # the draft that each row of logits verifies
    draft[:-1] = draft_sampled[1:]
    draft[cu_num_logits[1:].long() - 1] = -1
    is_taken = draft == torch.from_numpy(best_tokens_on_cpu(target_logits))
    by_chance = ((temperatures != 0) & (draft >= 0)).nonzero()[:, 0]
    if len(by_chance):
        probability = target_logits[by_chance].float().softmax(-1).gather(1, draft[by_chance, None])[:, 0]
        is_taken[by_chance] = probability > uniform_on_cpu(seeds[by_chance].numpy(), pos[by_chance].numpy())
    row = torch.repeat_interleave(torch.arange(len(idx_mapping)), cu_num_logits.diff())
    place = row, expanded_local_pos.long()
    taken, sampled = torch.zeros(2, len(idx_mapping), num_speculative_steps + 1, dtype=torch.int64)
    taken[place], sampled[place] = is_taken.long(), draft
    num_taken = taken.cumprod(1).sum(1)
    last = cu_num_logits[:-1] + num_taken
    rejected, logits = (draft[last] >= 0).nonzero()[:, 0], target_logits[last].float()
    logits[rejected, draft[last][rejected]] = float("-inf")
    at_last = temperatures[last].numpy(), seeds[last].numpy(), pos[last].numpy()
    sampled[torch.arange(len(last)), num_taken] = torch.from_numpy(sample_tokens_on_cpu(logits, *at_last, use_fp64))
    return sampled, (num_taken + 1).int()


def uniform_on_cpu(seeds: Array, pos: Array) -> Tensor:
    """[N] float32: Triton's `rand` of seeds and positions [N] int64, which is Philox 4x32, but never 0."""
    word, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    (key, key_high), (c0, c1) = ((x & word, x >> half) for x in (seeds.astype(np.uint64), pos.astype(np.uint64)))
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ key, b & word, (a >> half) ^ c3 ^ key_high, a & word
        key, key_high = (key + np.uint64(0x9E3779B9)) & word, (key_high + np.uint64(0xBB67AE85)) & word
    signed = c0.astype(np.uint32).view(np.int32)
    values = np.where(signed < 0, ~signed, signed).astype(np.float32) * np.float32(SMALLEST)
    return torch.from_numpy(np.maximum(values, np.float32(SMALLEST)))
