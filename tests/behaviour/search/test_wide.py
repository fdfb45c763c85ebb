"""Searches as wide as their vocabulary, and wider; and such that are not equally wide in every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE, Engines
from tests.support.loop import loop_beams
from tests.support.reference import Answer, agree, engine_answers, is_greedy, transformers_beams
from tests.support.running import answers, prompt_of, run
from vllm_trie import beam_params, hypotheses

pytestmark = pytest.mark.slow

TOY_VOCABULARY = 16  # of the model "toy"


@pytest.mark.parametrize("width", [TOY_VOCABULARY // 2 + 1, TOY_VOCABULARY, 60])
@pytest.mark.parametrize("ignores_eos", [False, True])
def test_a_search_wider_than_its_vocabulary_finds_the_beams_of_transformers(
    engines: Engines, random_model: Callable[[str], Path], width: int, ignores_eos: bool
) -> None:
    model, max_tokens = random_model("toy"), 6
    prompts = [[token % TOY_VOCABULARY for token in prompt_of(length, length)] for length in (3, BLOCK_SIZE - 2)]
    params = beam_params(width, n=width, max_tokens=max_tokens, ignore_eos=ignores_eos)
    for prompt, output in zip(prompts, engines(model).generate(prompts, params), strict=True):
        theirs = transformers_beams(
            model, prompt, width, width, max_tokens, eos_token_id=None if ignores_eos else 1, early_stopping=False
        )
        assert agree(engine_answers(output, 1.0), theirs)


def test_where_there_are_fewer_hypotheses_than_beams_all_come_back(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    params = beam_params(60, n=60, max_tokens=1, ignore_eos=True)
    (output,) = engines(random_model("toy")).generate([[3, 4]], params)
    found = [o for o in output.outputs if o.token_ids]
    assert sorted(o.token_ids[0] for o in found) == [*range(TOY_VOCABULARY)]
    assert {o.stop_reason for o in output.outputs if not o.token_ids} == {"no further hypothesis"}


@pytest.mark.parametrize(
    ("widths", "options"),
    [
        ([1, 3, 8], {}),
        ([8, 2, 5, 1], {}),
        ([8, 3], {"early_stopping": True}),
        ([2, 8], {"early_stopping": "never", "length_penalty": 2.0}),
        ([3, 1, 6, 4], {"stop_token_ids": [5, 77, 123], "length_penalty": 0.0}),
        ([6, 2], {"ignore_eos": True}),
        ([5], {"min_tokens": 9}),
    ],
    ids=str,
)
def test_widths_of_steps_are_those_of_a_plain_loop(
    engines: Engines, random_model: Callable[[str], Path], widths: list[int], options: dict[str, Any]
) -> None:
    model, n, max_tokens = random_model("gqa"), max(widths), BLOCK_SIZE + 4
    prompts = [prompt_of(length, length) for length in (3, BLOCK_SIZE - 2, 50)]
    params = beam_params(beam_widths=widths, n=n, max_tokens=max_tokens, **options)
    assert params.extra_args["beam_width"] == n
    for prompt, output in zip(prompts, engines(model).generate(prompts, params), strict=True):
        found = [o for o in output.outputs if o.token_ids]
        theirs = loop_beams(model, prompt, n, n, max_tokens, eos=1, widths=widths, **options)
        penalty = options.get("length_penalty", 1.0)
        ours = [Answer(list(o.token_ids), o.cumulative_logprob / len(o.token_ids) ** penalty) for o in found]
        assert agree(ours, theirs)


def test_equal_widths_are_one_width(engines: Engines, random_model: Callable[[str], Path]) -> None:
    engine, prompts = engines(random_model("gqa")), [prompt_of(20, seed) for seed in range(4)]
    one = engine.generate(prompts, beam_params(5, n=5, max_tokens=40))
    several = engine.generate(prompts, beam_params(beam_widths=[5, 5], n=5, max_tokens=40))
    assert answers(one) == answers(several)


def test_widths_hold_along_a_catalog_and_for_some_of_many_searches(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    """Where few go on, only what is below the best first tokens is found."""
    engine = engines(random_model("gqa"), max_num_seqs=256)
    items = [[a, b] for a in range(10, 20) for b in range(30, 50)]
    prompt, options = prompt_of(20), {"allowed_sequences": items, "compact": True, "max_tokens": 2}
    widths = [[1, 20], [10, 200]]
    few, every = engine.generate([prompt] * 2, [beam_params(beam_widths=w, **options) for w in widths])
    few, every = hypotheses(few), hypotheses(every)
    assert len(every) == len(items)
    best = every.token_ids[every.token_ids[:, 0] == few.token_ids[0, 0]]
    assert few.token_ids.tolist() == best.tolist()
    assert len(few) == 20


def test_a_wide_group_among_others_finds_what_transformers_find_although_it_is_preempted(
    engines: Engines, random_model: Callable[[str], Path]
) -> None:
    model, width, max_tokens, steps = random_model("gqa"), 300, 8, count()
    engine = engines(model, max_num_seqs=330, max_num_batched_tokens=512)
    prompts = [prompt_of(BLOCK_SIZE - 4 if number == 3 else 20 + number, number) for number in range(8)]
    options = {"max_tokens": max_tokens, "ignore_eos": True}
    small, wide = beam_params(4, n=4, **options), beam_params(width, n=width, **options)
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    params = [wide if number == 3 else (small, greedy)[number % 2] for number in range(8)]

    def preempt_now_and_then() -> None:
        wide_ones = [r for r in engine.scheduler.running if engine.scheduler._rows(r) == width]
        if next(steps) in (3, 7) and wide_ones:
            engine.scheduler.running.remove(wide_ones[0])
            engine.scheduler._preempt_request(wide_ones[0], time.monotonic())
            preempted.append(wide_ones[0])

    preempted: list[Any] = []
    outputs = run(engine, [*zip(prompts, params, strict=True)], preempt_now_and_then)
    assert preempted
    for prompt, of_one, output in zip(prompts, params, outputs, strict=True):
        if of_one is greedy:
            assert is_greedy(model, prompt, list(output.outputs[0].token_ids), max_tokens)
        else:
            theirs = transformers_beams(model, prompt, of_one.n, of_one.n, max_tokens, eos_token_id=None)
            assert agree(engine_answers(output, 1.0), theirs)
