"""What is closed to searches along a catalog; `search.constraints.closed_nodes` has it in torch."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_trie.search.constraints import catalog, closed_nodes

KIND_BITS, PART = tl.constexpr(closed_nodes.KIND_BITS), tl.constexpr(closed_nodes.PART)
NO_ITEM_ENDS, NO_WAY_ON = tl.constexpr(closed_nodes.NO_ITEM_ENDS), tl.constexpr(closed_nodes.NO_WAY_ON)
IS_CLOSED = tl.constexpr(closed_nodes.IS_CLOSED)
KIND_MASK, PLACE_MASK = (tl.constexpr((1 << bits) - 1) for bits in (closed_nodes.KIND_BITS, catalog.PLACE_BITS))
PART_BITS = tl.constexpr(catalog.PART_BITS)


@triton.jit
def read_states_in_kernel(state, closed):
    """The nodes of rows, and where the closed nodes of their searches begin, in parts; 0 where nothing is excluded."""
    node, part = state, state * 0
    if closed is not None:
        node, part = state & PLACE_MASK, state >> PART_BITS
    return node, part


@triton.jit
def kinds_in_kernel(node, exists, part, closed, num_bits):
    """What is closed at nodes, 0 where nothing is.

    Args:
        closed: `ClosedNodes.codes`; None: nothing is excluded.
        num_bits: With which the codes of a search are counted.
    """
    kind = (node * 0).to(tl.int32)
    if closed is not None:
        of_search = closed + part * PART + node * 0
        num_codes, place = tl.load(of_search, mask=exists, other=0), (node * 0).to(tl.int64)
        for bit in range(num_bits):
            further = place + (tl.full([], 1, tl.int64) << (num_bits - 1 - bit))
            is_there = exists & (further <= num_codes)
            code = tl.load(of_search + further, mask=is_there, other=0)
            place = tl.where(is_there & ((code >> KIND_BITS) < node), further, place)
        code = tl.load(of_search + place + 1, mask=exists & (place < num_codes), other=-1)
        kind = tl.where((code >> KIND_BITS) == node, code & KIND_MASK, 0).to(tl.int32)
    return kind
