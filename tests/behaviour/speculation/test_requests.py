"""What a user asks of sampled and of speculating beams reaches the search, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import BeamSearchParams, SamplingParams

from tests.support.disturb import preempt_all
from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.reference import NEAR_TIE
from tests.support.running import run, start_with
from tests.support.trained_pair import (
    LAYERS,
    LENGTH,
    ONE_BEAM,
    SAMPLED,
    WARPED,
    WIDTH,
    answer,
    counts,
    search,
    tokens,
)
from vllm_trie import beam_params

pytestmark = pytest.mark.slow


@pytest.fixture
def says(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets the engine have been started with these options for requests that say nothing of them."""
    return partial(start_with, engine, monkeypatch)


def altered(params: SamplingParams, **fields: Any) -> SamplingParams:
    """A copy with fields that the helper does not let pass."""
    params = params.clone()
    for name, value in fields.items():
        setattr(params, name, value)
    return params


# Options reach the search.


def test_every_search_says_what_it_took(engine: Engine, prompts: list[list[int]]) -> None:
    for options in ({}, {"speculation": "exact"}, SAMPLED, {"do_sample": True, "seed": 1}):
        for output in search(engine, prompts[:2], **options):
            took = counts(output)
            assert took["steps"] == LENGTH
            assert took["steps"] / (1 + LAYERS) <= took["target_forwards"] <= LENGTH
            assert took["prefill_forwards"] == 1
            assert took["steps_per_forward"] == (LENGTH - 1) / (took["target_forwards"] - 1)
            assert 0 <= took["accepted"] <= took["drafted"]
            assert took["mean_width"] == took["beams"] / LENGTH == WIDTH
            if options:  # without, the engine speculates as far as it pays on this machine
                assert took["target_forwards"] < LENGTH
                assert 0 < took["accepted"] < took["drafted"]
    for options in ({"speculation": "off"}, {"speculation": "off", "do_sample": True}):
        assert [output.kv_transfer_params for output in search(engine, prompts[:2], **options)] == [None] * 2


@pytest.mark.parametrize("mode", [{"speculation": "exact"}, SAMPLED], ids=["exact", "sample"])
def test_draft_width_bounds_what_is_drafted(engine: Engine, prompts: list[list[int]], mode: dict) -> None:
    drafted = {}
    for draft_width in (WIDTH, 2 * WIDTH, 6 * WIDTH, engine.llm.model_config.get_vocab_size()):
        (output,) = search(engine, prompts[:1], draft_width=draft_width, max_tokens=LENGTH // 2, **mode)
        drafted[draft_width] = counts(output)["drafted"] / counts(output)["target_forwards"]
        assert drafted[draft_width] <= LAYERS * draft_width
    assert list(drafted.values()) == sorted(drafted.values())
    (default,) = search(engine, prompts[:1], max_tokens=LENGTH // 2, **mode)
    assert counts(default)["drafted"] / counts(default)["target_forwards"] == drafted[2 * WIDTH]


def test_what_the_engine_says_holds_for_those_who_say_nothing(
    engine: Engine, prompts: list[list[int]], says: Callable[..., None]
) -> None:
    asked = search(engine, prompts[:1], threshold=0.8, min_width=2, draft_width=6, **SAMPLED)
    off = search(engine, prompts[:1], speculation="off")
    says(do_sample=True, threshold=0.8, min_width=2, draft_width=6)
    params = altered(beam_params(WIDTH, n=WIDTH, max_tokens=LENGTH, ignore_eos=True), seed=1)
    (said,) = engine.generate(prompts[:1], params)
    assert (answer(said), said.kv_transfer_params) == (answer(asked[0]), asked[0].kv_transfer_params)
    for own in ({"do_sample": False}, {"speculation": "exact"}):
        (output,) = search(engine, prompts[:1], **own)
        assert tokens([output]) == tokens(off)
        assert counts(output)["drafted"] > 0 or "speculation" not in own
    says(speculation="off", do_sample=None)
    (output,) = search(engine, prompts[:1])
    assert (tokens([output]), output.kv_transfer_params) == (tokens(off), None)


def test_groups_of_every_kind_run_side_by_side(engine: Engine, prompts: list[list[int]]) -> None:
    asked: list[dict[str, Any]] = [
        {},
        {"speculation": "off"},
        {"semantics": "vllm"},
        {"sample_first": 5, "seed": 3},
        SAMPLED | {"stop": ["\n\n"]},
        SAMPLED | {"threshold": 0.9, "min_width": 2, "draft_width": 5},
        ONE_BEAM | WARPED,
        SAMPLED | {"replacement": True, "presence_penalty": 0.5, "bad_words": ["self"]},
        {"speculation": "off", "do_sample": True, "seed": 4, "min_tokens": 9},
        {"logprobs": 2} | SAMPLED,
    ]
    greedy = SamplingParams(temperature=0, max_tokens=LENGTH)
    jobs = [(prompts[i % 4], beam_params(3, n=3, max_tokens=LENGTH, **options)) for i, options in enumerate(asked)]
    (alone,) = run(engine, [(prompts[0], greedy.clone())])
    steps = 0

    def disturb() -> None:
        nonlocal steps
        steps += 1
        if steps in (4, 9):
            preempt_all(engine)

    outputs = run(engine, [*jobs, (prompts[0], greedy)], disturb)
    assert list(outputs[-1].outputs[0].token_ids) == list(alone.outputs[0].token_ids)
    for (_, params), output in zip(jobs, outputs, strict=False):
        assert (output.kv_transfer_params is None) == (params.extra_args.get("speculation") == "off")
        assert all(len(o.token_ids) <= LENGTH for o in output.outputs)
        assert output.outputs[0].token_ids


# Requests that are refused.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "sometimes"}, "speculation='sometimes' is unknown"),
        ({"do_sample": 2}, "do_sample=2 is neither true nor false"),
        ({"draft_widht": 8}, "unknown option draft_widht=8; did you mean draft_width?"),
        ({"draft_width": 10**9}, "draft_width=1000000000 exceeds the vocabulary of 2048 tokens; lower it"),
        ({"threshold": 0.5}, "threshold=0.5 has no effect unless beams are sampled"),
        ({"speculation": "sample", "min_width": 2}, "min_width=2 needs a threshold, such as 0.7"),
        ({"replacement": True}, "replacement=True acts only on sampling; set do_sample=True"),
        (
            {"do_sample": 1, "speculation": "off", "memory_mode": 1},
            "memory_mode=True has no effect, as this search does not",
        ),
        ({"do_sample": 1, "sample_first": 2}, "sample_first=2 is not supported together with do_sample"),
        ({"contrast": '{"alpha": 2}'}, "contrast={'alpha': 2} is not "),
        ({"contrast": {}, "speculation": "exact"}, 'contrast is not supported together with speculation="exact"'),
        ({"do_sample": 1, "semantics": "vllm"}, 'do_sample=True is not supported together with semantics="vllm"'),
    ],
)
def test_a_wrong_option_is_refused_and_those_beside_it_do_not_stay(
    engine: Engine, prompts: list[list[int]], options: dict, message: str
) -> None:
    good = beam_params(WIDTH, max_tokens=LENGTH, **SAMPLED)
    wrong = SamplingParams(max_tokens=LENGTH, extra_args={"beam_width": WIDTH, **options})
    with pytest.raises(ValueError, match="^" + message.replace("?", r"\?")):
        engine.generate(prompts[:3], [good, wrong, good])
    engine.check_nothing_is_left()


def test_wrong_fields_are_refused_and_the_engine_goes_on(engine: Engine, prompts: list[list[int]]) -> None:
    expected = tokens(search(engine, prompts[:1], **SAMPLED))
    sampled = beam_params(WIDTH, max_tokens=LENGTH, **SAMPLED)
    for fields, message in [
        ({"temperature": 0.0}, 'temperature=0.0 is not supported together with speculation="sample", .*; raise it'),
        ({"prompt_logprobs": 1}, "prompt_logprobs=1 is not supported together with beam_width"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts[:1], altered(sampled, **fields))
        engine.check_nothing_is_left()
    with pytest.raises(VLLMValidationError, match="not yet supported with speculative decoding"):  # vLLM's own word
        engine.generate(prompts[:1], SamplingParams(max_tokens=4, logit_bias={5: 1.0}))
    with pytest.raises(ValueError, match="seed=7 has no effect in a search that does not sample"):
        engine.generate(prompts[:1], altered(beam_params(WIDTH, max_tokens=4), seed=7))
    assert tokens(search(engine, prompts[:1], **SAMPLED)) == expected


# Beside an engine that has no draft model.


@pytest.mark.nightly
def test_an_engine_without_drafts_finds_and_draws_the_same(
    engine: Engine, engines: Engines, prompts: list[list[int]]
) -> None:
    sampled = {"do_sample": True, "speculation": "off", "seed": 1} | WARPED
    inputs, params = [{"prompt_token_ids": prompt} for prompt in prompts], BeamSearchParams(WIDTH, max_tokens=LENGTH)
    with_drafts = engine.llm.beam_search(inputs, params)
    sampled_with_drafts = tokens(search(engine, prompts, **sampled))
    engine.check_nothing_is_left()

    plain = engines(TRAINED_TARGET)
    for ours, theirs in zip(with_drafts, plain.llm.beam_search(inputs, params), strict=True):
        for x, y in zip(ours.sequences, theirs.sequences, strict=True):
            assert (x.tokens, x.text) == (y.tokens, y.text)
            assert x.cum_logprob == pytest.approx(y.cum_logprob, abs=NEAR_TIE * LENGTH)
    assert tokens(search(plain, prompts, **sampled)) == sampled_with_drafts
    assert tokens(search(plain, prompts, **sampled | {"speculation": None})) == sampled_with_drafts
    with pytest.raises(ValueError, match=r"contrast=\{\} needs a draft model, and this engine has none; start it with"):
        search(plain, prompts, contrast={})
    for speculation, needs in (("exact", "drafts"), ("sample", "a draft model")):
        with pytest.raises(ValueError, match=f'speculation="{speculation}" needs {needs}; start the engine with'):
            search(plain, prompts, speculation=speculation)
