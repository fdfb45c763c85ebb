"""No step of the search holds more memory than vLLM has seen while it measured what is left for the KV cache."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from benchmarks.memory_counter import MemoryCounter
from benchmarks.weightless import CATALOG, NOWHERE, WeightlessStep, kernels_noted, nowhere
from tests.worker.test_waits import RULES
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.search.constraints.catalog import ItemRules
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.filters import LogitsFilters
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import is_light
from vllm_trie.search.strategies.drawn import Drawn
from vllm_trie.search.strategies.sampled import SampledEach
from vllm_trie.search.strategies.stochastic import Stochastic
from vllm_trie.worker import runner as runner_module
from vllm_trie.worker.runner import BeamModelRunner
from vllm_trie.worker.widest_steps import ROWS, most_rows_together, take_widest_steps

WIDTH, VOCAB_SIZE, MOST_LOGPROBS = 15, 20_000, 20
CELLS = WIDTH * VOCAB_SIZE
MOST_CHILDREN = (VOCAB_SIZE,) * 9  # by depth, of a catalog
MOST_BYTES = 63  # per row and token; it may only fall
NUCLEUS = LogitsFilters(0.7, top_p=0.9)
PLAIN = RULES["plain"]
SEARCHES = RULES | {
    "drawn from a nucleus": PLAIN._replace(strategy=Drawn(False, 1, None, False), filters=NUCLEUS),
    "drawn with replacement": PLAIN._replace(strategy=Drawn(True, 1, None, False), filters=NUCLEUS),
    "stochastic": PLAIN._replace(strategy=Stochastic(), filters=NUCLEUS),
    "sampled from a nucleus": PLAIN._replace(strategy=SampledEach(), filters=NUCLEUS, is_controlled=True),
    "log-probabilities": PLAIN._replace(num_logprobs=MOST_LOGPROBS, is_controlled=True),
    "contrast": RULES["contrast"]._replace(filters=NUCLEUS, is_controlled=True, num_logprobs=MOST_LOGPROBS),
    "many stop tokens": PLAIN._replace(stops=Stops(tuple(range(9))), num_logprobs=MOST_LOGPROBS, is_controlled=True),
    "all tokens up to one, then a catalog": PLAIN._replace(constraints=(ItemRules(CATALOG, after=7),)),
    "several items": PLAIN._replace(constraints=(ItemRules(CATALOG, num_items=2),)),
    "items with log-probabilities": PLAIN._replace(constraints=(ItemRules(CATALOG),), num_logprobs=MOST_LOGPROBS),
    "items, renormalized": PLAIN._replace(constraints=(ItemRules(CATALOG, renormalizes=True),)),
    "before a catalog": PLAIN._replace(constraints=(ItemRules(CATALOG, after=7),), filters=NUCLEUS),
}


@cache
def profiled(num_rows: int = WIDTH) -> int:
    """Bytes that vLLM sees of batches of so many rows."""
    logits = nowhere(num_rows, VOCAB_SIZE, dtype=torch.bfloat16)
    with kernels_noted(), torch.inference_mode(), MemoryCounter() as counter:
        take_widest_steps(logits, WIDTH, MOST_LOGPROBS)
    return counter.most


@pytest.mark.parametrize("rules", SEARCHES.values(), ids=SEARCHES)
def test_no_search_holds_more_than_was_profiled(rules: SelectRules) -> None:
    with kernels_noted(), torch.inference_mode():
        step = WeightlessStep(rules._replace(width=WIDTH), 1, VOCAB_SIZE, most_children=MOST_CHILDREN)
        with MemoryCounter() as counter:
            step.sample(np.array([25]))
    assert 0 < counter.most <= profiled()


@pytest.mark.parametrize("constraints", [(), (ItemRules(CATALOG),)], ids=["plain", "along a catalog"])
def test_steps_of_many_beams_by_kernels_hold_little(constraints: tuple[ItemRules, ...]) -> None:
    width, rules = 500, PLAIN._replace(width=500, constraints=constraints)
    with kernels_noted() as noted, torch.inference_mode():
        step = WeightlessStep(rules, 1, VOCAB_SIZE, most_children=(8192,) * 3)
        with MemoryCounter() as counter:
            step.sample(np.array([25]))
    assert noted["_select_wide_items" if constraints else "_select_wide"].count == 1
    assert 0 < counter.most <= 0.2 * 2 * width * VOCAB_SIZE  # of the bytes of logits


@pytest.mark.parametrize("search", ["sampled from a nucleus", "stochastic", "drawn from a nucleus", "before a catalog"])
def test_searches_that_need_much_memory_share_it(search: str) -> None:
    """No more of them are selected together than vLLM has seen."""
    width, most = 16, dict[int, int]()
    for num_groups in (ROWS // width, 3 * ROWS // width):
        with kernels_noted(), torch.inference_mode():
            step = WeightlessStep(SEARCHES[search]._replace(width=width), num_groups, VOCAB_SIZE)
            with MemoryCounter() as counter:
                step.select(np.full(num_groups, 25))
        most[num_groups] = counter.most
    fewer, more = most.values()
    assert CELLS < more < 1.1 * fewer


def test_of_large_batches_little_is_set_aside() -> None:
    """The widest search, or 64 rows, decides what searches may need that need much."""
    assert profiled(20 * WIDTH) <= 14 * 20 * CELLS


@pytest.mark.parametrize("search", [name for name, rules in SEARCHES.items() if is_light(rules._replace(width=WIDTH))])
def test_no_large_batch_holds_more_than_was_profiled(search: str) -> None:
    """Of searches that are all selected together."""
    with kernels_noted(), torch.inference_mode():
        step = WeightlessStep(SEARCHES[search]._replace(width=WIDTH), 20, VOCAB_SIZE, most_children=MOST_CHILDREN)
        with MemoryCounter() as counter:
            step.select(np.full(20, 25))
    assert 0 < counter.most <= profiled(20 * WIDTH)


@pytest.mark.parametrize(("max_num_seqs", "max_beam_width", "most"), [(512, 8, 64), (512, None, 512), (512, 100, 100)])
def test_the_widest_search_decides(max_num_seqs: int, max_beam_width: int | None, most: int) -> None:
    options = {PLUGIN_NAME: {} if max_beam_width is None else {"max_beam_width": max_beam_width}}
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs), additional_config=options
    )
    assert most_rows_together(config) == most


def test_no_more_is_set_aside_than_today() -> None:
    assert profiled() <= MOST_BYTES * CELLS


@pytest.mark.parametrize("content", [0.0, float("nan")])
def test_the_widest_steps_can_be_taken(content: float) -> None:
    """Whatever the logits hold while vLLM measures: tensors with content must be read where they have some."""
    take_widest_steps(torch.full((3, 700), content, dtype=torch.bfloat16), 2, MOST_LOGPROBS)


def test_bytes_are_those_of_storages_that_are_held() -> None:
    with MemoryCounter() as counter:
        values = nowhere(1000)
        view = values[10:].view(2, -1)
        del values
        assert (counter.held, counter.most) == (8000, 8000)
        other = view.int()
        assert (counter.held, counter.most) == (8000 + 3960, 8000 + 3960)
        view.add_(1)
        del view, other
        assert (counter.held, counter.most) == (0, 8000 + 3960)


@pytest.mark.parametrize("device", [torch.device("cpu"), NOWHERE])
def test_steps_are_taken_where_vllm_profiles_a_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(GPUModelRunner, "_dummy_sampler_run", lambda *_: taken.append("vLLM's"))
    monkeypatch.setattr(runner_module, "take_widest_steps", lambda *arguments: taken.append(arguments))
    runner: Any = object.__new__(BeamModelRunner)
    runner.device, runner.model = device, SimpleNamespace(compute_logits=lambda states: states)
    runner.model_config, runner.most_together = SimpleNamespace(max_logprobs=7), 64
    runner._dummy_sampler_run("states")
    assert taken == ["vLLM's", *([("states", 64, 7)] if device == NOWHERE else [])]
