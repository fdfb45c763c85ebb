"""Rows that become copies of a group's first one are to vLLM what they would be, had it taken in each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor, UvaBackedTensor

from tests.support.engine import Engine, Engines
from tests.support.images import KINDS, image, make_model, why_not
from tests.support.running import prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTH = 6
BLOCK_TABLE = "block table"


def tensors_by_slot(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """All that a runner holds by slot, on the host and on the device."""
    sampler, tables = runner.sampler, runner.block_tables
    states = [value for value in vars(sampler).values() if hasattr(value, "__dict__")]
    owners = [sampler, *sampler.logits_processors, *states, runner.req_states]
    for owner in (*owners, runner.prompt_logprobs_worker, runner.lora_state, runner.model_state):
        for name, value in vars(owner).items():
            parts = {"": value}
            if isinstance(value, UvaBackedTensor):
                parts = {".np": value.np, ".gpu": value.gpu}
            elif isinstance(value, StagedWriteTensor):
                parts = {".gpu": value.gpu}
            for part, array in parts.items():
                tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
                if isinstance(tensor, torch.Tensor) and tensor.shape[:1] == (runner.max_num_reqs,):
                    yield f"{type(owner).__name__}.{name}{part}", tensor
    if rope := runner.model_state.rope_state:
        yield "RopeState.prefill_delta", rope.prefill_delta.cpu
        yield "RopeState.prefill_delta.gpu", rope.prefill_delta.gpu
        yield "RopeState.prefill_positions", rope.prefill_positions.gpu.view(runner.max_num_reqs, rope.num_dims, -1)
    yield "num_blocks", tables.num_blocks.cpu.T
    yield "num_blocks on the device", tables.num_blocks.gpu.T
    for number, table in enumerate(tables.block_tables):
        yield f"{BLOCK_TABLE} {number}", table.gpu


def number_blocks(table: torch.Tensor, counts: list[int]) -> None:
    """Name blocks, of which a search gets others every time, by when they come first."""
    numbers: dict[int, int] = {}
    for row, count in zip(table, counts, strict=True):
        row[:count] = torch.tensor([numbers.setdefault(block, len(numbers)) for block in row[:count].tolist()])


def fanned_out(engine: Engine, prompt: dict[str, Any], is_resumed: bool, copies: bool) -> dict[str, Any]:
    """What is in the slots of a group that has just fanned out, for the first time or after a preemption."""
    runner, scheduler, core = engine.runner, engine.scheduler, engine.llm.llm_engine
    runner._copies_rows = copies
    runner.req_states.free_indices.sort()
    for number, (_, tensor) in enumerate(tensors_by_slot(runner)):  # as others have left it
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 3 == number % 3)
    apply, seen = runner.block_tables.apply_staged_writes, list[dict[str, Any]]()

    def snapshot() -> None:
        apply()
        for group_id, step in runner.step.steps.items():
            if step.rows is not None:
                assert (group_id in runner.step.copied) == copies
                slots = runner.groups[group_id].slots
                held = {name: tensor[slots].clone() for name, tensor in tensors_by_slot(runner)}
                for number, counts in enumerate(held["num_blocks"].T.tolist()):
                    number_blocks(held[f"{BLOCK_TABLE} {number}"], counts)
                states = runner.req_states
                names = {slot: row_id.replace(group_id, "") for slot, row_id in states.index_to_req_id.items()}
                seen.append(held | {"slots": slots.tolist(), "free": sorted(states.free_indices), "ids": names})

    runner.block_tables.apply_staged_writes = snapshot
    try:
        core.add_request("g", prompt, beam_params(WIDTH, max_tokens=60, ignore_eos=True))
        for _ in range(12):
            core.step()
        if is_resumed:
            scheduler._preempt_request(scheduler.running.pop(), time.monotonic())
            for _ in range(8):
                core.step()
    finally:
        runner.block_tables.apply_staged_writes = apply
        del runner._copies_rows
        core.abort_request(["g"])
        core.step()
        scheduler.reset_prefix_cache()
    assert len(seen) == 1 + is_resumed
    return seen[-1]


@pytest.mark.parametrize("kind", ["gqa", "gemma2", "granite4"])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_copied_rows_are_what_vllm_would_have_taken_in(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kind: str, is_resumed: bool
) -> None:
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: 5)  # the seeds of rows, which sample nothing
    engine = engines(random_model(kind), max_num_seqs=23, async_scheduling=False)
    check_copies(engine, {"prompt_token_ids": prompt_of(70)}, is_resumed)


@pytest.fixture(scope="module")
def mrope_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not("qwen2_5_vl"):
        pytest.skip(reason)
    return make_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_copied_rows_have_the_positions_of_what_they_see(
    engines: Engines, mrope_model: Path, monkeypatch: pytest.MonkeyPatch, is_resumed: bool
) -> None:
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: 5)
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    engine = engines(mrope_model, max_num_seqs=23, async_scheduling=False, **options)
    text = "x = 1\n" * 14 + KINDS["qwen2_5_vl"].placeholder + "y = "
    check_copies(engine, {"prompt": text, "multi_modal_data": {"image": image(3)}}, is_resumed)


def check_copies(engine: Engine, prompt: dict[str, Any], is_resumed: bool) -> None:
    """Raise AssertionError where rows that are copies differ from rows that vLLM took in."""
    stock, copied = (fanned_out(engine, prompt, is_resumed, copies) for copies in (False, True))
    assert len(stock) > 30
    assert ("RopeState.prefill_positions" in stock) == ("multi_modal_data" in prompt)
    assert stock.keys() == copied.keys()
    for name, value in stock.items():
        assert torch.equal(value, copied[name]) if isinstance(value, torch.Tensor) else value == copied[name], name
