"""Lays grown forests out in the target's batch, in one launch.

`speculation.worker.forest_layout` does it in torch.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from vllm_trie.speculation.worker.forest_growth import NO_NODE, GrowingForests
from vllm_trie.speculation.worker.forest_layout import NO_CHILD, NUM_OF_FOREST, PARENT_UNIT, ForestPlaces, TargetInputs
from vllm_trie.speculation.worker.kernels.forest_growth import nothing_growing_in_kernels
from vllm_trie.worker.kernels import KernelVariants

LANES = 64  # nodes of a layer that are laid out at a time
NUM_WARPS = 2
NONE, NO_KEY, UNIT, ABOUT = (tl.constexpr(n) for n in (NO_NODE, NO_CHILD, PARENT_UNIT, NUM_OF_FOREST))


def launch_lay_out_forests(
    growing: GrowingForests, layout: torch.Tensor, inputs: TargetInputs, laid: ForestPlaces
) -> None:
    """Lays out all forests, as `forest_layout.lay_out_forest` does; `layout`: see `forest_layout.forest_layout_of`."""
    _lay_out_forest_nodes_kernel[len(layout),](
        *(layout, layout.shape[1], growing.parents, growing.tokens, growing.rows, growing.ends),
        *(growing.masks, growing.masks.shape[1], growing.slots, *growing.slots.shape),
        *(inputs.tokens, inputs.positions, inputs.slots, inputs.slots.stride(0)),
        *(laid.tokens, laid.logits, laid.places, laid.rows, laid.ends, laid.masks, laid.keys, laid.at),
        laid.keys.shape[1],
        lanes=LANES,
        num_warps=NUM_WARPS,
    )


@triton.jit(
    do_not_specialize=["num_columns", "num_words", "num_tables", "num_nodes", "slot_stride", "num_keys"],
    do_not_specialize_on_alignment=[
        *("batch_tokens", "batch_positions", "batch_slots", "tokens_at", "logits_at", "places", "of_rows", "of_ends"),
        *("of_masks", "keys", "at"),
    ],
)
def _lay_out_forest_nodes_kernel(
    layout, num_columns, parents, tokens, rows, ends, masks, num_words, slots, num_tables, num_nodes, batch_tokens,
    batch_positions, batch_slots, slot_stride, tokens_at, logits_at, places, of_rows, of_ends, of_masks, keys, at,
    num_keys, lanes: tl.constexpr,
):  # fmt: skip
    """See `launch_lay_out_forests`; a program per forest; see `GrowingForests`, `TargetInputs`, `ForestPlaces`."""
    group = tl.program_id(0).to(tl.int64)
    layout, keys, at = layout + group * num_columns, keys + group * num_keys, at + group * num_keys
    start, first_token = tl.load(layout), tl.load(layout + 1).to(tl.int64)
    num_tokens, first_row = tl.load(layout + 2), tl.load(layout + 3)
    any_logits = tl.load(logits_at + first_token)
    lane = tl.arange(0, lanes)
    num_found, num_before, first_before = 0, 0, 0  # nodes; entries; where the previous layer begins in these
    for part in range((num_columns - ABOUT) // 2):
        first, size = tl.load(layout + ABOUT + 2 * part).to(tl.int64), tl.load(layout + ABOUT + 2 * part + 1)
        for begin in range(0, size, lanes):
            node, is_place = first + begin + lane, begin + lane < size
            parent = tl.load(parents + node, mask=is_place, other=NONE)
            is_draft = parent != NONE
            is_node = is_place & (is_draft | (tl.zeros([lanes], tl.int32) + part == 0))
            to = first_token + num_found + tl.cumsum(is_node.to(tl.int32), axis=0) - 1
            token = tl.load(tokens + node, mask=is_place, other=0)
            key = (first_before + parent).to(tl.int64) * UNIT + token
            place = num_before + begin + lane
            tl.store(keys + place, tl.where(is_draft, key, NO_KEY), mask=is_place)
            logits = tl.load(logits_at + to, mask=is_node, other=0)
            tl.store(at + place, tl.where(is_node, logits, any_logits), mask=is_place)
            batch_token = tl.load(tokens_at + to, mask=is_node, other=0)
            tl.store(batch_tokens + batch_token, token, mask=is_node)
            tl.store(batch_positions + batch_token, (start + part).to(tl.int64), mask=is_node)
            row = tl.load(rows + node, mask=is_node, other=0)
            tl.store(of_rows + to, tl.load(places + row, mask=is_node, other=0).to(tl.int32), mask=is_node)
            tl.store(of_ends + to, tl.load(ends + node, mask=is_node, other=0), mask=is_node)
            for word in range(num_words):
                mask_word = tl.load(masks + node * num_words + word, mask=is_node, other=0)
                tl.store(of_masks + to * num_words + word, mask_word, mask=is_node)
            for table in range(num_tables):
                slot = tl.load(slots + tl.full([], table, tl.int64) * num_nodes + node, mask=is_node, other=0)
                tl.store(batch_slots + tl.full([], table, tl.int64) * slot_stride + batch_token, slot, mask=is_node)
            num_found += tl.sum(is_node.to(tl.int32), axis=0)
        first_before = num_before
        num_before += size

    for begin in range(num_before, num_keys, lanes):
        is_place = begin + lane < num_keys
        tl.store(keys + begin + lane, tl.full([lanes], NO_KEY, tl.int64), mask=is_place)
        tl.store(at + begin + lane, tl.zeros([lanes], tl.int64) + any_logits, mask=is_place)
    place_of_row = tl.load(places + first_row).to(tl.int32)
    for begin in range(num_found, num_tokens, lanes):
        to, is_token = first_token + begin + lane, begin + lane < num_tokens
        batch_token = tl.load(tokens_at + to, mask=is_token, other=0)
        tl.store(batch_tokens + batch_token, tl.zeros([lanes], tl.int32), mask=is_token)
        tl.store(batch_positions + batch_token, tl.zeros([lanes], tl.int64) + start, mask=is_token)
        tl.store(of_rows + to, tl.zeros([lanes], tl.int32) + place_of_row, mask=is_token)
        tl.store(of_ends + to, tl.zeros([lanes], tl.int32) + start + 1, mask=is_token)
        for word in range(num_words):
            root = tl.where(tl.zeros([lanes], tl.int32) + word == 0, tl.full([lanes], 1, tl.int64), 0)
            tl.store(of_masks + to * num_words + word, root, mask=is_token)
        for table in range(num_tables):
            at_slot = batch_slots + tl.full([], table, tl.int64) * slot_stride + batch_token
            tl.store(at_slot, tl.zeros([lanes], tl.int64), mask=is_token)


def warm_up_forest_kernel(serving: KernelVariants) -> None:
    """Lays out a forest of one root."""
    if not serving.draft_logits:
        return
    ints, longs = (partial(torch.zeros, dtype=kind, device=serving.device) for kind in (torch.int32, torch.int64))
    inputs = TargetInputs(ints(4), longs(4), longs(1, 4))
    laid = ForestPlaces(longs(1), longs(1), longs(1), ints(1), ints(1), longs(1, 1), longs(1, 2), longs(1, 2))
    launch_lay_out_forests(nothing_growing_in_kernels(serving.device), ints(1, NUM_OF_FOREST), inputs, laid)
