"""vLLM's n-gram speculation of ordinary requests."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm_trie.worker.cpu.replace import Array, replaces


@replaces("spec_decode.ngram.speculator:NgramGPUSpeculator.propose")
def propose(
    self: Any, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: Any,
    aux_hidden_states: Any, num_sampled: Tensor, num_rejected: Any, last_sampled: Tensor, *unused: Any,
    dummy_run: bool = False, **unused_too: Any,
) -> Tensor:  # fmt: skip
    """Drafts [R, K]: what came after the longest match of a row's newest tokens, of equally long ones the latest.

    A row without a match, or with less than K tokens after it, gets its newest token instead; a row that has sampled
    nothing, as in its prefill, has no match.

    Args:
        num_sampled: [R].
        last_sampled: [S, 1], by slot.
    """
    num_rows, states = input_batch.num_reqs, self.req_states
    drafts = self.drafts[:num_rows]
    if dummy_run:
        return drafts
    slots, tokens, lengths = input_batch.idx_mapping.numpy(), states.all_token_ids.gpu.numpy(), states.total_len.gpu
    drafts.copy_(last_sampled.view(-1)[input_batch.idx_mapping[:num_rows], None])
    for row in np.flatnonzero(num_sampled[:num_rows].numpy() > 0):
        text = tokens[slots[row], : int(lengths[slots[row]])]
        following = after_match(text, self.min_n, self.max_n)[: drafts.shape[1]]
        drafts.numpy()[row, : len(following)] = following
    return drafts


def after_match(tokens: Array, shortest: int, longest: int) -> Array:
    """All that follows the longest match of the newest tokens, of equally long ones the latest; empty without one.

    Args:
        tokens: [L].
        shortest, longest: How many tokens match.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # of matches of one token more each time
    following = tokens[:0]
    for length in range(1, min(longest, last) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - length + 1] == tokens[last - length + 1]]
        if not len(ends):
            break
        if length >= shortest:
            following = tokens[ends[-1] + 1 :]
    return following
