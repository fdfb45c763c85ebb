"""Searches with `catalog_renormalize` find from the logits of a level what they find from all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from vllm import SamplingParams

from tests.golden import model as hashed
from tests.support.engine import Engine, Engines
from tests.support.items import random_items
from tests.support.running import prompt_of
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.worker import launches
from vllm_trie.worker.kernels import step
from vllm_trie.worker.select import narrow
from vllm_trie.worker.select.narrow import NarrowSelectionHead, SelectionLogits

pytestmark = pytest.mark.slow

VOCAB_SIZE, WIDTH = 300, 6
ITEMS = [  # with other tokens at each depth
    [50 * depth + token for depth, token in enumerate(item)] for item in random_items(300, [4], tokens=(2, 40))
]
ALONG = beam_params(WIDTH, n=WIDTH, allowed_sequences=ITEMS, catalog_renormalize=True, length_penalty=0.0, max_tokens=6)
BEAMS = beam_params(3, n=3, max_tokens=7, repetition_penalty=1.2)  # whose logits are processed
ORDINARY = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
MIXED = [ORDINARY, ALONG, BEAMS, ALONG, ORDINARY]

Found = list[list[tuple[list[int], float]]]


def found_one_after_another(engine: Engine, params: Sequence[Any]) -> Found:
    """What requests find that come one in each step of the engine: so searches are at different depths."""
    core, done = engine.llm.llm_engine, dict[str, Any]()
    for number, one in enumerate(params):
        core.add_request(str(number), {"prompt_token_ids": prompt_of(20 + number, number)}, one.clone())
        done |= {output.request_id: output for output in core.step() if output.finished}
    while core.has_unfinished_requests():
        done |= {output.request_id: output for output in core.step() if output.finished}
    return [
        [([*one.token_ids], one.cumulative_logprob) for one in done[str(number)].outputs]
        for number in range(len(params))
    ]


def projected(monkeypatch: pytest.MonkeyPatch) -> list[SelectionLogits]:
    """The logits of steps, from now on, of which some rows have few."""
    steps, project = list[SelectionLogits](), NarrowSelectionHead.project

    def noted(head: NarrowSelectionHead, *args: Any) -> SelectionLogits:
        steps.append(project(head, *args))
        return steps[-1]

    monkeypatch.setattr(NarrowSelectionHead, "project", noted)
    return steps


def check_alike(found: Found, expected: Found) -> None:
    for own, theirs in zip(found, expected, strict=True):
        assert [tokens for tokens, _ in own] == [tokens for tokens, _ in theirs]
        assert [score for _, score in own] == pytest.approx([score for _, score in theirs], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "kind", sweep(["gqa", "gemma2"], "gemma2")
)  # of which one has its head alone, and one ties and caps it
@pytest.mark.parametrize(
    "by_kernels", [pytest.param(False, id="torch"), pytest.param(True, id="kernels", marks=pytest.mark.nightly)]
)
def test_a_batch_of_all_kinds_of_requests_finds_what_all_logits_find(
    engines: Engines,
    random_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    by_kernels: bool,
) -> None:
    engine, steps = engines(random_model(kind)), projected(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.narrow_head, "_most", 0)
        expected = found_one_after_another(engine, MIXED)
    assert not steps
    if by_kernels:
        monkeypatch.setattr(launches, "worker_runs_kernels_on", lambda _: True)
    with mock.patch.object(step, "kernel_level_of", wraps=step.kernel_level_of) as by_kernel:
        found = found_one_after_another(engine, MIXED)
    check_alike(found, expected)
    # Two searches take four steps each, and one that is scheduled before it is known that they are over.
    assert [len(one.narrow) for one in steps] == [1, 1, 2, 2, 2, 1, 1]
    at_two_depths = [logits.values for logits in steps[3].narrow]
    assert {(len(values), values.shape[1]) for values in at_two_depths} == {(WIDTH, 64)}
    assert not steps[3].narrow[0].tokens.equal(steps[3].narrow[1].tokens)
    assert all(len(one.whole) <= 2 + 3 for one in steps), "of the ordinary request's and the plain beams' rows"
    levels = [call.args[0].level for call in by_kernel.call_args_list]
    assert len(levels) == (sum(len(one.narrow) for one in steps) if by_kernels else 0)
    assert all(level is not None for level in levels)


def test_a_search_alone_computes_no_other_logits(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, steps = engines(random_model("gqa")), projected(monkeypatch)
    found_one_after_another(engine, [ALONG])
    assert [tuple(one.whole.shape) for one in steps] == [(0, VOCAB_SIZE)] * 5


@pytest.mark.parametrize(
    "options",
    [{"catalog_renormalize": False}, {"catalog_stop": True}, {"catalog_items": 2}, {"logit_bias": {5: 1.0}}, {}],
    ids=["not renormalised", "stop tokens", "two items", "a bias", "many tokens"],
)
def test_other_searches_compute_all_logits(
    engines: Engines, random_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    engine, steps = engines(random_model("gqa")), projected(monkeypatch)
    items = ITEMS if options else [[token, 5] for token in range(2, 3 + VOCAB_SIZE // narrow.PARTS)]
    asked = {"allowed_sequences": items, "catalog_renormalize": True, "max_tokens": 9} | options
    (found,) = found_one_after_another(engine, [beam_params(2, n=2, **asked)])
    assert len(found) == 2
    assert not steps


def test_a_model_without_a_head_of_vllms_is_searched_by_all_logits_and_the_log_says_so_once(
    engines: Engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    monkeypatch.setattr(narrow.logger, "info", lambda text, *args: said.append(text % args))
    engine = engines(hashed.make(tmp_path / "target"), load_format="dummy")
    steps = projected(monkeypatch)
    first, second = (found_one_after_another(engine, [ALONG]) for _ in range(2))
    assert first == second
    assert {tuple(tokens) for tokens, _ in first[0]} <= {tuple(item) for item in ITEMS}
    assert not steps
    assert len(said) == 1
    assert said[0].endswith("the model has 0 layers that compute logits, not one")
