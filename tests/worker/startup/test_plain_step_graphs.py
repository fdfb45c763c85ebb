"""In engines that speculate, plain steps of beams replay full CUDA graphs, too; vLLM dispatches all else as ever."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.support.engine import TRAINED_TARGET
from tests.support.graphs import as_on_a_gpu
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.startup import layer_bytes
from vllm_trie.worker.startup.plain_step_graphs import capture_plain_step_graphs

NUM_DRAFTS, MOST_ROWS = 4, 100
OF_DRAFTS = NUM_DRAFTS + 1  # tokens of a row with drafts
BOTH = CUDAGraphMode.FULL_AND_PIECEWISE
DRAFTS = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 2}


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)


def manager(mode: CUDAGraphMode = BOTH, num_tokens: int = OF_DRAFTS, **options: Any) -> ModelCudaGraphManager:
    """As a runner makes it, after everything is captured."""
    engine_args = EngineArgs(str(TRAINED_TARGET), max_num_seqs=MOST_ROWS, speculative_config=dict(DRAFTS), **options)
    made = ModelCudaGraphManager(as_on_a_gpu(engine_args, mode), torch.device("cpu"), mode, num_tokens)
    made._graphs_captured = True
    return made


def dispatched(graphs: ModelCudaGraphManager, num_rows: int, of_row: int | None = 1) -> BatchExecutionDescriptor:
    return graphs.dispatch(num_rows, num_rows * (of_row or 1), of_row, num_active_loras=0)


def test_every_plain_step_replays_a_full_graph_that_pads_little() -> None:
    stock, ours = manager(), manager()
    capture_plain_step_graphs(ours)
    for num_rows in range(1, MOST_ROWS + 1):
        assert dispatched(stock, num_rows).cg_mode == CUDAGraphMode.PIECEWISE
        graph = dispatched(ours, num_rows)
        assert (graph.cg_mode, graph.uniform_token_count, graph.num_reqs) == (CUDAGraphMode.FULL, 1, graph.num_tokens)
        assert num_rows <= graph.num_tokens <= min(dispatched(stock, num_rows).num_tokens, MOST_ROWS)
        assert graph in ours._capture_descs[CUDAGraphMode.FULL]


@pytest.mark.parametrize("mode", [BOTH, CUDAGraphMode.FULL_DECODE_ONLY])
def test_all_other_steps_replay_what_they_replayed(mode: CUDAGraphMode) -> None:
    stock, ours = manager(mode), manager(mode)
    capture_plain_step_graphs(ours)
    for num_rows, of_row in product(range(1, MOST_ROWS + 50), (None, 2, OF_DRAFTS)):
        assert dispatched(ours, num_rows, of_row) == dispatched(stock, num_rows, of_row)
    for num_tokens in range(1, 600):
        assert ours.dispatch(1, num_tokens, None, 0) == stock.dispatch(1, num_tokens, None, 0)


def test_the_widest_graph_is_captured_first_and_none_twice() -> None:
    """The first allocates the buffers of hidden states for all."""
    graphs = manager(max_cudagraph_capture_size=64)
    capture_plain_step_graphs(graphs)
    captured = graphs._capture_descs[CUDAGraphMode.FULL]
    sizes = [graph.num_tokens for graph in captured]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(captured)) == len(captured)
    assert {graph.uniform_token_count for graph in captured} == {1, OF_DRAFTS}
    assert dispatched(graphs, 64).cg_mode == CUDAGraphMode.FULL
    assert dispatched(graphs, 65).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("mode", "num_tokens"),
    [(BOTH, 1), (CUDAGraphMode.FULL, OF_DRAFTS), (CUDAGraphMode.PIECEWISE, OF_DRAFTS), (CUDAGraphMode.NONE, OF_DRAFTS)],
    ids=str,
)
def test_nothing_is_added_where_plain_steps_need_no_graphs_of_their_own(mode: CUDAGraphMode, num_tokens: int) -> None:
    stock, ours = manager(mode, num_tokens), manager(mode, num_tokens)
    capture_plain_step_graphs(ours)
    assert (ours._candidates, ours._capture_descs) == (stock._candidates, stock._capture_descs)


def test_a_runner_adds_them_before_anything_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for the profile by which vLLM reckons the memory of graphs."""
    runner: Any = object.__new__(BeamModelRunner)
    graphs = manager()
    runner.vllm_config, runner.attn_groups, runner.speculation = graphs.vllm_config, [], RunnerSpeculation()
    runner.device = torch.device("cuda")
    made = lambda runner, *_, **__: setattr(runner, "cudagraph_manager", graphs)  # noqa: E731
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", made)
    informed: list[BeamModelRunner] = []
    monkeypatch.setattr(layer_bytes, "set_measured_layer_bytes", informed.append)
    runner.initialize_kv_cache(None, is_profiling=True)
    assert informed == [runner], "builders know how large layers are"
    assert dispatched(graphs, 3).cg_mode == CUDAGraphMode.FULL
