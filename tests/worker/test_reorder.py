"""Rows take over histories by kernels as in torch: on a GPU, or without one in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_trie.search.rank import rank_candidates
from vllm_trie.search.slots import select_next
from vllm_trie.worker import reorder
from vllm_trie.worker.kernels import copies
from vllm_trie.worker.kv_blocks import KVBlocks
from vllm_trie.worker.row_reorder import Reorders, RowReorder, Tables

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BLOCK_SIZES = (4, 6)
NUM_SLOTS = 24
LENGTH = 50
NUM_BLOCKS = 600


def some_reorder(num_tokens: Sequence[int], seed: int) -> RowReorder:
    """Three groups of one class and two of another, their rows anywhere, as after a step of the search."""
    slots = torch.randperm(NUM_SLOTS, generator=seeded(seed)).numpy()
    reorders = Reorders()
    start = 0
    for width, lengths in ((4, num_tokens[:3]), (5, num_tokens[3:])):
        total = torch.randn(len(lengths), width, 7, generator=seeded(seed + width)) - 9
        candidates = rank_candidates(total, torch.zeros(len(lengths), width), 2 * width)
        parents = select_next(candidates, torch.ones(len(lengths), 2 * width, dtype=torch.bool), width, width).parents
        of_class = slots[start : (start := start + len(lengths) * width)].reshape(len(lengths), width)
        reorders.add(of_class, parents.to(DEVICE), [length // 2 for length in lengths], lengths)
    return reorders.on(torch.device(DEVICE))


def some_tables() -> Tables:
    """Each slot with blocks of its own in two KV cache groups."""
    blocks = torch.randperm(NUM_BLOCKS, generator=seeded(8)).int().to(DEVICE)
    widths = [-(-LENGTH // block_size) for block_size in BLOCK_SIZES]
    first, second = blocks[: NUM_SLOTS * sum(widths)].split([NUM_SLOTS * width for width in widths])
    return Tables([first.view(NUM_SLOTS, -1).clone(), second.view(NUM_SLOTS, -1).clone()], BLOCK_SIZES)


ON_BLOCK_BOUNDARIES = (12, 24, 36, 12, 48)
ANYWHERE = (11, 25, 36, 1, 49)


@pytest.mark.parametrize("num_tokens", [ON_BLOCK_BOUNDARIES, ANYWHERE])
def test_rows_take_over_tokens_and_full_blocks_as_in_torch(num_tokens: Sequence[int]) -> None:
    for seed in range(8):
        rows = some_reorder(num_tokens, seed)
        tokens = torch.arange(LENGTH, dtype=torch.int32, device=DEVICE).repeat(NUM_SLOTS, 1)
        slots, _, num_common, lengths = rows.rows[..., None]
        tokens[slots[:, 0]] += (torch.arange(LENGTH, device=DEVICE) >= num_common) * slots.int()
        results = []
        for copy_histories in (copies.copy_histories, reorder.copy_histories):
            own_tokens, tables = tokens.clone(), some_tables()
            copy_histories(rows, own_tokens, tables)
            is_history = torch.arange(LENGTH, device=DEVICE) < lengths
            results.append((own_tokens[slots[:, 0]].where(is_history, 0), *tables.tables))
        assert not torch.equal(results[0][0], tokens[slots[:, 0]].where(is_history, 0))
        for by_kernel, by_torch in zip(*results, strict=True):
            assert torch.equal(by_kernel, by_torch)


def test_rows_take_over_long_histories_as_in_torch() -> None:
    length = 2 * copies.COPY_TILE + 9
    fields = ([1, 0, 2], [1, 1, 1], [3, 3, 3], [length] * 3)
    rows = RowReorder(torch.tensor(fields, device=DEVICE), np.full(3, length))
    tokens = torch.randint(0, 99, (3, length + 5), generator=seeded(9), dtype=torch.int32).to(DEVICE)
    expected = tokens.clone()
    expected[0, 3:length] = expected[2, 3:length] = expected[1, 3:length]
    table = torch.randint(0, 99, (3, length), generator=seeded(10), dtype=torch.int32).to(DEVICE)
    copies.copy_histories(rows, tokens, Tables([table], [1]))
    assert torch.equal(tokens, expected)
    assert torch.equal(table[0], table[1])


def kv_caches(kind: str) -> list[torch.Tensor]:
    """Layers of different sizes, in layouts that vLLM has."""
    if kind == "contiguous":
        return [torch.zeros(NUM_BLOCKS, 2, 4, heads, 8, dtype=torch.bfloat16, device=DEVICE) for heads in (1, 3, 40)]
    if kind == "shared by layers":
        first, other = torch.zeros(2, NUM_BLOCKS, 4, 16, device=DEVICE)
        return [first, other, first]
    if kind == "kernel blocks":
        return [torch.zeros(4 * NUM_BLOCKS, 2, 8, dtype=torch.float16, device=DEVICE)]
    if kind == "layers within blocks":
        return list(torch.zeros(NUM_BLOCKS, 3, 2, 4, 8, device=DEVICE).unbind(1))
    if kind == "heads before tokens":
        return [torch.zeros(NUM_BLOCKS, 2, 4, 8, device=DEVICE).transpose(1, 2)]
    if kind == "heads before blocks":
        return [torch.zeros(3, NUM_BLOCKS, 4, 8, device=DEVICE).transpose(0, 1)]
    assert kind == "odd bytes"
    return [torch.zeros(NUM_BLOCKS, 3, 5, dtype=torch.uint8, device=DEVICE)]


KINDS = ("contiguous", "shared by layers", "kernel blocks", "layers within blocks", "heads before tokens")


@pytest.mark.parametrize("kind", [*KINDS, "heads before blocks", "odd bytes"])
def test_tail_blocks_are_copied_as_in_torch(kind: str) -> None:
    for seed, num_tokens in enumerate((ANYWHERE, ANYWHERE, ON_BLOCK_BOUNDARIES)):
        rows, tables = some_reorder(num_tokens, seed), some_tables()
        results = []
        for by_kernel in (True, False):
            caches = kv_caches(kind)
            for at, cache in enumerate(caches):
                values = torch.randint(0, 100, cache.shape, generator=seeded(at))
                cache.copy_(values)
            before = [cache.clone() for cache in caches]
            blocks = KVBlocks(caches, NUM_BLOCKS)
            if by_kernel:
                copies.copy_tails(rows, tables, blocks.segments)
            else:
                reorder.copy_tails(rows, tables, blocks)
            changed = not all(map(torch.equal, caches, before))
            assert changed == (num_tokens is ANYWHERE)
            results.append(caches)
        assert all(map(torch.equal, *results))


def test_rows_that_stay_are_left_alone_and_those_that_move_are_moved() -> None:
    rows = some_reorder(ANYWHERE, seed=1)
    moving = rows.moving()
    assert 0 < len(moving.num_tokens_on_host) < len(rows.num_tokens_on_host)
    assert (moving.rows[0] != moving.rows[1]).all()
    assert moving.num_tokens_on_host.tolist() == moving.rows[3].tolist()
