"""Copies of KV blocks, and of single tokens in them: by kernels of ours where there are kernels, else by torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_blocks import KVBlocks
from vllm_trie.worker.kv.kv_slots import KVSlots

HELD = -1  # in the place of a block: what the program that copies holds


def copy_kv_to_others(kv_blocks: KVBlocks, pairs: np.ndarray) -> None:
    """Copy whole blocks, in all layers, [copies, 2] from where, and where to; no block is both."""
    if launches.worker_runs_kernels_on(kv_blocks.device):
        launches.worker_module_for_gpus("kv.copies").launch_kv_block_copies(
            [[pair] for pair in pairs.tolist()], kv_blocks.segments
        )
    else:
        kv_blocks.copy_to_others(*uploaded_for_search(pairs.T.astype(np.int64), kv_blocks.device))


def move_kv(
    kv_blocks: KVBlocks, kv_slots: KVSlots, blocks: np.ndarray, tokens: Sequence[tuple[int, np.ndarray]]
) -> None:
    """Copy the content of blocks, and on top of it that of single tokens; all are read before any is written.

    Args:
        kv_blocks: What the blocks hold.
        kv_slots: The same, token by token.
        blocks: [copies, 2], from where, and where to.
        tokens: KV cache groups, and [2, tokens] slots of each, likewise.
    """
    moving = [(number, from_to) for number, from_to in tokens if from_to.size]
    is_by_kernels = launches.worker_runs_kernels_on(kv_blocks.device)
    held = _held_kv_tokens(kv_slots, moving, is_by_kernels)
    if len(blocks) and is_by_kernels and kv_blocks.are_apart:
        launches.worker_module_for_gpus("kv.copies").launch_kv_block_copies(
            kv_copy_chains_of(blocks), kv_blocks.segments
        )
    elif len(blocks):
        kv_blocks.copy(*blocks.T)
    held()


def _held_kv_tokens(kv_slots: KVSlots, moving: list[tuple[int, np.ndarray]], is_by_kernels: bool) -> Callable[[], None]:
    """Read tokens; what is returned writes them."""
    if moving and is_by_kernels and kv_slots.segments is not None:
        return launches.worker_module_for_gpus("kv.copies").HeldKVTokens(moving, kv_slots.segments).write
    held = [(number, to, kv_slots.read(number, from_)) for number, (from_, to) in moving]

    def write() -> None:
        for of_number in held:
            kv_slots.write(*of_number)

    return write


def kv_copy_chains_of(pairs: np.ndarray) -> list[list[tuple[int, int]]]:
    """Copies [n, 2] in an order in which no block is written before it is read, in chains that can go side by side.

    In a circle of copies one of its blocks is held until all others are written: `HELD` stands for it.
    """
    source_of = {destination: source for source, destination in pairs.tolist()}
    readers = Counter(source_of.values())
    alone = [[(source, to)] for to, source in source_of.items() if source not in source_of and not readers[to]]
    left = {to: source for to, source in source_of.items() if source in source_of or readers[to]}
    ordered = list[tuple[int, int]]()
    ready = [destination for destination in left if not readers[destination]]
    while left:
        if not ready:  # circles alone are left
            first = next(iter(left))
            ordered.append((first, HELD))
            readers[first] -= 1
            ready.append(first)
            (last,) = (to for to, source in left.items() if source == first)
            left[last] = HELD
        destination = ready.pop()
        source = left.pop(destination)
        ordered.append((source, destination))
        readers[source] -= 1
        if not readers[source] and source in left:
            ready.append(source)
    return [*alone, ordered] if ordered else alone
