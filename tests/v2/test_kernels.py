"""Each kernel does what its reference in torch does: on a GPU, or without one in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from vllm_trie.search.step import num_candidates
from vllm_trie.search.warping import Warping
from vllm_trie.worker import device_step, forks, kernels
from vllm_trie.worker.forks import Forks, RowForks, Tables
from vllm_trie.worker.kv_blocks import KVBlocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEAD = float("-inf")
SEVERAL_TILES = 2 * kernels.TILE_SIZE + 37


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def both_keys(
    logits: torch.Tensor,
    places: torch.Tensor,
    scores: torch.Tensor,
    temperature: float = 1.0,
    masked: Sequence[int] = (),
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Index and score of each continuation, by the kernel and by its reference."""
    masked_token_ids = torch.tensor(masked, dtype=torch.int64, device=DEVICE)
    logits, places, scores = logits.to(DEVICE), places.to(DEVICE), scores.to(DEVICE)
    by_kernel = kernels.continuation_keys(logits, places, scores, temperature, masked_token_ids)
    warping = Warping(temperature=temperature)
    by_torch = device_step.continuation_keys(logits, places, scores, warping, masked_token_ids)
    return device_step.from_keys(by_kernel), device_step.from_keys(by_torch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("vocab_size", "num_groups", "num_rows"), [(1, 2, 3), (5, 1, 1), (37, 3, 4), (SEVERAL_TILES, 2, 2)]
)
def test_continuations_score_as_in_torch(dtype: torch.dtype, vocab_size: int, num_groups: int, num_rows: int) -> None:
    logits = torch.randn(12, vocab_size, generator=seeded(1)).mul(4).to(dtype)
    places = torch.randperm(12, generator=seeded(2))[: num_groups * num_rows].view(num_groups, num_rows)
    logits[places[0, 0], vocab_size // 2 :] = DEAD if vocab_size > 1 else 0  # more than a tile, where there are several
    scores = torch.randn(num_groups, num_rows, generator=seeded(3)).mul(9)
    scores[0, -1] = DEAD
    for temperature, masked in ((1.0, [0]), (0.6, [vocab_size // 2, vocab_size - 1])):
        (index, score), (expected_index, expected) = both_keys(logits, places, scores, temperature, masked)
        assert torch.equal(index, expected_index)
        torch.testing.assert_close(score, expected, rtol=1e-6, atol=1e-5)


def test_equal_logits_score_equally_and_rank_by_index() -> None:
    logits = torch.full((3, SEVERAL_TILES), 1.5, dtype=torch.bfloat16)
    (index, score), _ = both_keys(logits, torch.tensor([[0, 1, 2]]), torch.zeros(1, 3))
    assert torch.equal(index[0].cpu(), torch.arange(3 * SEVERAL_TILES))
    assert len(score.unique()) == 1
    no_mask = torch.empty(0, dtype=torch.int64, device=DEVICE)
    keys = kernels.continuation_keys(
        logits.to(DEVICE), torch.tensor([[0, 1, 2]], device=DEVICE), torch.zeros(1, 3, device=DEVICE), 1.0, no_mask
    )
    assert bool((keys[0].diff() < 0).all())


def test_scores_of_a_row_do_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, SEVERAL_TILES, generator=seeded(4))
    (_, alone), _ = both_keys(logits, torch.tensor([[3]]), torch.tensor([[-2.0]]))
    (_, together), _ = both_keys(logits, torch.tensor([[5, 0], [1, 3]]), torch.tensor([[0.0, -1.0], [-3.0, -2.0]]))
    assert torch.equal(alone[0], together[1, SEVERAL_TILES:])


def test_row_that_may_take_no_token_scores_nothing() -> None:
    logits = torch.randn(2, 50, generator=seeded(5))
    logits[0] = DEAD
    (_, score), _ = both_keys(logits, torch.tensor([[0, 1]]), torch.zeros(1, 2))
    assert bool((score[0, :50] == DEAD).all())
    assert bool(torch.isfinite(score[0, 50:]).all())


def test_rows_of_logits_may_lie_apart() -> None:
    logits = torch.randn(4, 80, generator=seeded(6))
    (_, score), (_, expected) = both_keys(logits[:, :50], torch.tensor([[2, 1]]), torch.zeros(1, 2))
    torch.testing.assert_close(score, expected, rtol=1e-6, atol=1e-5)


def ranked_keys(num_groups: int, num_rows: int, vocab_size: int, count: int, levels: int, seed: int) -> torch.Tensor:
    """The best keys of continuations that have so many different scores, -inf among them."""
    scores = -torch.randint(0, levels, (num_groups, num_rows, vocab_size), generator=seeded(seed)).float()
    scores[scores == 1 - levels] = DEAD
    keys = device_step.order_keys(scores)
    return keys.topk(min(count, keys.shape[1]), dim=1).values.to(DEVICE)


@pytest.mark.parametrize(
    ("width", "vocab_size"), [(1, 1), (1, 5), (2, 1), (3, 5), (7, 2), (16, 24), (33, 5), (64, 301), (200, 9), (512, 9)]
)
def test_beams_settle_as_in_torch(width: int, vocab_size: int) -> None:
    num_groups = 2 if width <= 64 else 1
    cases = [([], 1, 2, False), ([0], width, 5, True), ([4, 2, 1], width, 1000, False), ([4, 2, 1], width, 3, False)]
    for seed, (stops, num_rows, levels, is_last) in enumerate(cases):
        count = num_candidates(width, len(stops))
        keys = ranked_keys(num_groups, num_rows, vocab_size, count, levels, seed)
        rules = (num_rows, vocab_size, torch.tensor(stops, dtype=torch.int64, device=DEVICE), width, is_last)
        assert torch.equal(kernels.settle(keys, *rules), device_step.settle(keys, *rules)), (stops, num_rows, levels)


BLOCK_SIZES = (4, 6)
NUM_SLOTS = 24
LENGTH = 50
NUM_BLOCKS = 600


def some_forks(num_tokens: Sequence[int], seed: int) -> RowForks:
    """Three groups of one class and two of another, their rows anywhere, as after a step of the search."""
    slots = torch.randperm(NUM_SLOTS, generator=seeded(seed)).numpy()
    of_classes = Forks()
    start = 0
    for width, lengths in ((4, num_tokens[:3]), (5, num_tokens[3:])):
        total = torch.randn(len(lengths), width, 7, generator=seeded(seed + width))
        keys = device_step.order_keys(total).topk(2 * width, dim=1).values
        stops = torch.empty(0, dtype=torch.int64)
        parents = device_step.settle(keys, width, 7, stops, width, False)[0]
        of_class = slots[start : (start := start + len(lengths) * width)].reshape(len(lengths), width)
        of_classes.add(of_class, parents.to(DEVICE), [length // 2 for length in lengths], lengths, False)
    rows = of_classes.rows()
    return RowForks(torch.from_numpy(rows).to(DEVICE), torch.cat(of_classes.parents), rows[3])


def some_tables() -> Tables:
    """Each slot with blocks of its own in two KV cache groups."""
    blocks = torch.randperm(NUM_BLOCKS, generator=seeded(8)).int().to(DEVICE)
    widths = [-(-LENGTH // block_size) for block_size in BLOCK_SIZES]
    first, second = blocks[: NUM_SLOTS * sum(widths)].split([NUM_SLOTS * width for width in widths])
    return Tables.of([first.view(NUM_SLOTS, -1).clone(), second.view(NUM_SLOTS, -1).clone()], BLOCK_SIZES)


ON_BLOCK_BOUNDARIES = (12, 24, 36, 12, 48)
ANYWHERE = (11, 25, 36, 1, 49)


@pytest.mark.parametrize("num_tokens", [ON_BLOCK_BOUNDARIES, ANYWHERE])
def test_rows_take_over_tokens_and_full_blocks_as_in_torch(num_tokens: Sequence[int]) -> None:
    for seed in range(8):
        row_forks = some_forks(num_tokens, seed)
        tokens = torch.arange(NUM_SLOTS * LENGTH, dtype=torch.int32, device=DEVICE).view(NUM_SLOTS, LENGTH)
        results = []
        for permute_rows in (kernels.permute_rows, forks.permute_rows):
            own_tokens, tables = tokens.clone(), some_tables()
            permute_rows(row_forks, own_tokens, tables)
            results.append((own_tokens, *tables.tables))
        assert not torch.equal(results[0][0], tokens)
        for by_kernel, by_torch in zip(*results, strict=True):
            assert torch.equal(by_kernel, by_torch)


def test_rows_take_over_long_histories_as_in_torch() -> None:
    length = 2 * kernels.COPY_TILE + 9
    rows = torch.tensor([[1, 0, 2], [0, 0, 0], [3, 3, 3], [length] * 3], device=DEVICE)
    row_forks = RowForks(rows, torch.tensor([0, 0, 0], device=DEVICE), np.full(3, length))
    tokens = torch.randint(0, 99, (3, length + 5), generator=seeded(9), dtype=torch.int32).to(DEVICE)
    expected = tokens.clone()
    expected[0, 3:length] = expected[2, 3:length] = expected[1, 3:length]
    table = torch.randint(0, 99, (3, length), generator=seeded(10), dtype=torch.int32).to(DEVICE)
    kernels.permute_rows(row_forks, tokens, Tables.of([table], [1]))
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
        row_forks, tables = some_forks(num_tokens, seed), some_tables()
        results = []
        for by_kernel in (True, False):
            caches = kv_caches(kind)
            for at, cache in enumerate(caches):
                values = torch.randint(0, 100, cache.shape, generator=seeded(at))
                cache.copy_(values)
            before = [cache.clone() for cache in caches]
            blocks = KVBlocks(caches, NUM_BLOCKS)
            if by_kernel:
                kernels.copy_tails(row_forks, tables, blocks.segments)
            else:
                forks.copy_tails(row_forks, tables, blocks)
            changed = not all(map(torch.equal, caches, before))
            assert changed == (num_tokens is ANYWHERE)
            results.append(caches)
        assert all(map(torch.equal, *results))
