"""What searches along a catalog exclude; `search.constraints.closed_nodes` has it in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_trie.search.constraints import catalog, closed_nodes

KIND_BITS, PART = tl.constexpr(closed_nodes.KIND_BITS), tl.constexpr(closed_nodes.PART)
PART_SHIFT = tl.constexpr(closed_nodes.PART_SHIFT)
NO_ITEM_ENDS, NO_WAY_ON = tl.constexpr(closed_nodes.NO_ITEM_ENDS), tl.constexpr(closed_nodes.NO_WAY_ON)
IS_CLOSED = tl.constexpr(closed_nodes.IS_CLOSED)
KIND_MASK, PLACE_MASK = (tl.constexpr((1 << bits) - 1) for bits in (closed_nodes.KIND_BITS, catalog.PLACE_BITS))
PART_BITS = tl.constexpr(catalog.PART_BITS)


@triton.jit
def read_states_in_kernel(state, closed):
    """The nodes of rows, and the parts at which their searches' closed nodes begin; 0 where nothing is excluded."""
    node, part = state, state * 0
    if closed is not None:
        node, part = state & PLACE_MASK, state >> PART_BITS
    return node, part


@triton.jit
def kinds_in_kernel(node, exists, part, closed, num_closed, num_bits):
    """What is closed at nodes, 0 where nothing is.

    Args:
        closed: [num_closed] `ClosedNodes.codes`; None: nothing is excluded.
        num_bits: In how many bits the codes of a search are counted.
    """
    kind = (node * 0).to(tl.int32)
    if closed is not None:
        first = (part << PART_SHIFT) + (node.to(tl.int64) << KIND_BITS)
        place = first * 0 + part * PART
        for bit in range(num_bits):
            further = place + (tl.full([], 1, tl.int64) << (num_bits - 1 - bit))
            is_there = exists & (further <= num_closed)
            code = tl.load(closed + further - 1, mask=is_there, other=0)
            place = tl.where(is_there & (code < first), further, place)
        code = tl.load(closed + place, mask=exists & (place < num_closed), other=-1) - first
        kind = tl.where((code >= 0) & (code <= KIND_MASK), code, 0).to(tl.int32)
    return kind
