"""Inputs of draft models and heads, in place of vLLM's kernels."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllm_trie.search import search_spans
from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu


@replaces_on_cpu("spec_decode.standalone_ar.speculator:_prepare_prefill_inputs_kernel")
def prepare_draft_prefill_inputs_on_cpu(
    target_input_ids: Array, target_positions: Array, last_sampled: Array, idx_mapping: Array, out_input_ids: Array,
    out_positions: Array, last_token_indices: Array, out_query_start_loc: Array, out_seq_lens: Array,
    query_start_loc: Array, seq_lens: Array, num_rejected: Array, max_num_reqs: int, max_model_len: int,
) -> None:  # fmt: skip
    """A draft model's first inputs [T + R]: of each row the accepted tokens, the newest one, and padding."""
    num_rows = len(idx_mapping)
    starts = query_start_loc[: num_rows + 1]
    lengths = np.diff(starts)
    num_accepted, num_tokens = lengths - num_rejected[:num_rows], int(starts[-1]) + num_rows
    out_starts, local = starts[:-1] + np.arange(num_rows), search_spans(0, lengths + 1)
    row = np.repeat(np.arange(num_rows), lengths + 1)
    is_accepted = local < num_accepted[row]
    tokens = np.where(is_accepted, target_input_ids[np.where(is_accepted, starts[row] + local, 0)], 0)
    newest = last_sampled.reshape(-1)[idx_mapping[row]]
    out_input_ids[:num_tokens] = np.where(local == num_accepted[row], newest, tokens)
    out_positions[:num_tokens] = np.minimum(target_positions[starts[row]] + local, max_model_len - 1)
    last_token_indices[:num_rows] = out_starts + num_accepted
    out_query_start_loc[:num_rows], out_query_start_loc[num_rows : max_num_reqs + 1] = out_starts, num_tokens
    out_seq_lens[:num_rows] = np.minimum(seq_lens[:num_rows] + 1, max_model_len)
    last_token_indices[num_rows:max_num_reqs] = out_seq_lens[num_rows:max_num_reqs] = 0


@replaces_on_cpu("spec_decode.target_dependent_ar.speculator:_prepare_prefill_inputs_kernel")
def prepare_head_prefill_inputs_on_cpu(
    last_token_indices: Array, draft_current_step: Tensor, draft_input_ids: Array, draft_positions: Array,
    draft_query_start_loc: Array, draft_seq_lens: Array, target_input_ids: Array, target_positions: Array,
    idx_mapping: Array, last_sampled: Array, next_prefill_tokens: Array, num_sampled: Array, num_rejected: Array,
    query_start_loc: Array, seq_lens: Array, max_num_reqs: int,
) -> None:  # fmt: skip
    """A head's first inputs [T]: for each accepted token of the target, the token that follows it."""
    num_rows = len(idx_mapping)
    starts, num_tokens = query_start_loc[:num_rows], int(query_start_loc[num_rows])
    num_accepted = np.diff(query_start_loc[: num_rows + 1]) - num_rejected[:num_rows]
    last, accepted = starts + num_accepted - 1, search_spans(starts, num_accepted)
    newest = last_sampled.reshape(-1)[idx_mapping], next_prefill_tokens.reshape(-1)[idx_mapping]
    draft_input_ids[accepted] = target_input_ids[np.minimum(accepted + 1, num_tokens - 1)]
    draft_input_ids[last] = np.where(num_sampled[:num_rows] > 0, *newest)
    draft_positions[accepted] = target_positions[accepted]
    last_token_indices[:num_rows], last_token_indices[num_rows:max_num_reqs] = last, 0
    draft_query_start_loc[:num_rows], draft_query_start_loc[num_rows : max_num_reqs + 1] = starts, num_tokens
    draft_seq_lens[:num_rows], draft_seq_lens[num_rows:max_num_reqs] = seq_lens[:num_rows], 0
    draft_current_step.zero_()


@replaces_on_cpu("spec_decode.target_dependent_ar.speculator:_prepare_decode_inputs_kernel")
def prepare_head_decode_inputs_on_cpu(
    draft_tokens: Array, target_seq_lens: Array, num_rejected: Array, input_ids: Array, positions: Array,
    sample_src_positions: Array, query_start_loc: Array, seq_lens: Array, max_model_len: int, max_num_reqs: int,
    advance_draft_positions: bool,
) -> None:  # fmt: skip
    """A head's later inputs: one token of each row [R]."""
    num_rows, step = len(draft_tokens), int(advance_draft_positions)
    input_ids[:num_rows] = draft_tokens
    sample_src_positions[:num_rows] += 1
    positions[:num_rows] = np.minimum(positions[:num_rows] + step, max_model_len - 1)
    seq_lens[:num_rows] = np.minimum(target_seq_lens[:num_rows] - num_rejected[:num_rows] + step, max_model_len)
    seq_lens[num_rows:max_num_reqs] = 0
    query_start_loc[: max_num_reqs + 1] = np.minimum(np.arange(max_num_reqs + 1), num_rows)


@replaces_on_cpu("spec_decode.target_dependent_ar.speculator:_update_draft_inputs_kernel")
def update_head_inputs_on_cpu(
    output_draft_tokens: Array, next_input_hidden_states: Tensor, input_ids: Array, positions: Array,
    sample_src_positions: Array, seq_lens: Array, draft_tokens: Array, current_draft_step: Tensor,
    hidden_states: Tensor, max_model_len: int, num_speculative_steps: int, advance_draft_positions: bool,
) -> None:  # fmt: skip
    """Records each row's draft [R], and makes it and the head's own hidden states [R, H] the next inputs."""
    num_rows, step = len(draft_tokens), int(current_draft_step)
    output_draft_tokens[:num_rows, step] = draft_tokens
    if step >= num_speculative_steps - 1:
        return
    sample_src_positions[:num_rows] += 1
    input_ids[:num_rows] = draft_tokens
    next_input_hidden_states[:num_rows] = hidden_states[:num_rows]
    positions[:num_rows] = np.minimum(positions[:num_rows] + int(advance_draft_positions), max_model_len - 1)
    seq_lens[:num_rows] = np.minimum(seq_lens[:num_rows] + int(advance_draft_positions), max_model_len)
