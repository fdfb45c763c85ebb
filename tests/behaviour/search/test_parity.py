"""The engine's beams are transformers' beams: tokens, order and scores of all n hypotheses."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from allpairspy import AllPairs
from vllm import SamplingParams

from tests.support.cases import LENGTH_PENALTIES
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engines
from tests.support.reference import (
    Answer,
    agree,
    engine_answers,
    is_greedy,
    transformers_beams,
    transformers_one_beam,
)
from tests.support.running import MOST_TIES, trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTHS = [1, 2, 3, 5, 8, 15]
EARLY_STOPPING = [False, True, "never"]
EOS_OCCURS = [True, False]
PROMPT_LENGTHS = [1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 5]
MAX_TOKENS = 3 * BLOCK_SIZE + 4  # crosses at least three block boundaries


@dataclass(frozen=True)
class Case:
    width: int
    length_penalty: float
    early_stopping: bool | str
    eos_occurs: bool
    prompt_length: int

    def prompt(self, vocab_size: int) -> list[int]:
        shuffled = random.Random(repr(self))
        return [shuffled.randrange(2, vocab_size) for _ in range(self.prompt_length)]

    def params(self) -> SamplingParams:
        return beam_params(
            self.width,
            n=self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=not self.eos_occurs,
            max_tokens=MAX_TOKENS,
        )


GRID = [WIDTHS, LENGTH_PENALTIES, EARLY_STOPPING, EOS_OCCURS, PROMPT_LENGTHS]
CASES = [Case(*values) for values in AllPairs(GRID)]  # every pair of values at least once
MORE_CASES = CASES + random.Random(0).sample([Case(*values) for values in itertools.product(*GRID)], 25)
OF_TRAINED = CASES[::2]
PROMPTS = trained_prompts([case.prompt_length for case in OF_TRAINED])


def run_cases(engine, cases: list[Case], prompts: list[list[int]]) -> tuple[list, list]:
    """All cases in one batch, every other one followed by an ordinary greedy request."""
    batch, params = [], []
    for case, prompt in zip(cases, prompts, strict=True):
        batch += [prompt, prompt]
        params += [case.params(), SamplingParams(temperature=0, max_tokens=MAX_TOKENS)]
    outputs = engine.generate(batch, params)
    return outputs[::2], outputs[1::2]


def transformers_answers(model: Path, case: Case, prompt: list[int], output: Any) -> list[Answer]:
    """What transformers answers, where `output` is likely."""
    eos, options = 1 if case.eos_occurs else None, {"length_penalty": case.length_penalty}
    if case.width == 1:
        return transformers_one_beam(model, prompt, [*output.outputs[0].token_ids], MAX_TOKENS, eos=eos, **options)
    options |= {"early_stopping": case.early_stopping, "eos_token_id": eos}
    return transformers_beams(model, prompt, case.width, case.width, MAX_TOKENS, **options)


def check_cases(
    model: Path, cases: list[Case], prompts: list[list[int]], beams: list, ordinary: list
) -> tuple[int, int]:
    """Compare every case with transformers. Returns how many agree to the last token, and how many saw EOS."""
    in_full = with_eos = 0
    for case, prompt, output, other in zip(cases, prompts, beams, ordinary, strict=True):
        ours, theirs = engine_answers(output, case.length_penalty), transformers_answers(model, case, prompt, output)
        in_full += agree(ours, theirs)
        with_eos += any(answer.token_ids[-1] == 1 for answer in theirs) and case.eos_occurs
        assert is_greedy(model, prompt, list(other.outputs[0].token_ids), MAX_TOKENS)
    return in_full, with_eos


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        pytest.param("gqa", CASES, id="gqa"),
        pytest.param("gqa", MORE_CASES, id="gqa, more", marks=pytest.mark.nightly),
        pytest.param("mha", CASES, id="mha", marks=pytest.mark.nightly),
    ],
)
def test_random_model_finds_the_beams_of_transformers(
    engines: Engines, random_model: Callable, kind: str, cases: list[Case]
) -> None:
    model = random_model(kind)
    prompts = [case.prompt(300) for case in cases]
    in_full, with_eos = check_cases(model, cases, prompts, *run_cases(engines(model), cases, prompts))
    assert in_full >= (1 - MOST_TIES) * len(cases)
    assert with_eos >= len(cases) // 4, "EOS must really occur"


@pytest.fixture(scope="module")
def usual(_engines: Engines) -> tuple[list, list]:
    """What the trained model finds when nothing is changed, for beams and for ordinary requests."""
    return run_cases(_engines(TRAINED_TARGET), OF_TRAINED, PROMPTS)


def test_trained_model_finds_the_beams_of_transformers_to_the_last_token(usual: tuple[list, list]) -> None:
    in_full, with_eos = check_cases(TRAINED_TARGET, OF_TRAINED, PROMPTS, *usual)
    assert in_full == len(OF_TRAINED)
    assert with_eos >= len(OF_TRAINED) // 4, "EOS must really occur"


@pytest.mark.nightly
@pytest.mark.parametrize("interval", [1, 1000])
def test_reclaim_interval_changes_no_answer(engines: Engines, usual: tuple[list, list], interval: int) -> None:
    engine = engines(TRAINED_TARGET)
    manager = engine.scheduler.kv_cache_manager
    before, manager.reclaim_interval = manager.reclaim_interval, interval
    try:
        other, _ = run_cases(engine, OF_TRAINED, PROMPTS)
    finally:
        manager.reclaim_interval = before
    for a, b in zip(usual[0], other, strict=True):
        assert [(o.token_ids, o.cumulative_logprob) for o in a.outputs] == [
            (o.token_ids, o.cumulative_logprob) for o in b.outputs
        ]


@pytest.mark.nightly
def test_without_the_tail_copy_the_beams_are_wrong(
    engines: Engines, usual: tuple[list, list], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_trie.worker.kv.kv_caches.KVCaches.copy_blocks", lambda *_: None)
    wrong, _ = run_cases(engines(TRAINED_TARGET), OF_TRAINED, PROMPTS)
    differing = [
        case
        for case, a, b in zip(OF_TRAINED, usual[0], wrong, strict=True)
        if [o.token_ids for o in a.outputs] != [o.token_ids for o in b.outputs]
    ]
    assert len(differing) > len(OF_TRAINED) // 4
    assert all(case.width > 1 for case in differing)
