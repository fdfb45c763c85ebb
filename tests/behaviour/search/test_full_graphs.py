"""Steps of groups whose shared blocks are read once replay full CUDA graphs, and find what they find without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from tests.support.engine import Engine
from tests.support.flash_engine import flash_attention_on_cpu, full_graphs
from vllm_trie import beam_params
from vllm_trie.worker.attention import gpu_backend
from vllm_trie.worker.attention.shared_rows import SHARES_BLOCKS

pytestmark = pytest.mark.slow

SIZES, MOST_TOKENS, BOTH = [1, 2, 4, 8, 16], 8, CUDAGraphMode.FULL_AND_PIECEWISE
LONG, OTHER, SHORT = [*range(5, 80)], [*range(60, 130)], [7] * 40  # two blocks of 32 tokens and more, or one
DEMANDED = {"trie_beam": {"check_invariants": True, "shared_prefix_attention": "on"}}
Batch = list[tuple[list[int], int]]  # prompts, and beams of each; 0: an ordinary request


@pytest.fixture(scope="module")
def asked() -> Iterator[list[dict[str, Any]]]:
    with flash_attention_on_cpu() as asked:
        yield asked


@pytest.fixture(scope="module")
def engine(asked: list[dict[str, Any]], random_model: Callable[[str], Path]) -> Iterator[Engine]:
    engine = Engine(random_model("gqa"), additional_config=DEMANDED, enable_prefix_caching=False)
    yield engine
    engine.check_nothing_is_left()
    engine.close()


def answers(engine: Engine, batch: Batch) -> list[Any]:
    """Tokens and scores of all hypotheses."""
    ordinary = SamplingParams(temperature=0, max_tokens=MOST_TOKENS, ignore_eos=True, logprobs=0)
    params = [
        beam_params(width, n=width, max_tokens=MOST_TOKENS, ignore_eos=True) if width else ordinary
        for _, width in batch
    ]
    outputs = engine.generate([prompt for prompt, _ in batch], params)
    return [
        [(one.token_ids, pytest.approx(one.cumulative_logprob, abs=1e-4)) for one in out.outputs] for out in outputs
    ]


def replayed(
    manager: ModelCudaGraphManager, engine: Engine, batch: Batch
) -> tuple[list[Any], list[BatchExecutionDescriptor]]:
    """The same, and what the steps replayed."""
    graphs, dispatch = list[BatchExecutionDescriptor](), manager.dispatch

    def noted(*args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        graphs.append(dispatch(*args, **kwargs))
        return graphs[-1]

    with patch.object(manager, "dispatch", noted):
        return answers(engine, batch), graphs


BATCHES: dict[str, Batch] = {
    "one group": [(LONG, 4)],
    "as many rows as a graph has": [(LONG, 8)],
    "three groups": [(LONG, 4), (OTHER, 5), (SHORT, 2)],
    "with ordinary rows": [(SHORT, 0), (LONG, 3), (LONG, 0), (OTHER, 0), (OTHER, 4), (SHORT, 0)],
    "a group that shares nothing yet": [(LONG, 4), ([9, 8, 7], 3)],
}


@pytest.fixture(scope="module")
def plain(engine: Engine) -> dict[str, list[Any]]:
    """What is found without graphs."""
    return {name: answers(engine, batch) for name, batch in BATCHES.items()}


@pytest.mark.parametrize("mode", [BOTH, CUDAGraphMode.FULL_DECODE_ONLY])
def test_steady_steps_replay_full_graphs_and_find_the_same(
    engine: Engine, plain: dict[str, list[Any]], mode: CUDAGraphMode
) -> None:
    with full_graphs(engine, mode, SIZES) as manager:
        for name, batch in BATCHES.items():  # by the same graphs
            found, graphs = replayed(manager, engine, batch)
            assert found == plain[name], name
            prompts, first, *steady = graphs
            num_rows = sum(max(width, 1) for _, width in batch)
            assert {prompts.cg_mode, first.cg_mode} <= {mode.mixed_mode(), CUDAGraphMode.NONE, CUDAGraphMode.FULL}
            assert len(steady) == MOST_TOKENS - 2
            assert {(graph.cg_mode, graph.uniform_token_count) for graph in steady} == {
                (CUDAGraphMode.FULL, SHARES_BLOCKS)
            }, name
            (size,) = {graph.num_tokens for graph in steady}
            assert num_rows <= size < 2 * num_rows
        of_groups = [graph for graph in manager.graphs if graph.uniform_token_count == SHARES_BLOCKS]
        assert sorted(graph.num_tokens for graph in of_groups) == SIZES[1:]
        assert len(manager.graphs) == len(of_groups) + len(SIZES)


def test_ordinary_steps_replay_vllms_graphs(engine: Engine) -> None:
    batch: Batch = [(LONG, 0), (OTHER, 0), (LONG, 0)]
    expected = answers(engine, batch)
    with full_graphs(engine, BOTH, SIZES) as manager:
        for beams_first in (False, True):
            if beams_first:
                answers(engine, BATCHES["one group"])
            found, (prompts, *steady) = replayed(manager, engine, batch)
            assert found == expected
            assert prompts.cg_mode != CUDAGraphMode.FULL
            assert {(graph.cg_mode, graph.uniform_token_count) for graph in steady} == {(CUDAGraphMode.FULL, 1)}


def test_more_rows_or_groups_than_a_graph_has_replay_what_they_replayed(
    engine: Engine, plain: dict[str, list[Any]], asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with full_graphs(engine, BOTH, SIZES[:4]) as manager:
        found, graphs = replayed(manager, engine, BATCHES["three groups"])
        assert found == plain["three groups"]
        assert {graph.cg_mode for graph in graphs[2:]} == {CUDAGraphMode.NONE}
        assert [options["num_splits"] for options in asked[-2:]] == [0, 0], "so vLLM leaves it to FlashAttention, too"
    monkeypatch.setitem(gpu_backend.SEQUENCES_IN_GRAPHS, 3, 5)
    with full_graphs(engine, BOTH, SIZES) as manager:
        found, graphs = replayed(manager, engine, BATCHES["three groups"])
        assert found == plain["three groups"]
        assert {graph.cg_mode for graph in graphs} == {CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE}
        assert [options["num_splits"] for options in asked[-2:]] == [32, 32]
        found, graphs = replayed(manager, engine, BATCHES["with ordinary rows"])  # two groups
        assert found == plain["with ordinary rows"]
        assert graphs[-1].cg_mode == CUDAGraphMode.FULL


def test_shared_blocks_are_read_once_within_graphs(engine: Engine, asked: list[dict[str, Any]]) -> None:
    """Two calls a layer, the first one of as many sequences as the graph has, most of which have no queries."""
    with full_graphs(engine, BOTH, SIZES) as manager:
        answers(engine, [(LONG, 5), (SHORT, 0)])
        (graph,) = (graph for graph in manager.graphs.values() if graph.num_replays)
        assert graph.num_replays == MOST_TOKENS - 1
        prefix, suffix = asked[-2:]
    num_layers = engine.core.vllm_config.model_config.hf_config.num_hidden_layers
    of_steps = asked[-2 * num_layers * graph.num_replays :]
    assert [options["causal"] for options in of_steps] == [False, True] * num_layers * graph.num_replays
    most_splits = engine.core.vllm_config.attention_config.flash_attn_max_num_splits_for_cuda_graph
    for options in of_steps:
        assert options["scheduler_metadata"] is not None
        assert options["num_splits"] == most_splits > 0
    assert prefix["seqused_k"].tolist() == [64, *[0] * (gpu_backend.SEQUENCES_IN_GRAPHS[3] - 1)]
    assert prefix["cu_seqlens_q"].tolist() == [0, 5, *[6] * (gpu_backend.SEQUENCES_IN_GRAPHS[3] - 1)]
    assert suffix["seqused_k"].tolist() == [len(LONG) + MOST_TOKENS - 1 - 64] * 5 + [len(SHORT) + MOST_TOKENS - 1, 0, 0]


def test_windowed_layers_of_the_same_model_are_vllms(
    asked: list[dict[str, Any]], random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same graphs; vLLM then makes no schedule, as windows differ."""
    monkeypatch.setattr(gpu_backend, "LEAST_READ_AGAIN", 1)
    engine = Engine(random_model("gemma2"), enable_prefix_caching=False)
    plain = answers(engine, BATCHES["three groups"])
    with full_graphs(engine, BOTH, SIZES) as manager:
        found, (_, _, *steady) = replayed(manager, engine, BATCHES["three groups"])
        assert found == plain
        assert {(graph.cg_mode, graph.uniform_token_count) for graph in steady} == {(CUDAGraphMode.FULL, SHARES_BLOCKS)}
    of_steps, in_two = asked[-6 * (MOST_TOKENS - 2) :], [(False, None), (True, None)]
    calls = [(options["causal"], options.get("window_size")) for options in of_steps]
    window = [engine.core.vllm_config.model_config.get_sliding_window() - 1, 0]
    assert calls == [(True, window), *in_two] * (len(of_steps) // 3)
    assert {(options["scheduler_metadata"], options["num_splits"]) for options in of_steps} == {(None, 32)}
    engine.check_nothing_is_left()
    engine.close()
