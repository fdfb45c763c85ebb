"""Our kernels on real shapes: each against its reference in torch, and both timed on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.rank import SearchCandidates, choose_next_search_beams, rank_search_candidates
from vllm_trie.search.rules import SearchRules
from vllm_trie.search.step import search_log_probabilities, take_search_step
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.worker.kernels import KernelStepSizes, slots
from vllm_trie.worker.kernels.tiles import KernelLogits
from vllm_trie.worker.kv import copies
from vllm_trie.worker.kv.kv_caches import KVCaches, KVTable
from vllm_trie.worker.kv.kv_moves import (
    KVFork,
    copy_kv_histories,
    kv_moves_of_tails,
    kv_rows_of_groups,
    move_kv_by_torch,
)
from vllm_trie.worker.select.by_kernels import select_by_kernels

BLOCK_SIZE = 16
WEIGHT_BYTES = 2 * 8_030_000_000  # of a Llama of 8B parameters, bfloat16
LAYERS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # of the same
NUM_PROMPT, NUM_TOKENS = 512, 1029  # the last block partly filled
STOP_TOKEN_ID = 2
COLUMNS = (
    "beams x groups x vocabulary",
    "rank in torch, us",
    "select, us",
    "select in torch, us",
    "step, us",
    "step in torch, us",
    "reorder, us",
    "reorder in torch, us",
    "all by kernels, us",
    "host, us",
    "share of a step, %",
)


class Shape(NamedTuple):
    width: int
    num_groups: int
    vocab_size: int
    num_layers: int = LAYERS

    @property
    def num_rows(self) -> int:
        return self.width * self.num_groups


SHAPES = (
    Shape(4, 1, 32_000),
    Shape(4, 16, 128_256),
    Shape(8, 8, 151_936),
    Shape(16, 4, 128_256),
    Shape(64, 1, 32_000),
    Shape(64, 4, 151_936),
    Shape(128, 1, 128_256),
    Shape(512, 1, 32_000),
    Shape(512, 1, 151_936),
)
SMALL_SHAPES = (Shape(4, 2, 500, 2),)


class Inputs:
    """One step of groups in a batch: logits as coarse as bfloat16 makes them, rows in any slots."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        random = torch.Generator(device).manual_seed(seed)
        on = {"device": device, "generator": random}
        width, num_groups, vocab_size, num_layers = shape
        num_rows, self.shape = shape.num_rows, shape
        self.logits = torch.randn(num_groups, width, vocab_size, **on).mul_(3).bfloat16()
        self.scores = torch.randn(num_groups, width, **on).sub_(20)
        self.rules = SearchRules(width, BestStrategy(), stops=StopConstraints((STOP_TOKEN_ID,)))

        num_columns = -(-NUM_TOKENS // BLOCK_SIZE)
        self.tokens = torch.randint(0, vocab_size, (num_rows, NUM_TOKENS + 1), dtype=torch.int32, **on)
        self.tokens[:, :NUM_PROMPT] = 0  # the same in all rows of a group
        table = torch.randint(0, num_rows, (num_rows, num_columns), dtype=torch.int32, **on)
        table[:, -1] = torch.randperm(num_rows, **on)  # tails are the rows' own
        block = (2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        caches = [torch.randn(num_rows, *block, dtype=torch.bfloat16, **on) for _ in range(num_layers)]
        self.caches, self.kv = caches, KVCaches(caches, num_rows, tables=[KVTable(table, BLOCK_SIZE)])

        self.places = torch.arange(num_rows, device=device)
        self.sampled = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        self.row_logits = KernelLogits.of(self.logits.flatten(0, 1), self.places, self.rules.stops)
        take = select_by_kernels(self.rules, KernelStepSizes(width, vocab_size))
        assert take is not None
        self.take = take
        self.candidates = self.rank()
        self.lives = self.candidates.tokens != STOP_TOKEN_ID
        self.rows = self._reordered(self.select_by_torch().parents)
        self.moving = self.rows.moving()
        self.tails = kv_moves_of_tails(self.moving, self.kv)

    def _reordered(self, parents: torch.Tensor) -> KVFork:
        shape = self.shape
        slots = np.random.default_rng(0).permutation(shape.num_rows).reshape(shape.num_groups, shape.width)
        rows = kv_rows_of_groups([slots], [[NUM_PROMPT] * shape.num_groups])
        return KVFork.of(rows, np.full(shape.num_rows, NUM_TOKENS), [parents], parents.device)

    def rank(self) -> SearchCandidates[torch.Tensor]:
        return rank_search_candidates(search_log_probabilities(self.logits), self.scores, 2 * self.shape.width)

    def select_by_kernel(self) -> SearchCandidates[torch.Tensor]:
        return slots.launch_select_next(self.candidates, self.lives, self.shape.width, self.shape.width)

    def select_by_torch(self) -> SearchCandidates[torch.Tensor]:
        return choose_next_search_beams(self.candidates, self.lives, self.shape.width, self.shape.width)

    def reorder_by_kernel(self) -> None:
        copies.launch_kv_fork(self.rows, self.tokens, self.kv)

    def reorder_by_torch(self) -> None:
        copy_kv_histories(self.moving, self.tokens, self.kv)
        move_kv_by_torch(self.tails, self.kv)

    def take_by_kernels(self) -> PackedSearchStep:
        """A step, as the runner takes it."""
        return self.take(self.row_logits, SearchBeams(self.scores), self.places, self.sampled)

    def take_by_torch(self) -> torch.Tensor:
        """The scores of the next beams."""
        return take_search_step(self.rules, self.logits, SearchBeams(self.scores)).scores

    def all_by_kernels(self) -> None:
        """A step and its reorder."""
        self._reordered(self.take_by_kernels().going.parents)
        self.reorder_by_kernel()


def check(inputs: Inputs) -> None:
    """Raise AssertionError where a kernel and its reference differ."""
    by_kernel, by_torch = inputs.select_by_kernel(), inputs.select_by_torch()
    assert all(map(torch.equal, by_kernel, by_torch)), "other beams are selected than in torch"
    taken = inputs.take_by_kernels().going.beams.scores
    assert torch.allclose(taken, inputs.take_by_torch(), rtol=1e-5), "steps have other scores than in torch"
    state = (inputs.tokens, inputs.kv.tables[0].blocks, *inputs.caches)
    before = [part.clone() for part in state]
    inputs.reorder_by_kernel()
    after = [part.clone() for part in state]
    for part, was in zip(state, before, strict=True):
        part.copy_(was)
    inputs.reorder_by_torch()
    assert all(map(torch.equal, state, after)), "rows are reordered otherwise than in torch"
    assert not all(map(torch.equal, state, before)) or inputs.shape.width == 1, "nothing was reordered"


def device_us(runs: list[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds of the device per run, the median; the host is ahead, so its launches do not count."""
    for run in runs:
        run()
    marks = []
    for at in range(repeats):
        torch.cuda._sleep(4_000_000)  # cycles, while the host launches
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        runs[at % len(runs)]()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(1000 * begin.elapsed_time(end) for begin, end in marks)


def host_us(runs: list[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds that the host takes to launch a run, the median."""
    seconds = []
    for at in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        runs[at % len(runs)]()
        seconds.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(seconds)


@cache
def bytes_per_us(device: torch.device) -> float:
    """What a copy within the device's memory reads and writes per microsecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * source.numel() / device_us([lambda: destination.copy_(source)])


def step_us(shape: Shape, speed: float) -> float:
    """Microseconds of a decode step that reads the weights and each row's KV once, and does nothing else."""
    kv_bytes = shape.num_rows * NUM_TOKENS * LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2
    return (WEIGHT_BYTES + kv_bytes) / speed


def measured(shape: Shape, device: torch.device, num_inputs: int) -> tuple[Any, ...]:
    """A row of `COLUMNS`, all checked; on the host no times."""
    inputs = [Inputs(shape, device, seed) for seed in range(num_inputs)]
    for one in inputs:
        check(one)
    name = f"{shape.width} x {shape.num_groups} x {shape.vocab_size}"
    if device.type != "cuda":
        return (name, *["-"] * (len(COLUMNS) - 1))
    parts = ("rank", "select_by_kernel", "select_by_torch", "take_by_kernels", "take_by_torch")
    parts += ("reorder_by_kernel", "reorder_by_torch")
    whole = [one.all_by_kernels for one in inputs]
    everything = device_us(whole)
    return (
        name,
        *(device_us([getattr(one, part) for one in inputs]) for part in parts),
        everything,
        host_us(whole),
        100 * everything / step_us(shape, bytes_per_us(device)),
    )
