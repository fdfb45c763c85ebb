"""Rows take over histories by kernels as in torch: on a GPU, or without one in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_trie.search.rank import choose_next_search_beams, rank_search_candidates
from vllm_trie.worker.kv import copies
from vllm_trie.worker.kv.kv_caches import HELD, KVCaches, KVTable, kv_copies_in_order
from vllm_trie.worker.kv.kv_moves import (
    KVFork,
    KVMoves,
    copy_kv_histories,
    kv_moves_of_tails,
    kv_rows_of_groups,
    move_kv_by_torch,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


BLOCK_SIZES = (4, 6)
NUM_SLOTS = 24
LENGTH = 50
NUM_BLOCKS = 600
CONTENTS = [torch.zeros(NUM_BLOCKS, 8, device=DEVICE)]  # where they are not looked at


def some_fork(num_tokens: Sequence[int], seed: int) -> KVFork:
    """Three groups of one class and two of another, their rows anywhere, as after a step of the search."""
    slots = torch.randperm(NUM_SLOTS, generator=seeded(seed)).numpy()
    start, of_classes, chosen, repeated = 0, list[np.ndarray](), list[torch.Tensor](), list[np.ndarray]()
    for width, lengths in ((4, num_tokens[:3]), (5, num_tokens[3:])):
        total = torch.randn(len(lengths), width, 7, generator=seeded(seed + width)) - 9
        candidates = rank_search_candidates(total, torch.zeros(len(lengths), width), 2 * width)
        parents = choose_next_search_beams(
            candidates, torch.ones(len(lengths), 2 * width, dtype=torch.bool), width, width
        ).parents
        of_class = slots[start : (start := start + len(lengths) * width)].reshape(len(lengths), width)
        of_classes.append(of_class)
        chosen.append(parents.to(DEVICE))
        repeated.append(np.repeat(lengths, width))
    num_common = [[length // 2 for length in lengths] for lengths in (num_tokens[:3], num_tokens[3:])]
    rows = kv_rows_of_groups(of_classes, num_common)
    return KVFork.of(rows, np.concatenate(repeated), chosen, torch.device(DEVICE))


def some_tables() -> list[KVTable]:
    """Each slot with blocks of its own in two KV cache groups."""
    blocks = torch.randperm(NUM_BLOCKS, generator=seeded(8)).int().to(DEVICE)
    widths = [-(-LENGTH // block_size) for block_size in BLOCK_SIZES]
    first, second = blocks[: NUM_SLOTS * sum(widths)].split([NUM_SLOTS * width for width in widths])
    return [KVTable(n.view(NUM_SLOTS, -1).clone(), size) for n, size in zip((first, second), BLOCK_SIZES, strict=True)]


ON_BLOCK_BOUNDARIES = (12, 24, 36, 12, 48)
ANYWHERE = (11, 25, 36, 1, 49)


@pytest.mark.parametrize("num_tokens", [ON_BLOCK_BOUNDARIES, ANYWHERE])
def test_rows_take_over_tokens_and_full_blocks_as_in_torch(num_tokens: Sequence[int]) -> None:
    for seed in range(8):
        rows = some_fork(num_tokens, seed)
        tokens = torch.arange(LENGTH, dtype=torch.int32, device=DEVICE).repeat(NUM_SLOTS, 1)
        slots, _, num_common, lengths = rows.rows[..., None]
        tokens[slots[:, 0]] += (torch.arange(LENGTH, device=DEVICE) >= num_common) * slots.int()
        by_kernel, by_torch = ((tokens.clone(), KVCaches(CONTENTS, NUM_BLOCKS, tables=some_tables())) for _ in range(2))
        copies.launch_kv_fork(rows, *by_kernel)
        copy_kv_histories(rows.moving(), *by_torch)
        is_history = torch.arange(LENGTH, device=DEVICE) < lengths
        found, expected = (own[slots[:, 0]].where(is_history, 0) for own, _ in (by_kernel, by_torch))
        assert not torch.equal(found, tokens[slots[:, 0]].where(is_history, 0))
        assert torch.equal(found, expected)
        assert all(
            table.blocks.equal(other.blocks)
            for table, other in zip(by_kernel[1].tables, by_torch[1].tables, strict=True)
        )


def test_rows_take_over_long_histories_as_in_torch() -> None:
    length = 2 * copies.COPY_TILE + 9
    fields = ([1, 0, 2], [0, 0, 0], [3, 3, 3], [length] * 3)
    rows = KVFork(torch.tensor(fields, device=DEVICE), torch.tensor([0, 0, 2], device=DEVICE), np.full(3, length))
    tokens = torch.randint(0, 99, (3, length + 5), generator=seeded(9), dtype=torch.int32).to(DEVICE)
    expected = tokens.clone()
    expected[0, 3:length] = expected[1, 3:length]
    table = torch.randint(0, 99, (3, length), generator=seeded(10), dtype=torch.int32).to(DEVICE)
    copies.launch_kv_fork(rows, tokens, KVCaches(CONTENTS, NUM_BLOCKS, tables=[KVTable(table, 1)]))
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


def filled(kind: str) -> list[torch.Tensor]:
    """Such caches with contents."""
    caches = kv_caches(kind)
    for at, cache in enumerate(caches):
        cache.copy_(torch.randint(0, 100, cache.shape, generator=seeded(at)))
    return caches


@pytest.mark.parametrize("kind", [*KINDS, "heads before blocks", "odd bytes"])
def test_contents_of_blocks_are_copied_as_in_torch(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of tails, for each row by many programs and by one; and of whole blocks, in circles too."""
    tokens = torch.zeros(NUM_SLOTS, LENGTH, dtype=torch.int32, device=DEVICE)
    for seed, num_tokens in enumerate((ANYWHERE, ANYWHERE, ON_BLOCK_BOUNDARIES)):
        monkeypatch.setattr(copies, "MOST_PROGRAMS", (4096, 1, 4096)[seed])
        rows, before = some_fork(num_tokens, seed), filled(kind)
        by_kernel, by_torch = filled(kind), filled(kind)
        kv, reference = (KVCaches(caches, NUM_BLOCKS, tables=some_tables()) for caches in (by_kernel, by_torch))
        copies.launch_kv_fork(rows, tokens, kv)
        move_kv_by_torch(kv_moves_of_tails(rows.moving(), reference), reference)
        assert all(map(torch.equal, by_kernel, by_torch))
        assert all(map(torch.equal, by_kernel, before)) == (num_tokens is ON_BLOCK_BOUNDARIES)
    random = np.random.default_rng(1)
    destinations = random.permutation(NUM_BLOCKS)[:60]
    pairs = np.stack([random.permutation(np.concatenate([destinations[:40], np.arange(20)])), destinations], axis=1)
    ordered, num_alone = kv_copies_in_order(pairs)
    assert HELD in ordered, "no circle"
    assert 0 < num_alone < len(ordered)
    assert kv.are_apart
    copies.launch_kv_moves(KVMoves(pairs), kv)
    reference.copy_blocks(pairs)
    assert all(map(torch.equal, by_kernel, by_torch))


def test_layers_that_lie_over_each_other_are_told_from_those_that_are_apart() -> None:
    memory = torch.zeros(NUM_BLOCKS, 64, device=DEVICE)
    for kind in KINDS:
        assert KVCaches(kv_caches(kind), NUM_BLOCKS).are_apart
    heads = [memory.as_strided((NUM_BLOCKS, 2, 8), (64, between_heads, 1)) for between_heads in (16, 32)]
    assert not KVCaches(heads, NUM_BLOCKS).are_apart
    assert not KVCaches([memory, memory.flatten()[8:].view(-1, 8)[: 7 * NUM_BLOCKS]], NUM_BLOCKS).are_apart


def test_rows_that_stay_are_left_alone_and_those_that_move_are_moved() -> None:
    rows = some_fork(ANYWHERE, seed=1)
    slots, sources, _, num_tokens = rows.moving()
    assert 0 < len(slots) < len(rows.num_tokens_on_host)
    assert (slots != sources).all()
    assert {*sources.tolist()} <= {*rows.rows[0].tolist()} - {*slots.tolist()}
    assert {*num_tokens.tolist()} <= {*rows.num_tokens_on_host.tolist()}
