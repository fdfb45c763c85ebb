"""What requests have done to their logits [N, V], in place.

`expanded_idx_mapping` [N] is the slot of each row of logits; options are by slot [S].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_trie.search.constraints.grammar import unpacked_constraint_mask
from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu

MINUS_INFINITY = float("-inf")


@replaces_on_cpu("sample.gumbel:_temperature_kernel")
def apply_temperature_on_cpu(logits: Tensor, expanded_idx_mapping: Tensor, temperature: Tensor) -> None:
    """Divides by the temperature, except where it is 0."""
    of_row = temperature[expanded_idx_mapping]
    logits.div_(torch.where(of_row == 0, 1.0, of_row)[:, None])


@replaces_on_cpu("sample.min_p:_min_p_kernel")
def apply_min_p_on_cpu(logits: Tensor, expanded_idx_mapping: Tensor, min_p: Tensor) -> None:
    """Bans tokens less probable than min_p times the most probable one."""
    threshold = logits.amax(-1) + min_p[expanded_idx_mapping].log()
    logits.masked_fill_(logits < threshold[:, None], MINUS_INFINITY)


@replaces_on_cpu("sample.penalties:_penalties_kernel")
def apply_penalties_on_cpu(
    logits: Tensor, expanded_idx_mapping: Tensor, token_ids: Tensor, expanded_local_pos: Tensor,
    repetition_penalty: Tensor, frequency_penalty: Tensor, presence_penalty: Tensor, prompt_bin_mask: Tensor,
    output_bin_counts: Tensor,
) -> None:  # fmt: skip
    """Penalises tokens by their counts [S, V] in outputs and earlier drafts, and by the bits [S, V / 32] of prompts."""
    penalties = repetition_penalty, frequency_penalty, presence_penalty
    repetition, frequency, presence = (penalty[expanded_idx_mapping] for penalty in penalties)
    rows = ((repetition != 1) | (frequency != 0) | (presence != 0)).nonzero()[:, 0]
    slots, num_drafts, values = expanded_idx_mapping[rows], expanded_local_pos[rows], logits[rows]
    counts = output_bin_counts[slots]
    for back in range(int(num_drafts.max()) if len(rows) else 0):
        has = (num_drafts > back).nonzero()[:, 0]
        counts[has, token_ids[rows[has] - back].long()] += 1
    was_in_prompt = unpacked_constraint_mask(prompt_bin_mask[slots], logits.shape[1])
    scale = torch.where(was_in_prompt | (counts > 0), repetition[rows, None], 1.0)
    values *= torch.where(values > 0, 1.0 / scale, scale)
    values -= frequency[rows, None] * counts
    values -= presence[rows, None] * (counts > 0)
    logits[rows] = values


@replaces_on_cpu("sample.penalties:_bincount_kernel")
def bincount_on_cpu(
    expanded_idx_mapping: Array, all_token_ids: Array, prompt_len: Array, prefill_len: Array, prompt_bin_mask: Array,
    output_bin_counts: Array,
) -> None:  # fmt: skip
    """Marks the tokens of prompts in bits [S, V / 32], and counts those of existing outputs [S, V]."""
    for slot in expanded_idx_mapping:
        seen = np.zeros(prompt_bin_mask.shape[1] * 32, bool)
        seen[all_token_ids[slot, : prompt_len[slot]]] = True
        prompt_bin_mask[slot] = np.packbits(seen, bitorder="little").view(np.int32)
        np.add.at(output_bin_counts[slot], all_token_ids[slot, prompt_len[slot] : prefill_len[slot]], 1)


@replaces_on_cpu("sample.logit_bias:_bias_kernel")
def apply_logit_bias_on_cpu(
    logits: Tensor, expanded_idx_mapping: Tensor, num_allowed_token_ids: Tensor, allowed_token_ids: Tensor,
    num_logit_bias: Tensor, bias_token_ids: Tensor, bias: Tensor, pos: Tensor, min_lens: Tensor,
    num_stop_token_ids: Tensor, restore_when_all_masked: Tensor, stop_token_ids: Tensor, check_all_masked_rows: bool,
) -> None:  # fmt: skip
    """Bans what is not allowed, adds biases, and bans stop tokens before the minimum length, unless nothing is left."""

    def listed(counts: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, tokens and indices of the entries in lists [S, L], of which each row has counts [N]."""
        row, place = (torch.arange(int(counts.max())) < counts[:, None]).nonzero(as_tuple=True)
        return row, token_ids[expanded_idx_mapping[row], place].long(), place

    num_allowed = num_allowed_token_ids[expanded_idx_mapping]
    if num_allowed.any():
        row, token, place = listed(num_allowed, allowed_token_ids)
        saved = logits[row, token]
        logits[num_allowed > 0] = MINUS_INFINITY
        logits[row, token] = saved
    num_biases = num_logit_bias[expanded_idx_mapping]
    if num_biases.any():
        row, token, place = listed(num_biases, bias_token_ids)
        logits[row, token] += bias[expanded_idx_mapping[row], place]
    is_short = pos + 1 < min_lens[expanded_idx_mapping]
    num_banned = torch.where(is_short, num_stop_token_ids[expanded_idx_mapping], 0)
    if num_banned.any():
        row, token, place = listed(num_banned, stop_token_ids)
        saved = logits[row, token]
        logits[row, token] = MINUS_INFINITY
        if check_all_masked_rows:
            nothing_left = (logits.amax(-1) == MINUS_INFINITY) & (restore_when_all_masked[expanded_idx_mapping] != 0)
            kept = nothing_left[row]
            logits[row[kept], token[kept]] = saved[kept]


@replaces_on_cpu("sample.bad_words:_bad_words_kernel")
def apply_bad_words_on_cpu(
    logits: Array, expanded_idx_mapping: Array, bad_word_token_ids: Array, bad_word_offsets: Array,
    num_bad_words: Array, all_token_ids: Array, prompt_len: Array, total_len: Array, input_ids: Array,
    expanded_local_pos: Array,
) -> None:  # fmt: skip
    """Bans the last tokens of words [S, L] that the output, with the drafts [N] before a row, is about to complete."""
    num_words = num_bad_words[expanded_idx_mapping]
    row, word = np.nonzero(np.arange(num_words.max(initial=0)) < num_words[:, None])
    slot, num_drafts = expanded_idx_mapping[row], expanded_local_pos[row]
    start, last = bad_word_offsets[slot, word], bad_word_offsets[slot, word + 1] - 1
    before, output_len = last - start, total_len[slot] - prompt_len[slot]
    completes = before <= output_len + num_drafts
    for place in range(before.max(initial=0)):
        at = np.flatnonzero(completes & (before > place))
        of_draft = num_drafts[at] - before[at] + place  # < 0: in the output
        history = all_token_ids[slot[at], np.minimum(total_len[slot[at]] + of_draft, all_token_ids.shape[1] - 1)]
        drafts = input_ids[np.where(of_draft >= 0, row[at] - num_drafts[at] + of_draft + 1, 0)]
        actual = np.where(of_draft >= 0, drafts, history)
        completes[at] = bad_word_token_ids[slot[at], start[at] + place] == actual
    logits[row[completes], bad_word_token_ids[slot[completes], last[completes]]] = MINUS_INFINITY


@replaces_on_cpu("structured_outputs:_apply_grammar_bitmask_kernel")
def apply_grammar_bitmask_on_cpu(
    logits: Tensor, logits_indices: Array, cu_num_logits: Array, bitmask: Tensor, vocab_size: int, mask_stride: int
) -> None:
    """Bans what bitmask [M, V / 32] does not allow at the rows and positions encoded in logits_indices [M]."""
    request, place = np.divmod(logits_indices, mask_stride)
    is_active = torch.from_numpy(place < cu_num_logits[request + 1] - cu_num_logits[request])
    row = torch.from_numpy(cu_num_logits[request] + place)[is_active].long()
    logits[row] = logits[row].masked_fill(~unpacked_constraint_mask(bitmask[is_active], vocab_size), MINUS_INFINITY)
