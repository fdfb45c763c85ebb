"""Recurrent states in the prefix cache: which columns of a row they are in, and how they come from one to the next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given

from tests.support.batches import NUM_SLOTS, Batch, batches, few
from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow

BLOCK_SIZE, NUM_BLOCKS, NUM_COLUMNS = 4, 20, 8


class OnDevice(torch.Tensor):
    """A tensor that vLLM takes for one on a GPU."""

    is_cuda = True


def copied_states(
    idx_mapping: torch.Tensor,
    state_idx: torch.Tensor,
    num_computed: torch.Tensor,
    query_start_loc: torch.Tensor,
    states: list[list[torch.Tensor]],
    tables: list[torch.Tensor],
) -> list[Any]:
    """All that happens to states before and after a forward, and where each row's is."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.gpu.model_states import mamba_hybrid

    spec = MambaSpec(BLOCK_SIZE, ((3, 6), (2, 5)), (torch.float32,) * 2, mamba_cache_mode="align")
    groups = [KVCacheGroupSpec([f"layer {number}"], spec) for number in range(len(states))]
    config, device = KVCacheConfig(NUM_BLOCKS, [], groups), torch.device("cpu")
    copy_funcs: Any = {spec.mamba_type: (get_conv_copy_spec, get_temporal_copy_spec)}

    def buffer(size: int, dtype: torch.dtype) -> CpuGpuBuffer:
        return CpuGpuBuffer(size, dtype=dtype, device=device, pin_memory=False)

    context = mamba_utils.MambaSpecDecodeGPUContext.create(NUM_SLOTS, config, copy_funcs, device, buffer)
    layers = {f"layer {number}": SimpleNamespace(kv_cache=of_layer) for number, of_layer in enumerate(states)}
    num_rows = len(idx_mapping)
    by_row = [torch.zeros_like(table) for table in tables]
    for rows, table in zip(by_row, tables, strict=True):
        rows[:num_rows] = table[idx_mapping]
    context.initialize_from_forward_context(config, layers, copy_funcs, tables, by_row)
    accepted = torch.ones(NUM_SLOTS, dtype=torch.int32)
    source, offset = torch.full((2, NUM_SLOTS), 9, dtype=torch.int32)
    mamba_hybrid.preprocess_mamba_align_fused_kernel[(1,)](
        idx_mapping, state_idx, num_computed, query_start_loc, accepted, source, offset, num_rows,
        BLOCK_SIZE=256, MAMBA_BLOCK_SIZE=BLOCK_SIZE,
    )  # fmt: skip
    context.run_fused_precopy(num_rows, state_idx, source, offset, idx_mapping)
    computed = num_computed.clone()
    computed[idx_mapping] += torch.diff(query_start_loc)
    context.run_fused_postprocess_align(num_rows, accepted, state_idx, computed, idx_mapping)
    seq_lens = torch.cat([computed[idx_mapping], torch.zeros(1, dtype=torch.int32)]).as_subclass(OnDevice)
    blocks = context.compute_aligned_state_indices(seq_lens, num_rows)
    return [state_idx, accepted, source, offset, states, blocks.clone()]


@few
@given(batches(max_drafts=0))
def test_states_go_where_the_next_forward_writes_them(interpreter: Interpreter, batch: Batch) -> None:
    computed = batch.integers(NUM_SLOTS, high=3 * BLOCK_SIZE)
    shapes = (NUM_BLOCKS, 3, 6), (NUM_BLOCKS, 2, 5)
    interpreter.check(
        "tests.worker.cpu.test_cached_states:copied_states",
        batch.idx_mapping.int(),
        (computed - 1).div(BLOCK_SIZE, rounding_mode="floor").int(),
        computed,
        batch.query_start_loc,
        [[batch.floats(*shape) for shape in shapes] for _ in range(2)],
        [
            torch.from_numpy(batch.random.permutation(NUM_SLOTS * NUM_COLUMNS) % NUM_BLOCKS).int().view(NUM_SLOTS, -1)
            for _ in range(2)
        ],
    )


def stored_checkpoints(checkpoints: tuple[torch.Tensor, torch.Tensor], *states: torch.Tensor) -> list[torch.Tensor]:
    """Blocks after each row's state on its way was written."""
    from vllm.model_executor.layers.mamba.checkpoint import MambaPrefillCheckpointMetadata
    from vllm.model_executor.layers.mamba.ops.ssd_checkpoint import store_prefill_checkpoint

    chunk_idx, x, conv_state, chunk_states, ssm_state, query_start_loc = states
    metadata = MambaPrefillCheckpointMetadata(*checkpoints)
    conv = conv_state.transpose(1, 2)
    store_prefill_checkpoint(metadata, chunk_idx, x.T, conv, chunk_states, ssm_state, query_start_loc, state_len=3)
    return [conv_state, ssm_state]


@few
@given(batches(max_drafts=0))
def test_a_prompts_checkpoint_is_written(interpreter: Interpreter, batch: Batch) -> None:
    num_rows = len(batch.idx_mapping)
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * 10
    offsets = batch.integers(num_rows, low=3, high=10) * batch.integers(num_rows, high=2)
    blocks = torch.from_numpy(batch.random.permutation(NUM_BLOCKS)[:num_rows]).int()
    interpreter.check(
        "tests.worker.cpu.test_cached_states:stored_checkpoints",
        (offsets, blocks),
        batch.integers(num_rows, high=7),
        batch.floats(10 * num_rows, 6),
        batch.floats(NUM_BLOCKS, 3, 6),
        batch.floats(7, 2, 4, 5),
        batch.floats(NUM_BLOCKS, 2, 4, 5),
        starts,
    )


@pytest.mark.usefixtures("interpreter")
def test_states_after_each_chunk_are_those_after_its_tokens() -> None:
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen as scan

    torch.manual_seed(0)
    lengths, ends, rows = [11, 6], [0, 4, 7, 11, 15, 17], [0, 0, 0, 1, 1]
    heads, head_size, state_size, num_tokens = 4, 8, 16, sum(lengths)
    x, dt = torch.randn(num_tokens, heads, head_size), torch.randn(num_tokens, heads)
    b, c = torch.randn(2, num_tokens, 1, state_size)
    common: dict[str, Any] = {"D": torch.randn(heads), "dt_bias": torch.randn(heads), "dt_softplus": True}
    common |= {"state_dtype": torch.float32, "chunk_size": 4}
    a, initial = -torch.rand(heads), torch.randn(2, heads, head_size, state_size)

    def scanned(at: slice, starts: list[int], initial: torch.Tensor, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.empty(x[at].shape)
        more = {"cu_seqlens": torch.tensor(starts), "initial_states": initial, "out": out} | more
        return scan(x[at], dt[at], a, b[at], c[at], **common, **more), out

    chunks = {"cu_chunk_seqlens": torch.tensor(ends), "seq_idx": torch.tensor(rows)}
    chunks |= {"last_chunk_indices": torch.tensor([2, 4])}
    states, out = scanned(slice(None), [0, 11, 17], initial, return_intermediate_states=True, **chunks)
    last, expected_out = scanned(slice(None), [0, 11, 17], initial, **chunks)
    torch.testing.assert_close(states[[2, 4]], last, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, expected_out, rtol=1e-5, atol=1e-5)
    for number, row in enumerate(rows):
        start = 11 * row
        more = {"seq_idx": torch.tensor([0]), "last_chunk_indices": torch.tensor([0])}
        more |= {"cu_chunk_seqlens": torch.tensor([0, ends[number + 1] - start])}
        at = slice(start, ends[number + 1])
        state, _ = scanned(at, [0, at.stop - start], initial[row : row + 1], **more)
        torch.testing.assert_close(states[number], state[0], rtol=1e-5, atol=1e-5)
