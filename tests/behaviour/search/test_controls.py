"""What acts on single hypotheses acts in the engine as in a plain loop: penalties, bans, stops, log-probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.support.cases import (
    COMMA,
    DOT,
    EOS,
    GRID,
    PENALTIES,
    Case,
    check,
    grid_of,
    num_changed,
    prompted,
    run,
    text_of,
)
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engines
from tests.support.loop import one_thread
from tests.support.reference import agree, transformers_beams
from tests.support.running import BYTES_PER_BLOCK, MOST_TIES, answers, prompt_of

pytestmark = pytest.mark.slow

MANY_STRINGS = tuple(" estia_(.rn")


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def controlled(model: Path) -> list[Case]:
    controls = ["none", *PENALTIES, "bias", "bans", "harsh bans"]
    stops = [(), (EOS,), (EOS, 83, 140, 248)]
    lengths = [1, BLOCK_SIZE - 4, BLOCK_SIZE + 9]
    cases = grid_of(0, controls=controls, stop_token_ids=stops, prompt_length=lengths)
    return prompted([*cases, *(Case(8, s, controls="all", stop_token_ids=(EOS,)) for s in GRID["semantics"])], model)


@one_thread()
def test_the_loop_without_controls_is_transformers(model: Path) -> None:
    cases = [Case(b, "hf", e, stop_token_ids=(EOS,)) for b in GRID["beam_width"] for e in GRID["early_stopping"]]
    num_same = 0
    for case in prompted(cases, model):
        b, early = case.beam_width, case.early_stopping
        theirs = transformers_beams(model, [*case.prompt], b, b, case.max_tokens, early_stopping=early)
        num_same += agree([*case.found()], theirs)
    assert num_same >= (1 - MOST_TIES) * len(cases)


@pytest.mark.nightly
def test_controlled_beams_are_the_loops_and_disturb_nobody(
    engines: Engines, model: Path, controlled: list[Case]
) -> None:
    for name in {case.controls for case in controlled} - {"none"}:
        assert num_changed([case for case in controlled if case.controls == name], controls="none"), name
    assert num_changed(controlled, stop_token_ids=()) > len(controlled) // 4, "stop tokens must really occur"
    run(engines(model), controlled)


@pytest.mark.parametrize("semantics", GRID["semantics"])
def test_where_bans_leave_fewer_hypotheses_the_others_come_back_empty(
    engines: Engines, model: Path, semantics: str
) -> None:
    some = partial(Case, 5, semantics, stop_token_ids=(EOS,), logprobs=2)
    few = {some(controls="one token"): 1, some(controls="EOS"): 1, some(controls="EOS", min_tokens=2): 0}
    few |= {some(controls="one token or EOS", max_tokens=3): 4, some(controls="harsh bans", max_tokens=1): 4}
    cases = prompted([*few], model)
    assert [len(case.found()) for case in cases] == [*few.values()]
    run(engines(model), cases)


@pytest.mark.nightly
def test_without_histories_of_their_own_beams_are_penalised_wrongly(
    engines: Engines, model: Path, controlled: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, params = [[*case.prompt] for case in controlled], [case.params() for case in controlled]
    right = answers(engines(model).generate(prompts, params))
    monkeypatch.setattr("vllm_trie.worker.rows.rows.Rows._reorder_controls", lambda *_: None)
    wrong = answers(engines(model).generate(prompts, params))
    differing = {case.controls for case, a, b in zip(controlled, right, wrong, strict=True) if a != b}
    assert len(differing) > len(PENALTIES) // 2
    assert differing <= PENALTIES.keys()


def test_groups_that_wait_or_start_anew_keep_their_penalties(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = partial(Case, max_tokens=64, prompt_length=40)
    first = some(6, controls="less frequency", prompt_length=2 * BLOCK_SIZE - 6)  # forks full blocks before it waits
    others = [some(4, prompt_length=30), some(6, "vllm", controls="penalties"), some(5, controls="all")]
    cases = prompted([first, *others], model)
    prompts = [prompt_of(440), *([*case.prompt] for case in cases)]
    params = [SamplingParams(temperature=0, max_tokens=2), *(case.params() for case in cases)]
    roomy = answers(engines(model).generate(prompts, params))
    limits = {"max_num_seqs": 24, "max_num_batched_tokens": 24, "kv_cache_memory_bytes": 29 * BYTES_PER_BLOCK}
    engine = engines(model, long_prefill_token_threshold=16, **limits)  # the long prompt takes all that rows leave
    scheduler, preempted = type(engine.scheduler), []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k)))
    engine.watched.restart()
    outputs = engine.generate(prompts, params)
    assert max(engine.watched.waiting) > 1, "no group had to wait"
    assert preempted, "no group had to start anew"
    assert [[t for t, _ in output] for output in answers(outputs)] == [[t for t, _ in output] for output in roomy]
    for case, output in zip(cases, outputs[1:], strict=True):
        check(case, output.outputs)


@pytest.mark.nightly
def test_bad_words_and_stop_strings_of_the_trained_model_are_the_loops(engines: Engines) -> None:
    texts = {"stop": [(), ("):\n",), ("self.", "f(x", "t(s"), ("\n", "e(", "return", ", ")]}
    texts |= {"include_stop_str_in_output": [False, True], "bad_words": [(), ("self",), ("self.__class__", "return")]}
    tokens = {"stop_token_ids": [(), (COMMA, DOT)], "ignore_eos": [False, True]}
    cases = grid_of(0, controls=["none", "penalties", "all"], **texts, **tokens)
    ignored_eos = Case(5, "vllm", length_penalty=2.0, controls="one token or EOS", max_tokens=3, prompt_length=2)
    cases = prompted([*cases, ignored_eos, Case(8, stop=("elf", "):\n"))])
    assert num_changed([case for case in cases if case.bad_words], bad_words=()) > 3
    stopped = [[f for f in case.found() if isinstance(f.stopped_by, str)] for case in cases]
    together = [len(found) - len({len(f.token_ids) for f in found}) for found in stopped]
    assert sum(map(bool, together)) > 3, "several beams must stop in one step"
    across = [f for f in itertools.chain(*stopped) if not any(f.stopped_by in text_of([t]) for t in f.token_ids)]
    assert len(across) > 2, "strings must lie across tokens"
    run(engines(TRAINED_TARGET), cases)


@pytest.mark.parametrize("logprobs", [None, pytest.param(1, marks=pytest.mark.nightly)])
def test_more_candidates_than_beams_may_stop_at_once(engines: Engines, logprobs: int | None) -> None:
    grid = itertools.product([1, 2, 5], GRID["semantics"], [1.0, 5.0])
    cases = [Case(b, s, "never" if s == "hf" else False, lp, stop=MANY_STRINGS, max_tokens=8) for b, s, lp in grid]
    run(engines(TRAINED_TARGET), prompted([replace(case, logprobs=logprobs) for case in cases]))
