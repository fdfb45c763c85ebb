"""Our kernels on real shapes: each against its reference in torch, and both timed on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_trie.search.step import num_candidates
from vllm_trie.search.warping import Warping
from vllm_trie.worker import device_step, forks, kernels
from vllm_trie.worker.forks import Forks, RowForks, Tables
from vllm_trie.worker.kv_blocks import KVBlocks

BLOCK_SIZE = 16
WEIGHT_BYTES = 2 * 8_030_000_000  # of a Llama of 8B parameters, bfloat16
LAYERS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # of the same
NUM_PROMPT, NUM_TOKENS = 512, 1029  # the last block partly filled
PARTS = ("keys", "topk", "settle", "permute")
COLUMNS = (
    "beams x groups x vocabulary",
    *(f"{part}{how}, us" for part in PARTS if part != "topk" for how in ("", " in torch")),
    "topk, us",
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


class Inputs:
    """One step of groups in a batch: logits as coarse as bfloat16 makes them, rows in any order."""

    def __init__(self, shape: Shape, device: torch.device, seed: int) -> None:
        random = torch.Generator(device).manual_seed(seed)
        on = {"device": device, "generator": random}
        width, num_groups, vocab_size, num_layers = shape
        num_rows, self.shape = shape.num_rows, shape
        self.logits = torch.randn(num_rows, vocab_size, **on).mul_(3).bfloat16()
        self.places = torch.randperm(num_rows, **on).view(num_groups, width)
        self.scores = torch.randn(num_groups, width, **on).sub_(20)
        self.stop_token_ids = torch.tensor([2], device=device)
        self.no_mask = self.stop_token_ids[:0]

        num_columns = -(-NUM_TOKENS // BLOCK_SIZE)
        self.tokens = torch.randint(0, vocab_size, (num_rows, NUM_TOKENS + 1), dtype=torch.int32, **on)
        table = torch.randint(0, num_rows, (num_rows, num_columns), dtype=torch.int32, **on)
        table[:, -1] = torch.randperm(num_rows, **on)  # tails are the rows' own
        self.tables = Tables.of([table], [BLOCK_SIZE])
        block = (2, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
        caches = [torch.randn(num_rows, *block, dtype=torch.bfloat16, **on) for _ in range(num_layers)]
        self.caches, self.kv_blocks = caches, KVBlocks(caches, num_rows)

        self.keys = self.keys_by_torch()
        self.ranked = self.topk()
        parents = self.settle_by_torch()[0]
        self.row_forks = self._forks(parents)

    def _forks(self, parents: torch.Tensor) -> RowForks:
        found, shape = Forks(), self.shape
        slots = np.random.default_rng(0).permutation(shape.num_rows).reshape(shape.num_groups, shape.width)
        found.add(slots, parents, [NUM_PROMPT] * shape.num_groups, [NUM_TOKENS] * shape.num_groups, False)
        rows = found.rows()
        return RowForks(torch.from_numpy(rows).to(parents.device), torch.cat(found.parents), rows[3])

    def keys_by_kernel(self) -> torch.Tensor:
        return kernels.continuation_keys(self.logits, self.places, self.scores, 1.0, self.no_mask)

    def keys_by_torch(self) -> torch.Tensor:
        return device_step.continuation_keys(self.logits, self.places, self.scores, Warping(), self.no_mask)

    def topk(self) -> torch.Tensor:
        return self.keys.topk(min(num_candidates(self.shape.width, 1), self.keys.shape[1]), dim=1).values

    def settle_by_kernel(self) -> torch.Tensor:
        return kernels.settle(self.ranked, *self._rules())

    def settle_by_torch(self) -> torch.Tensor:
        return device_step.settle(self.ranked, *self._rules())

    def _rules(self) -> tuple[int, int, torch.Tensor, int, bool]:
        return self.shape.width, self.shape.vocab_size, self.stop_token_ids, self.shape.width, False

    def permute_by_kernel(self) -> None:
        kernels.permute_rows(self.row_forks, self.tokens, self.tables)
        kernels.copy_tails(self.row_forks, self.tables, self.kv_blocks.segments)

    def permute_by_torch(self) -> None:
        forks.permute_rows(self.row_forks, self.tokens, self.tables)
        forks.copy_tails(self.row_forks, self.tables, self.kv_blocks)

    def take_by_kernels(self) -> None:
        """All of it, as the runner does it."""
        keys = self.keys_by_kernel()
        ranked = keys.topk(min(num_candidates(self.shape.width, 1), keys.shape[1]), dim=1).values
        kernels.settle(ranked, *self._rules())
        self.permute_by_kernel()


def check(inputs: Inputs) -> None:
    """Raise AssertionError where a kernel and its reference differ."""
    (index, score), (own_index, own_score) = map(device_step.from_keys, (inputs.keys, inputs.keys_by_kernel()))
    assert torch.equal(own_index, index), "keys are in another order than in torch"
    torch.testing.assert_close(own_score, score, rtol=1e-6, atol=2e-5, msg=lambda m: f"scores differ from torch: {m}")
    assert torch.equal(inputs.keys_by_kernel(), inputs.keys_by_kernel()), "keys differ from run to run"
    assert torch.equal(inputs.settle_by_kernel(), inputs.settle_by_torch()), "beams settle otherwise than in torch"
    state = (inputs.tokens, *inputs.tables.tables, *inputs.caches)
    before = [part.clone() for part in state]
    inputs.permute_by_kernel()
    after = [part.clone() for part in state]
    for part, was in zip(state, before, strict=True):
        part.copy_(was)
    inputs.permute_by_torch()
    assert all(map(torch.equal, state, after)), "rows permute otherwise than in torch"
    assert not all(map(torch.equal, state, before)) or inputs.shape.width == 1, "nothing was permuted"


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


def bytes_per_us(device: torch.device) -> float:
    """What a copy within the device's memory reads and writes per microsecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return 2 * source.numel() / device_us([lambda: destination.copy_(source)])


def step_us(shape: Shape, speed: float) -> float:
    """Microseconds of a decode step that reads the weights and each row's KV once, and does nothing else."""
    kv_bytes = shape.num_rows * NUM_TOKENS * LAYERS * 2 * KV_HEADS * HEAD_SIZE * 2
    return (WEIGHT_BYTES + kv_bytes) / speed


def on_real_shapes(device: torch.device, num_inputs: int) -> Iterator[tuple[Any, ...]]:
    """A row of `COLUMNS` per shape, all checked."""
    speed = bytes_per_us(device)
    for shape in SHAPES:
        inputs = [Inputs(shape, device, seed) for seed in range(num_inputs)]
        for one in inputs:
            check(one)
        timed = [
            device_us([getattr(one, f"{part}_by_{how}") for one in inputs])
            for part in PARTS
            if part != "topk"
            for how in ("kernel", "torch")
        ]
        whole = [one.take_by_kernels for one in inputs]
        everything = device_us(whole)
        yield (
            f"{shape.width} x {shape.num_groups} x {shape.vocab_size}",
            *timed,
            device_us([one.topk for one in inputs]),
            everything,
            host_us(whole),
            100 * everything / step_us(shape, speed),
        )
        del inputs, whole
        torch.cuda.empty_cache()
