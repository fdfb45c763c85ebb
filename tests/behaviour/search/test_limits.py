"""Where a hypothesis ends: max_tokens, max_model_len, min_tokens, stop tokens, ignore_eos; exact to the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stdlib_pair.corpus import held_out_text
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.loop import loop_beams
from tests.support.reference import agree, engine_answers, transformers_beams
from tests.support.running import prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTH = 4


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines(model)


@pytest.mark.parametrize("max_tokens", [1, 2, 31, 32, 33])
def test_max_tokens_is_exact(engine: Engine, model: Path, max_tokens: int) -> None:
    prompt = prompt_of(20)
    (output,) = engine.generate([prompt], beam_params(WIDTH, n=WIDTH, max_tokens=max_tokens, ignore_eos=True))
    assert [len(o.token_ids) for o in output.outputs] == [max_tokens] * WIDTH
    assert {o.finish_reason for o in output.outputs} == {"length"}
    theirs = transformers_beams(model, prompt, WIDTH, WIDTH, max_tokens, eos_token_id=None)
    assert agree(engine_answers(output, 1.0), theirs)


@pytest.mark.parametrize("room", [1, 2, 40])
def test_max_model_len_is_exact(engine: Engine, model: Path, room: int) -> None:
    prompt = prompt_of(512 - room)
    (output,) = engine.generate([prompt], beam_params(WIDTH, n=WIDTH, max_tokens=200, ignore_eos=True))
    assert [len(o.token_ids) for o in output.outputs] == [room] * WIDTH
    theirs = transformers_beams(model, prompt, WIDTH, WIDTH, room, eos_token_id=None)
    assert agree(engine_answers(output, 1.0), theirs)


@pytest.mark.parametrize("min_tokens", [1, 5, 40])
def test_min_tokens_masks_every_stop_token_until_then(engine: Engine, model: Path, min_tokens: int) -> None:
    prompts = [prompt_of(10, seed) for seed in range(6)]
    params = beam_params(WIDTH, n=WIDTH, max_tokens=40, min_tokens=min_tokens, early_stopping=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert all(1 not in o.token_ids[:min_tokens] for o in output.outputs)
        theirs = transformers_beams(model, prompt, WIDTH, WIDTH, 40, min_new_tokens=min_tokens, early_stopping=True)
        assert agree(engine_answers(output, 1.0), theirs)


def test_several_stop_tokens_all_end_a_hypothesis_and_name_themselves(engine: Engine, model: Path) -> None:
    prompts = [prompt_of(10, seed) for seed in range(8)]
    stops = [5, 77, 123]
    params = beam_params(WIDTH, n=WIDTH, max_tokens=60, stop_token_ids=stops)
    reasons = set()
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        theirs = transformers_beams(model, prompt, WIDTH, WIDTH, 60, eos_token_id=[1, *stops])
        assert agree(engine_answers(output, 1.0), theirs)
        for o in output.outputs:
            last = o.token_ids[-1]
            if o.finish_reason == "stop":
                assert o.stop_reason == last
                reasons.add(o.stop_reason)
            else:
                assert o.finish_reason == "length"
                assert o.stop_reason is None
    assert len(reasons) > 1


def test_the_tokenizers_eos_is_no_stop_reason(engines: Engines) -> None:
    engine = engines(TRAINED_TARGET)
    (output,) = engine.llm.generate(
        ["def close(self):\n    pass\n"], beam_params(4, n=4, max_tokens=30), use_tqdm=False
    )
    stopped = [o for o in output.outputs if o.finish_reason == "stop"]
    assert stopped
    assert all(o.stop_reason is None and o.token_ids[-1] == 1 and "</s>" not in o.text for o in stopped)


def test_an_ignored_eos_that_is_a_stop_token_is_a_stop_reason(engines: Engines) -> None:
    params = beam_params(4, n=4, max_tokens=30, ignore_eos=True, stop_token_ids=[1])
    (output,) = engines(TRAINED_TARGET).llm.generate(["def close(self):\n    pass\n"], params, use_tqdm=False)
    assert [o.stop_reason for o in output.outputs if o.token_ids[-1] == 1] == [1] * 4


def test_an_ignored_eos_does_not_come_before_min_tokens_however_likely(engine: Engine) -> None:
    kinds: list[dict[str, Any]] = [
        *({"semantics": semantics} for semantics in ("hf", "vllm", "tridecode")),
        {"num_beam_groups": 2, "diversity_penalty": 0.5},
        *({"do_sample": True, "temperature": 1.0, **more} for more in ({}, {"stochastic": True})),
    ]
    fields = {"n": 4, "max_tokens": 9, "min_tokens": 5, "ignore_eos": True, "logit_bias": {1: 50.0}}
    for output in engine.generate([prompt_of(30)] * len(kinds), [beam_params(4, **fields, **kind) for kind in kinds]):
        for o in output.outputs:
            assert 1 not in o.token_ids[:5]
            assert len(o.token_ids) == 9
        assert output.outputs[0].token_ids[5] == 1


def test_stop_token_ids_hold_although_eos_is_ignored(engine: Engine, model: Path) -> None:
    prompts = [prompt_of(10, seed) for seed in range(4)]
    params = beam_params(WIDTH, n=WIDTH, max_tokens=60, stop_token_ids=[77], ignore_eos=True)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        theirs = transformers_beams(model, prompt, WIDTH, WIDTH, 60, eos_token_id=[77])
        assert agree(engine_answers(output, 1.0), theirs)


def test_n_best_are_a_prefix_of_all_hypotheses(engine: Engine) -> None:
    prompt = prompt_of(30)
    everything, some = engine.generate(
        [prompt, prompt], [beam_params(8, n=8, max_tokens=20), beam_params(8, n=3, max_tokens=20)]
    )
    assert len(some.outputs) == 3
    assert [o.token_ids for o in some.outputs] == [o.token_ids for o in everything.outputs[:3]]


def test_cumulative_logprob_is_the_sum_of_the_logprobs_of_the_tokens(engine: Engine) -> None:
    prompt = prompt_of(30)
    plain, detailed = engine.generate(
        [prompt, prompt], [beam_params(4, n=4, max_tokens=20), beam_params(4, n=4, max_tokens=20, logprobs=0)]
    )
    for o, d in zip(plain.outputs, detailed.outputs, strict=True):
        assert o.logprobs is None
        assert o.cumulative_logprob == pytest.approx(d.cumulative_logprob, abs=1e-5)
        per_token = [position[token].logprob for position, token in zip(d.logprobs, d.token_ids, strict=True)]
        assert sum(per_token) == pytest.approx(d.cumulative_logprob, abs=1e-6)
        assert all(logprob <= 1e-6 for logprob in per_token)


def test_stop_strings_end_some_hypotheses_and_max_model_len_the_others(engines: Engines) -> None:
    engine, room = engines(TRAINED_TARGET), 14
    tokenizer = engine.llm.get_tokenizer()
    text = held_out_text()
    reasons = set()
    for start in (1_000, 20_000, 40_000):
        prompt = tokenizer(text[start : start + 6_000])["input_ids"][: 512 - room]
        params = beam_params(WIDTH, n=WIDTH, max_tokens=200, ignore_eos=True, stop=["(", "\n"])
        (output,) = engine.generate([prompt], params)
        theirs = loop_beams(
            TRAINED_TARGET, prompt, WIDTH, WIDTH, room, ignore_eos=True, stop=["(", "\n"], decode=tokenizer.decode
        )
        assert [[*o.token_ids] for o in output.outputs] == [found.token_ids for found in theirs]
        assert [o.stop_reason for o in output.outputs] == [found.stopped_by for found in theirs]
        assert all(o.finish_reason == "length" for o in output.outputs if o.stop_reason is None)
        reasons.update(o.stop_reason for o in output.outputs)
    assert None in reasons
    assert len(reasons) > 1, "nothing stopped; choose other strings"
