"""The inputs of a forward pass, including block tables, and what a step changes in the slots of its requests.

A batch has R rows, T tokens and N rows of logits; there are S slots, and `idx_mapping` has each row's slot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import numpy as np
import torch

from vllm_trie.search import search_spans
from vllm_trie.worker.cpu.replace import Array, replaces_on_cpu

WORD_BYTES = 4  # the unit of strides and sizes of segments of KV blocks


@replaces_on_cpu("input_batch:_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs_on_cpu(
    input_ids: Array, next_prefill_tokens: Array, num_lookahead: int, idx_mapping: Array, query_start_loc: Array,
    all_token_ids: Array, prefill_lens: Array, num_computed_tokens: Array,
) -> None:  # fmt: skip
    """Copies the tokens of prefilling rows into input_ids [T], and the next K into next_prefill_tokens [K, S]."""
    for row in np.flatnonzero(num_computed_tokens[idx_mapping] < prefill_lens[idx_mapping]):
        slot, start, end = idx_mapping[row], query_start_loc[row], query_start_loc[row + 1]
        first = num_computed_tokens[slot]
        last = first + end - start
        input_ids[start:end] = all_token_ids[slot, first:last]
        following = all_token_ids[slot, last : min(last + num_lookahead, prefill_lens[slot])]
        next_prefill_tokens[:, slot] = 0
        next_prefill_tokens[: len(following), slot] = following


@replaces_on_cpu("input_batch:_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens_on_cpu(
    pos: Array, seq_lens: Array, idx_mapping: Array, query_start_loc: Array, num_computed_tokens: Array
) -> None:
    """Writes the positions [T] of all tokens, and the lengths [S] of rows; 0 for those that are not in the batch."""
    num_rows = len(idx_mapping)
    lengths = query_start_loc[1 : num_rows + 1] - query_start_loc[:num_rows]
    num_tokens, computed = query_start_loc[num_rows], num_computed_tokens[idx_mapping]
    seq_lens[:num_rows] = computed + lengths
    seq_lens[num_rows:] = 0
    pos[:num_tokens] = computed if num_tokens == num_rows else search_spans(computed, lengths)


@replaces_on_cpu("mm.rope:_prepare_rope_positions_kernel")
def prepare_rope_positions_on_cpu(
    positions: Array, prefill_positions: Array, prefill_delta: Array, idx_mapping: Array, query_start_loc: Array,
    prefill_lens: Array, num_computed_tokens: Array, num_dims: int,
) -> None:  # fmt: skip
    """M-RoPE positions [D, T]: a prompt's are in prefill_positions [S * D, L], later ones increase by one."""
    starts, computed = query_start_loc[: len(idx_mapping) + 1], num_computed_tokens[idx_mapping]
    positions[:, : starts[-1]] = search_spans(computed + prefill_delta[idx_mapping], np.diff(starts))
    for row in np.flatnonzero(computed < prefill_lens[idx_mapping]):
        of_slot = slice(num_dims * idx_mapping[row], num_dims * (idx_mapping[row] + 1))
        start, end, first = starts[row], starts[row + 1], computed[row]
        positions[:, start:end] = prefill_positions[of_slot, first : first + end - start]


@replaces_on_cpu("input_batch:_combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens_on_cpu(
    input_ids: Array, idx_mapping: Array, last_sampled_tokens: Array, query_start_loc: Array, seq_lens: Array,
    prefill_len: Array, draft_tokens: Array, cu_num_logits: Array, logits_indices: Array,
) -> None:  # fmt: skip
    """Writes newest tokens and drafts of decoding rows into input_ids [T], and which tokens have logits [N]."""
    num_rows = len(idx_mapping)
    ends, lengths, prefill = query_start_loc[1 : num_rows + 1], seq_lens[:num_rows], prefill_len[idx_mapping]
    newest = last_sampled_tokens.reshape(len(last_sampled_tokens))
    decodes = lengths > prefill
    if cu_num_logits[num_rows] == num_rows:  # there are no drafts
        logits_indices[:] = last = ends - 1
        input_ids[last[decodes]] = newest[idx_mapping[decodes]]
        return
    num_logits = np.diff(cu_num_logits[: num_rows + 1])
    starts, local = ends - num_logits, search_spans(0, num_logits)
    logits_indices[:] = search_spans(starts, num_logits)
    has_sampled = decodes & (lengths - num_logits >= prefill)
    input_ids[starts[has_sampled]] = newest[idx_mapping[has_sampled]]
    is_draft = (local > 0) & np.repeat(decodes, num_logits)
    slots = np.repeat(idx_mapping, num_logits)[is_draft]
    input_ids[logits_indices[is_draft]] = draft_tokens[slots, local[is_draft] - 1]


@replaces_on_cpu("input_batch:_expand_idx_mapping_kernel")
def expand_idx_mapping_on_cpu(
    idx_mapping: Array, expanded_idx_mapping: Array, expanded_local_pos: Array, cu_num_logits: Array
) -> None:
    """The slot of each row of logits [N], and its index among those of its request [N]."""
    num_logits = np.diff(cu_num_logits[: len(idx_mapping) + 1])
    expanded_idx_mapping[:] = np.repeat(idx_mapping, num_logits)
    expanded_local_pos[:] = search_spans(0, num_logits)


@replaces_on_cpu("input_batch:_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected_on_cpu(
    num_sampled: Array, num_rejected: Array, seq_lens: Array, cu_num_logits: Array, idx_mapping: Array,
    prefill_len: Array,
) -> None:  # fmt: skip
    """How many of the tokens that each row [R] had logits for are rejected; rows in their prefill sample none."""
    num_rows = len(idx_mapping)
    is_chunk = seq_lens[:num_rows] < prefill_len[idx_mapping]
    num_rejected[:] = cu_num_logits[1 : num_rows + 1] - cu_num_logits[:num_rows] - num_sampled
    num_sampled[is_chunk] = num_rejected[is_chunk] = 0


@replaces_on_cpu("input_batch:_post_update_kernel")
def post_update_on_cpu(
    idx_mapping: Array, num_computed_tokens: Array, last_sampled_tokens: Array, output_bin_counts: Array | None,
    sampled_tokens: Array, num_sampled: Array, num_rejected: Array, query_start_loc: Array | None, all_token_ids: Array,
    total_len: Array, draft_tokens: Array | None = None, draft_tokens_out: Array | None = None,
) -> None:  # fmt: skip
    """Appends sampled tokens [R, 1 + drafts] to their slots and counts them; rows in slot -1 are left out."""
    num_rows, num_queried = len(idx_mapping), 0
    if query_start_loc is not None:
        num_queried = query_start_loc[1 : num_rows + 1] - query_start_loc[:num_rows]
    change, real = num_queried - num_rejected, idx_mapping >= 0
    if not real.all():
        idx_mapping, num_sampled, sampled_tokens = idx_mapping[real], num_sampled[real], sampled_tokens[real]
        change = change[real]
    if draft_tokens is not None and draft_tokens_out is not None:
        draft_tokens_out[idx_mapping] = draft_tokens[real]
    num_computed_tokens[idx_mapping] += change
    for column in range(sampled_tokens.shape[1]):
        has = num_sampled > column
        if not has.any():
            break
        slots, tokens = idx_mapping[has], sampled_tokens[has, column]
        all_token_ids[slots, total_len[slots] + column] = tokens
        last_sampled_tokens[slots, 0] = tokens
        if output_bin_counts is not None:
            output_bin_counts[slots, tokens] += 1
    total_len[idx_mapping] += num_sampled


@replaces_on_cpu("input_batch:_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens_on_cpu(
    idx_mapping: Array, num_computed_tokens: Array, query_start_loc: Array
) -> None:
    """Counts this step's tokens as computed, by slot [S]."""
    num_computed_tokens[idx_mapping] += np.diff(query_start_loc[: len(idx_mapping) + 1])


@replaces_on_cpu("sample.prompt_logprob:_prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids_on_cpu(
    prompt_logprobs_token_ids: Array, query_start_loc: Array, idx_mapping: Array, num_computed_tokens: Array,
    all_token_ids: Array,
) -> None:  # fmt: skip
    """The token [T] that follows each token of a batch."""
    lengths = np.diff(query_start_loc[: len(idx_mapping) + 1])
    place = search_spans(num_computed_tokens[idx_mapping] + 1, lengths)
    place = np.minimum(place, all_token_ids.shape[1] - 1)  # nobody reads what follows the last token
    prompt_logprobs_token_ids[: len(place)] = all_token_ids[np.repeat(idx_mapping, lengths), place]


@replaces_on_cpu("buffer_utils:_apply_write_kernel")
def apply_write_on_cpu(
    output: torch.Tensor, output_stride: Any, write_indices: Array, write_starts: Array, write_contents: Array,
    write_cu_lens: Array, write_group_ids: Array | None, multi_group: bool,
) -> None:  # fmt: skip
    """Writes contents [C], piece by piece, into rows of a tensor [S] or [S, L], or of the block tables of groups.

    Args:
        output, output_stride: The tensor; or the addresses of block tables, and their strides, by KV cache group.
    """
    if multi_group:
        addresses, num_rows = zip(output.tolist(), output_stride.tolist(), strict=True), int(write_indices.max()) + 1
        tensors = [block_table_on_cpu(address, num_rows, stride) for address, stride in addresses]
    else:
        tensors = [output.numpy().reshape(len(output), -1)]
    groups, first = repeat(0) if write_group_ids is None else write_group_ids.tolist(), 0
    pieces = write_indices.tolist(), write_starts.tolist(), write_cu_lens.tolist()
    for group, row, start, end in zip(groups, *pieces, strict=False):
        tensors[group][row, start : start + end - first] = write_contents[first:end]
        first = end


@lru_cache(maxsize=256)
def block_table_on_cpu(address: int, num_rows: int, stride: int) -> Array:
    """[rows, columns] int32, a view of a block table in memory that another object owns."""
    memory = (ctypes.c_int32 * int(num_rows * stride)).from_address(address)
    return np.ctypeslib.as_array(memory).reshape(num_rows, stride)


@replaces_on_cpu("block_table:BlockTables.gather_block_tables")
def gather_block_tables_on_cpu(
    self: Any, idx_mapping: torch.Tensor, num_reqs_padded: int, out: Sequence[torch.Tensor] | None = None,
    out_ptrs: torch.Tensor | None = None, num_computed_tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """The block tables [R, B] of the slots in idx_mapping [R], one per KV cache group.

    Blocks before a sliding window, by num_computed_tokens [S], become null blocks.
    """
    if self.num_kv_cache_groups == 0:
        return ()
    gathered, padded = self.input_block_tables if out is None else out, list[torch.Tensor]()
    slots = idx_mapping.numpy()
    num_rows, widths = len(slots), self.num_blocks.np[:, slots].max(axis=1, initial=0)
    for group, (table, target, width) in enumerate(zip(self.block_tables, gathered, widths, strict=True)):
        blocks = target.numpy()
        blocks[:num_rows, :width] = table.gpu.numpy()[slots, :width]
        blocks[num_rows:num_reqs_padded] = 0
        if num_computed_tokens is not None and (reach := self._sliding_window_reach[group]):
            num_null = np.maximum(num_computed_tokens.numpy()[slots] - reach, 0) // self.block_sizes[group]
            blocks[:num_rows, :width][np.arange(width) < num_null[:, None]] = 0
        padded.append(target[:num_reqs_padded])
    return tuple(padded)


@replaces_on_cpu("block_table:_compute_slot_mappings_kernel")
def compute_slot_mappings_on_cpu(
    idx_mapping: Array, query_start_loc: Array, pos: Array, block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor, block_sizes: torch.Tensor, slot_mapping_enabled: torch.Tensor,
    slot_mappings: Array,
) -> None:  # fmt: skip
    """The KV cache slot of each token of a batch, by KV cache group [G, T]; -1 for tokens without one."""
    num_rows, num_tokens = len(idx_mapping), int(query_start_loc[len(idx_mapping)])
    position, num_slots = pos[:num_tokens], int(idx_mapping.max(initial=0)) + 1
    of_token = idx_mapping
    if num_tokens != num_rows:
        of_token = np.repeat(idx_mapping, np.diff(query_start_loc[: num_rows + 1]))
    tables = zip(block_table_ptrs.tolist(), block_table_strides.tolist(), block_sizes.tolist(), strict=True)
    slot_mappings[:] = -1
    for mapping, (address, stride, block_size), is_enabled in zip(
        slot_mappings, tables, slot_mapping_enabled.tolist(), strict=True
    ):
        if is_enabled:
            column, offset = np.divmod(position, block_size)
            blocks = block_table_on_cpu(address, num_slots, stride)[of_token, column].astype(np.int64)
            mapping[:num_tokens] = np.where(of_token >= 0, blocks * block_size + offset, -1)


@replaces_on_cpu("model_states.prompt_embeds:PromptEmbedsState.apply")
def apply_prompt_embeds_on_cpu(
    self: Any, input_batch: Any, num_computed_tokens: torch.Tensor, inputs_embeds: torch.Tensor
) -> None:
    """Replaces embeddings [T, H] of a batch's tokens by those of prompts, where these have no tokens."""
    for row, request_id in enumerate(input_batch.req_ids):
        if (found := self.gpu_tensors.get(request_id)) is None:
            continue
        embeds, are_tokens = found
        first = int(num_computed_tokens[input_batch.idx_mapping_np[row]])
        start, end = input_batch.query_start_loc_np[row : row + 2].tolist()
        own = embeds[first : first + end - start]
        of_batch = inputs_embeds[start : start + len(own)]
        if are_tokens is not None:
            own = of_batch.where(are_tokens[first : first + len(own), None].bool(), own)
        of_batch.copy_(own)


@replaces_on_cpu("utils:_zero_kv_blocks_kernel", package="vllm.v1.worker.")
def zero_blocks_on_cpu(seg_addrs: Array, seg_block_strides: Array, seg_page_sizes: Array, block_ids: Array) -> None:
    """Zeroes blocks in all segments, whose addresses are in bytes."""
    for address, stride, size in zip(
        seg_addrs.tolist(), seg_block_strides.tolist(), seg_page_sizes.tolist(), strict=True
    ):
        for block in block_ids.tolist():
            ctypes.memset(address + WORD_BYTES * stride * block, 0, WORD_BYTES * size)
