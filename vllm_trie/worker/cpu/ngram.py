"""vLLM's n-gram speculation for ordinary requests."""

from __future__ import annotations

import numpy as np

from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu

SPECULATOR = "spec_decode.ngram.speculator:"


@replaces_on_cpu(SPECULATOR + "_ngram_scan_kernel")
def find_ngrams_on_cpu(
    token_ids: Array, idx_mapping: Array, total_len: Array, num_sampled: Array, scratch: Array, min_n: int, max_n: int
) -> None:
    """Writes into the first column of scratch [R, ...] where the tokens begin that follow each row's match.

    A row without a match has none, nor has one that has sampled nothing, as in its prefill.
    """
    for row, (slot, count) in enumerate(zip(idx_mapping, num_sampled, strict=False)):
        text = token_ids[slot, : total_len[slot]]
        following = after_ngram_match_on_cpu(text, min_n, max_n) if count > 0 else text[:0]
        scratch[row, 0] = len(text) - len(following)


@replaces_on_cpu(SPECULATOR + "_ngram_finalize_kernel")
def draft_by_ngrams_on_cpu(
    token_ids: Array, idx_mapping: Array, total_len: Array, num_sampled: Array, last_sampled: Array, scratch: Array,
    drafts: Array,
) -> None:  # fmt: skip
    """Writes drafts [R, K]: the tokens that follow a row's match, then its newest token if there are fewer than K."""
    slots = idx_mapping[: len(num_sampled)]
    drafts[: len(slots)] = last_sampled[slots, None]
    for row, slot in enumerate(slots):
        following = token_ids[slot, scratch[row, 0] : total_len[slot]][: drafts.shape[1]]
        drafts[row, : len(following)] = following


def after_ngram_match_on_cpu(tokens: Array, shortest: int, longest: int) -> Array:
    """All that follows the longest match of the newest tokens, of equally long ones the latest; empty without one.

    Args:
        tokens: [L].
        shortest, longest: Bounds on the tokens that match.
    """
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # of matches, which grow by one token each time
    following = tokens[:0]
    for length in range(1, min(longest, last) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[tokens[ends - length + 1] == tokens[last - length + 1]]
        if not len(ends):
            break
        if length >= shortest:
            following = tokens[ends[-1] + 1 :]
    return following
