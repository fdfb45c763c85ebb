"""A whole search through the kernels finds what it finds through their references."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.reference import agree, engine_answers, transformers_beams
from tests.support.sweep import sweep
from tests.support.taken_again import ReplayedSteps, TakenAgain, copies_made
from vllm_trie import beam_params
from vllm_trie.search.step_result import PackedSearchStep
from vllm_trie.worker import launches
from vllm_trie.worker.kernels import TakeStep, in_groups, step
from vllm_trie.worker.select.selection_graphs import SelectionGraphs

pytestmark = pytest.mark.slow

MAX_TOKENS = 10  # from a partly filled block over its end into the next
WIDTHS = (3, 2)
FEW_TOKENS = 3


def through_kernels(monkeypatch: pytest.MonkeyPatch) -> list[type[TakeStep]]:
    """Let kernels do the work. Returns the kinds of the steps that they take from then on."""
    taken = list[type[TakeStep]]()
    for kind in (step.KernelStep, in_groups.KernelStepInGroups):

        def noted(one: TakeStep, *args: Any, take: Any = kind.__call__) -> PackedSearchStep:
            taken.append(type(one))
            return take(one, *args)

        monkeypatch.setattr(kind, "__call__", noted)
    monkeypatch.setattr(launches, "worker_runs_kernels_on", lambda _: True)
    return taken


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["gqa", "gemma2"])
def test_search_through_kernels_finds_the_beams_of_transformers(
    engines: Engines, random_model: Callable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = random_model(kind)
    prompts = [list(range(2, 2 + BLOCK_SIZE - 4 + at)) for at in range(len(WIDTHS))]
    params = [beam_params(width, n=width, max_tokens=MAX_TOKENS) for width in WIDTHS]
    taken = through_kernels(monkeypatch)
    outputs = engines(model).generate(
        [*prompts, prompts[0]], [*params, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)]
    )
    assert len(taken) == len(WIDTHS) * MAX_TOKENS
    for prompt, width, output in zip(prompts, WIDTHS, outputs, strict=False):
        theirs = transformers_beams(model, prompt, width, width, MAX_TOKENS, length_penalty=1.0, eos_token_id=1)
        assert agree(engine_answers(output, 1.0), theirs)


@pytest.mark.parametrize("options", sweep({"by kernels": {}, "by torch": {"top_p": 0.9}}, "by torch"))
def test_searches_by_graphs_of_steps_find_what_they_find_without(
    engines: Engines, random_model: Callable, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Some at a time, in a batch with ordinary requests, the second time in another order."""
    engine = engines(random_model("gqa"))
    prompts = [list(range(2, 2 + BLOCK_SIZE - 4 + at)) for at in range(len(WIDTHS))]
    params = [beam_params(width, n=width, max_tokens=FEW_TOKENS, ignore_eos=True, **options) for width in WIDTHS]
    requests = [*zip(prompts, params, strict=True), (prompts[0], SamplingParams(temperature=0, max_tokens=FEW_TOKENS))]
    through_kernels(monkeypatch)

    def found(order: slice) -> list[tuple[list[tuple[int, ...]], float | None]]:
        outputs = engine.generate(*map(list, zip(*requests[order], strict=True)))[order]
        hypotheses = [[tuple(one.token_ids) for one in output.outputs] for output in outputs]
        return [*zip(hypotheses, [output.outputs[0].cumulative_logprob for output in outputs], strict=True)]

    expected, runner = found(slice(None)), engine.runner
    selector, on_gpu = runner.selector, runner.device.type == "cuda"
    captures = ReplayedSteps([runner.output_copy_stream]) if on_gpu else TakenAgain()
    graphs = SelectionGraphs(runner.rows, torch.float32, captures, 1 << 20)
    for name, value in (("graphs", graphs), ("begin_step", graphs.begin_step)):
        monkeypatch.setattr(selector, name, value)
    with nullcontext() if on_gpu else copies_made():
        for order in (slice(None), slice(None, None, -1), slice(None)):
            assert found(order) == expected
    assert captures.count == 3 * len(WIDTHS)  # the first step of each, the others, and the last one
    assert captures.replays >= captures.count


@pytest.mark.parametrize(
    "options",
    [
        {"min_tokens": 2, "repetition_penalty": 1.3},
        {"allowed_sequences": [[4, 5], [4, 6, 7], [8, 5, 9], [8, 6, 3]], "logprobs": None},
        {"semantics": "vllm", "stop_token_ids": [3], "ignore_eos": True},  # of several vLLM 0.33 has rules of its own
        {"num_beam_groups": 2, "diversity_penalty": 0.7, "temperature": 0.6, "min_p": 0.01, "logprobs": None},
    ],
    ids=["controlled", "along a catalog", "by the rules of vLLM", "in groups of beams"],
)
def test_kernels_find_what_torch_finds(
    engines: Engines, random_model: Callable, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    engine, prompt = engines(random_model("gqa")), list(range(2, BLOCK_SIZE))
    params = beam_params(2, n=2, **({"max_tokens": FEW_TOKENS, "logprobs": 2} | options))
    taken = through_kernels(monkeypatch)
    with monkeypatch.context() as by_torch:  # also where there is a GPU
        by_torch.setattr(launches, "worker_runs_kernels_on", lambda _: False)
        (expected,) = engine.generate([prompt], [params])
    assert not taken
    (found,) = engine.generate([prompt], [params])
    assert len(taken) == FEW_TOKENS
    for own, theirs in zip(found.outputs, expected.outputs, strict=True):
        assert own.token_ids == theirs.token_ids
        assert own.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-5)
        for of_own, of_theirs in zip(own.logprobs or (), theirs.logprobs or (), strict=True):
            assert {token: (one.rank, pytest.approx(one.logprob, abs=1e-5)) for token, one in of_own.items()} == {
                token: (one.rank, one.logprob) for token, one in of_theirs.items()
            }
