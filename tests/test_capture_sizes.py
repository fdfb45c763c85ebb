"""Graphs are captured for steps as wide as the widest search that was asked for, unless a user says what to capture."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.support.engine import TRAINED_TARGET
from tests.support.graphs import as_on_a_gpu
from vllm_trie import plugin
from vllm_trie.capture_sizes import wider_capture_sizes

OWN = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM's, where nobody asks for others


def captured(max_beam_width: int | None, **options: Any) -> list[int]:
    """The sizes of an engine with 2,048 rows."""
    own = {} if max_beam_width is None else {"max_beam_width": max_beam_width}
    limits = {"max_num_seqs": 2048, "max_num_batched_tokens": 4096}
    engine_args = EngineArgs(str(TRAINED_TARGET), additional_config={"trie_beam": own}, **(limits | options))
    config = plugin._select_plugin(as_on_a_gpu, engine_args)
    sizes = [*config.compilation_config.cudagraph_capture_sizes]
    config._set_cudagraph_sizes()  # as vLLM does once more for the configuration of a draft model
    assert config.compilation_config.cudagraph_capture_sizes == sizes
    assert config.compilation_config.max_cudagraph_capture_size == sizes[-1]
    return sizes


@pytest.mark.parametrize(
    ("max_beam_width", "options", "further"),
    [
        (None, {}, []),
        (512, {}, []),
        (601, {}, [576, 608]),
        (601, {"max_num_seqs": 604}, [576, 604]),
        (601, {"max_num_seqs": 530}, [530]),
        (1500, {}, [576, 640, 704, 768, 832, 896, 960, 1024, 1152, 1280, 1408, 1504]),
    ],
)
def test_sizes_are_added_up_to_the_widest_search(
    warned: list[str], max_beam_width: int | None, options: dict[str, int], further: list[int]
) -> None:
    assert captured(max_beam_width, **options) == OWN + further
    assert warned == []


@pytest.mark.parametrize(
    "options",
    [
        {"cudagraph_capture_sizes": [8, 100]},
        {"compilation_config": {"cudagraph_capture_sizes": [8, 100]}},
        {"max_cudagraph_capture_size": 100},
        {"compilation_config": {"max_cudagraph_capture_size": 100}},
    ],
    ids=str,
)
def test_what_a_user_sets_is_left_alone_and_warned_of_where_searches_are_wider(
    warned: list[str], options: dict[str, Any]
) -> None:
    assert captured(90, **options)[-1] in (96, 100)
    assert captured(1000, **options)[-1] in (96, 100)
    assert len(warned) == 1
    assert "max_beam_width=1000, but steps of more than " in warned[0]


@pytest.mark.parametrize(
    ("max_beam_width", "max_num_seqs", "size"), [(90, 2048, 96), (1000, 2048, 1008), (1000, 500, 512)]
)
def test_whoever_does_as_the_warning_says_is_warned_no_more(
    warned: list[str], max_beam_width: int, max_num_seqs: int, size: int
) -> None:
    captured(max_beam_width, max_num_seqs=max_num_seqs, max_cudagraph_capture_size=80)
    assert len(warned) == 1
    assert f"raise max_cudagraph_capture_size to {size}, or add {size} to cudagraph_capture_sizes, or" in warned[0]
    for options in ({"max_cudagraph_capture_size": size}, {"cudagraph_capture_sizes": [8, size]}):
        assert captured(max_beam_width, max_num_seqs=max_num_seqs, **options)[-1] == size
    assert len(warned) == 1


def test_a_step_is_padded_by_an_eighth_at_most_and_few_graphs_are_added() -> None:
    sizes = wider_capture_sizes(512, 8192)
    assert len(sizes) == 32
    assert all(after - before <= before / 8 for before, after in zip([512, *sizes], sizes, strict=False))
    assert sizes[-1] == 8192


def test_graphs_of_no_size_stay_none() -> None:
    """As on a CPU."""
    options: dict[str, Any] = {"additional_config": {"trie_beam": {"max_beam_width": 600}}}
    config = EngineArgs(str(TRAINED_TARGET), max_num_seqs=1024, **options).create_engine_config()
    assert config.compilation_config.cudagraph_capture_sizes == []
