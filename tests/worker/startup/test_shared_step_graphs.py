"""Which full CUDA graphs of steps that read shared blocks once are captured, and which steps vLLM replays them for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu import cudagraph_utils
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.support.engine import TRAINED_TARGET
from tests.support.graphs import as_on_a_gpu
from tests.support.recorded_graphs import recorded_graphs
from vllm_trie.capture_sizes import add_capture_sizes
from vllm_trie.worker import launches
from vllm_trie.worker import runner as runner_module
from vllm_trie.worker.announce_shared_rows import runner_reads_shared_blocks_once
from vllm_trie.worker.attention import gpu_backend
from vllm_trie.worker.attention.gpu_backend import LEAST_READ_AGAIN, SharedPrefixAttentionBuilder
from vllm_trie.worker.attention.shared_rows import SHARES_BLOCKS
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.startup import layer_bytes, plain_step_graphs, shared_step_graphs
from vllm_trie.worker.startup.shared_step_graphs import PER_DOUBLING, capture_shared_step_graphs, shared_step_sizes

BOTH, MOST_ROWS = CUDAGraphMode.FULL_AND_PIECEWISE, 512
BYTES_PER_TOKEN = 4096
UNIFORM = AttentionCGSupport.UNIFORM_BATCH


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: stage)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda _: None)


def builder_of(
    version: int | None = 3,
    option: str = "auto",
    splits: bool = True,
    length: int = 2048,
    support: AttentionCGSupport = AttentionCGSupport.ALWAYS,
    **others: Any,
) -> Any:
    """Of layers of this version of FlashAttention, in an engine of sequences of so many tokens."""
    builder = object.__new__(SharedPrefixAttentionBuilder)
    known: dict[str, Any] = {
        "option": option,
        "splits": splits,
        "takes_trees": True,
        "graphs": None,
        "_cudagraph_support": support,
        "_layers": [SimpleNamespace(vllm_flash_attn_version=version)],
        "kv_cache_spec": SimpleNamespace(page_size_bytes=16 * BYTES_PER_TOKEN),
        "block_size": 16,
        "model_config": SimpleNamespace(max_model_len=length),
        "compilation_config": SimpleNamespace(cudagraph_mode=BOTH),
        "device": torch.device("cpu"),
        "aot_schedule": version == 3,
    }
    vars(builder).update(known | others)
    return builder


def runner_of(
    *builders: Any, mode: CUDAGraphMode = BOTH, width: int | None = None, num_tokens: int = 1, **options: Any
) -> Any:
    """As far as graphs know it, after everything is captured; decoding steps have `num_tokens` a row at most."""
    plugin = {"trie_beam": {} if width is None else {"max_beam_width": width}}
    engine_args = EngineArgs(str(TRAINED_TARGET), additional_config=plugin, **({"max_num_seqs": MOST_ROWS} | options))
    config = as_on_a_gpu(engine_args, mode)
    add_capture_sizes(config)
    manager = ModelCudaGraphManager(config, torch.device("cpu"), mode, decode_query_len=num_tokens)
    manager._graphs_captured = True
    groups = [SimpleNamespace(get_metadata_builder=lambda _, own=builder: own) for builder in builders]
    of_runner = {"vllm_config": config, "max_num_reqs": config.scheduler_config.max_num_seqs}
    of_runner |= {"dp_size": 1, "use_pp": False}
    return SimpleNamespace(cudagraph_manager=manager, attn_groups=[[group] for group in groups], **of_runner)


def test_a_runner_on_a_gpu_lists_them_when_its_kv_cache_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache", lambda *_, **__: None)
    monkeypatch.setattr(launches, "worker_runs_kernels_on", lambda _: True)
    for module, name in (
        (runner_module, "check_demanded_attention_layers"),
        (layer_bytes, "set_measured_layer_bytes"),
        (plain_step_graphs, "capture_plain_step_graphs"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    runner: Any = object.__new__(BeamModelRunner)
    parts = vars(runner_of(builder_of(length=4096)))
    parallel = parts["vllm_config"].parallel_config
    vars(runner).update(parts, parallel_config=parallel, device=torch.device("cpu"))
    runner.initialize_kv_cache(is_profiling=True)
    assert len(captured(runner)) == 19


def captured(runner: Any) -> list[BatchExecutionDescriptor]:
    graphs = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    return [graph for graph in graphs if graph.uniform_token_count == SHARES_BLOCKS]


def test_shared_steps_replay_them_and_all_others_what_they_replayed() -> None:
    stock, ours = runner_of().cudagraph_manager, runner_of(builder_of(length=4096))
    capture_shared_step_graphs(ours)
    least, manager = LEAST_READ_AGAIN // BYTES_PER_TOKEN // 4096 + 1, ours.cudagraph_manager
    for num_rows in range(least, MOST_ROWS + 1):
        graph = manager.dispatch(num_rows, num_rows, SHARES_BLOCKS, 0, max_query_len=1)
        assert graph in captured(ours)
        assert graph.num_reqs == graph.num_tokens
        assert num_rows <= graph.num_tokens <= max(num_rows * 1.25 + 8, 16)
    for num_rows, of_row in product(range(1, MOST_ROWS + 50), (None, 1, 2)):
        for longest in (None, 1, 2, 300):
            shape = num_rows, num_rows * (of_row or 1), of_row, 0, longest
            assert manager.dispatch(*shape) == stock.dispatch(*shape)
    for longest in (None, 2):  # rows that share blocks in a batch with prompts
        graph = manager.dispatch(20, 40, SHARES_BLOCKS, 0, max_query_len=longest)
        assert graph == stock.dispatch(20, 40, None, 0, max_query_len=longest)
        assert graph.cg_mode == CUDAGraphMode.PIECEWISE
    assert manager.dispatch(600, 600, SHARES_BLOCKS, 0, max_query_len=1).cg_mode == CUDAGraphMode.NONE


@pytest.mark.parametrize(
    ("width", "length", "most", "sizes"),
    [
        (None, 4096, 512, [16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512]),
        (100, 1024, 512, [40, 48, 56, 64, 80, 88, 104, 128, 152, 176, 200, 256, 304, 352, 400, 512]),
        (
            1024,
            1024,
            1024,
            [40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024],
        ),
        (None, 16, 512, []),
    ],
)
def test_they_are_few_for_searches_as_wide_as_are_allowed(
    width: int | None, length: int, most: int, sizes: list[int]
) -> None:
    """From the width on for which it can pay to read shared blocks once, in as long sequences as there may be."""
    runner = runner_of(builder_of(length=length), width=width, max_num_seqs=most)
    stock = len(runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL])
    capture_shared_step_graphs(runner)
    assert [graph.num_tokens for graph in captured(runner)][::-1] == sizes
    assert len(runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]) == stock + len(sizes)


@pytest.mark.parametrize(("width", "least"), [(None, 1), (7, 1), (64, 9), (300, 33), (512, 2)])
def test_a_doubling_has_few(width: int | None, least: int) -> None:
    vllms = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    sizes = shared_step_sizes(vllms, least, width)
    assert set(sizes) <= set(vllms)
    assert sizes[-1] == 512
    assert sizes[0] == next(size for size in vllms if size >= least)
    for size in sizes:
        assert sum(size < other <= 2 * size for other in sizes) <= PER_DOUBLING + 1
    if width is not None:
        for multiple in (width, 2 * width, 3 * width, 4 * width):
            fitting = next((size for size in vllms if size >= max(multiple, least)), None)
            assert multiple > 512 or fitting in sizes


def test_the_widest_come_first_and_vllm_reckons_with_their_memory() -> None:
    """The first one allocates hidden states for all, and vLLM counts what is listed by what the first two take."""
    runner = runner_of(builder_of(), max_num_seqs=100)
    capture_shared_step_graphs(runner)
    listed = runner.cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    assert listed[0] == captured(runner)[0]
    assert listed[0].num_tokens == 100
    sizes = [graph.num_tokens for graph in listed]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(listed)) == len(listed)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log says, each thing once."""
    texts = list[str]()
    logger = SimpleNamespace(info_once=lambda text, *values: texts.append(text % values))
    monkeypatch.setattr(shared_step_graphs, "logger", logger)
    return texts


@pytest.mark.parametrize(
    ("builder", "runner", "reason"),
    [
        ({"version": None}, {}, "FlashAttention None computes them"),
        (
            {"version": 4, "support": UNIFORM},
            {},
            "this vLLM captures FlashAttention 4 for equal numbers of queries alone",
        ),
        ({"splits": False, "option": "on"}, {}, "Triton kernels read them"),
        ({}, {"mode": CUDAGraphMode.PIECEWISE}, "cudagraph_mode=PIECEWISE has no full graphs of decoding steps"),
        ({}, {"num_tokens": 3}, "rows of decoding steps may have several tokens"),
        ({}, {"lora_config": SimpleNamespace()}, "rows may have LoRA adapters"),
        ({}, {"dp_size": 2}, "data-parallel ranks"),
        ({}, {"use_pp": True}, "pipeline stages"),
        ({"version": 4, "aot_schedule": True}, {}, "vLLM schedules for FlashAttention 3, but version 4 computes them"),
        ({"length": 16}, {}, "it pays off from 2049 rows on, but graphs have at most 512"),
        ({"length": 1 << 29}, {}, "it pays off from 2 rows on, but graphs have at most 1"),
    ],
    ids=str,
)
def test_else_shared_steps_replay_piecewise_graphs_as_the_log_says(
    said: list[str], builder: dict[str, Any], runner: dict[str, Any], reason: str
) -> None:
    ours = builder_of(**builder)
    of_runner = {name: runner[name] for name in ("dp_size", "use_pp") if name in runner}
    made = runner_of(ours, **{name: runner[name] for name in ("mode", "num_tokens") if name in runner})
    made.vllm_config.lora_config = runner.get("lora_config")
    vars(made).update(of_runner)
    before = repr((made.cudagraph_manager._candidates, made.cudagraph_manager._capture_descs))
    capture_shared_step_graphs(made)
    assert len(said) == 1
    assert said[0].startswith(f"steps that read shared blocks once replay piecewise CUDA graphs: {reason}")
    assert repr((made.cudagraph_manager._candidates, made.cudagraph_manager._capture_descs)) == before
    assert ours.graphs is None


@pytest.mark.parametrize("builder", [{"option": "off"}, {"splits": False}], ids=str)
def test_nothing_is_said_where_no_layer_reads_shared_blocks_once(said: list[str], builder: dict[str, Any]) -> None:
    made = runner_of(builder_of(**builder))
    capture_shared_step_graphs(made)
    assert said == []
    assert type(made.cudagraph_manager) is ModelCudaGraphManager


def test_the_log_says_how_many_more_are_captured(said: list[str]) -> None:
    runner = runner_of(
        builder_of(length=4096), builder_of(version=2, length=4096, support=UNIFORM), builder_of(splits=False)
    )
    capture_shared_step_graphs(runner)
    assert said == [
        "captures 19 more CUDA graphs, for steps of 16 to 512 rows that read the shared blocks of up to 7 groups once"
    ]


def test_builders_are_told_of_shared_steps_alone_when_their_graphs_are_captured() -> None:
    builder, events = builder_of(), list[Any]()
    runner = runner_of(builder, max_num_seqs=64)
    capture_shared_step_graphs(runner)
    builder.announce = lambda groups: events.append((groups, "announced"))

    def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
        events.append(desc)
        return lambda _: None

    manager, after = runner.cudagraph_manager, ((), "announced")
    with recorded_graphs():
        super(ModelCudaGraphManager, manager).capture(create)
    full = [graph for graph in events if graph != after and graph.cg_mode == CUDAGraphMode.FULL]
    assert len(full) == 2 * len(manager.graphs)
    for ahead, graph in zip([None, *events], events, strict=False):
        if graph != after:
            assert (ahead == after) == (graph.uniform_token_count == SHARES_BLOCKS)
    assert events.count(after) == 2 * len(captured(runner))


def test_runners_ask_for_them_where_all_layers_are_in_them() -> None:
    """With as many groups as graphs have, whatever else a step is: vLLM looks for a graph by its rows."""
    of_all, windowed = builder_of(option="on"), builder_of(splits=False)
    windowed.takes_trees = False
    runner = runner_of(of_all, windowed)
    sharing = [(4, [64, 64])]
    assert runner_reads_shared_blocks_once(runner, sharing, 4) == (True, None)
    capture_shared_step_graphs(runner)
    assert runner_reads_shared_blocks_once(runner, sharing, 4) == (True, SHARES_BLOCKS)
    assert runner_reads_shared_blocks_once(runner, sharing * 127, 508) == (True, SHARES_BLOCKS)
    assert runner_reads_shared_blocks_once(runner, sharing * 128, 512) == (True, None)
    assert runner_reads_shared_blocks_once(runner, sharing * 127 + [(4, [0, 64])], 512) == (True, SHARES_BLOCKS)
    assert runner_reads_shared_blocks_once(runner, [(4, [0, 64])], 4) == (False, None)
    assert runner_reads_shared_blocks_once(runner, [], 4) == (False, None)
    assert runner_reads_shared_blocks_once(runner, sharing, 0) == (True, None), "with a prompt in the step"


def test_where_a_graph_holds_a_step_the_host_costs_nothing() -> None:
    """Reading shared blocks once pays however small layers are, if it spares more than a further call takes."""
    enough = LEAST_READ_AGAIN // BYTES_PER_TOKEN // 32
    for builder, most_groups in ((builder_of(), 127), (builder_of(version=2), 7)):
        assert builder.takes([(33, enough)], 33) == [False]
        assert builder.capture_in_graphs([16, 64]) == most_groups
        assert builder.takes([(33, enough), (4, 0)], 37) == [True, False]
        assert builder.takes([(33, enough), (4, 0)], 0) == [False, False], "with a prompt nothing is in a graph"
        assert builder.takes([(33, enough - 16)], 33) == [False]
        assert builder.takes([(65, enough)], 65) == [False], "more rows than a graph has"
        assert builder.takes([(33, enough)], 64) == [True]
        assert builder.takes([(33, enough)], 65) == [False], "others in the batch have no place in a graph"
        assert builder.takes([(2, 8 * enough)] * 7, 14) == [True] * 7
        assert builder.takes([(2, 8 * enough)] * 8, 16) == [most_groups > 8] * 8


def test_parts_of_keys_have_no_more_outputs_than_in_vllms_widest_step() -> None:
    """FlashAttention allocates outputs of every part; for 5,000 rows of 32 heads of 128, 32 parts have 2.6 GB."""
    most, queries = 32, gpu_backend.SPLIT_QUERIES
    for num_queries in (1, 5, queries, queries + 1, 992, 5008, 100_000):
        splits = gpu_backend._splits_within_memory(most, num_queries)
        assert splits == most or splits == 1 or splits * num_queries <= most * queries < (splits + 1) * num_queries
        assert (splits == most) == (num_queries <= queries)
    assert gpu_backend._splits_within_memory(0, 5008) == 0, "FlashAttention chooses"
