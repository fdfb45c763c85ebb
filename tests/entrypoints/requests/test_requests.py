"""Prompts that beams do not work on are known by their kind; numbers of tokens fit into what a worker holds."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_trie.entrypoints.requests import requests
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.entrypoints.requests.request_data import RequestData
from vllm_trie.entrypoints.requests.requests import (
    _MARKS,
    _fit_request_lengths,
    refuse_request_marks,
    why_no_request_after,
)
from vllm_trie.options import BeamParams
from vllm_trie.options.shown import MOST_QUOTED
from vllm_trie.step_search.opening import open_step_request


@pytest.mark.parametrize(
    ("kind", "speculates", "is_mm_prefix_lm", "reason"),
    [
        ("token", True, True, None),
        ("enc_dec", False, False, None),
        ("embeds", False, False, "works on prompts of text or tokens, not on prompt_embeds"),
        ("multimodal", False, False, None),
        ("multimodal", True, False, "works on multimodal prompts only without a draft model, which does not see them"),
        ("multimodal", False, True, "does not work on multimodal prompts of a model whose images are attended in both"),
    ],
)
def test_prompts_that_beams_do_not_work_on_are_known_by_their_kind(
    kind: str, speculates: bool, is_mm_prefix_lm: bool, reason: str | None
) -> None:
    model_config = SimpleNamespace(is_mm_prefix_lm=is_mm_prefix_lm)
    drafts = SimpleNamespace(use_ngram=lambda: False) if speculates else None
    config = SimpleNamespace(speculative_config=drafts, model_config=model_config)
    found = why_no_request_after({"type": kind}, config)
    assert found is None if reason is None else found is not None and found.startswith(reason)


def test_numbers_of_tokens_that_no_sequence_reaches_fit_into_32_bits() -> None:
    params = SamplingParams(min_tokens=1 << 40, max_tokens=1 << 41)
    _fit_request_lengths(params, 512)
    assert (params.min_tokens, params.max_tokens) == (512, 512)
    short = SamplingParams(min_tokens=2, max_tokens=9)
    _fit_request_lengths(short, 512)
    assert (short.min_tokens, short.max_tokens) == (2, 9)


@pytest.mark.parametrize("name", _MARKS)
@pytest.mark.parametrize("forged", ["true", "1", '"x"', "{}", '["beam_width", "beam_width"]'])
def test_no_mark_can_be_sent_as_json(name: str, forged: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is reserved for the front end; leave it out"):
        refuse_request_marks({name: json.loads(forged)})


def test_a_refusal_is_short_wherever_it_is_raised() -> None:
    assert len(str(BeamRequestError("x" * 10_000))) == MOST_QUOTED


@pytest.mark.parametrize("size", [10, 10_000])
def test_what_vllm_refuses_of_a_beam_request_is_short_and_else_as_vllm_says_it(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(requests, "has_beams", lambda _: True)
    found = RequestData(BeamParams(beam_width=2))
    monkeypatch.setattr(requests, "read_request", lambda params, *_: found if params.extra_args else None)
    processor = SimpleNamespace(vllm_config=None, tokenizer=None, renderer=SimpleNamespace(mm_processor_cache=None))
    refusal = VLLMValidationError("is wrong", parameter="logit_bias", value="7" * size)

    def original(*_: Any) -> Any:
        raise refusal

    for extra_args in ({"beam_width": 2}, None):
        with pytest.raises(VLLMValidationError, match=r"is wrong.*logit_bias.*7") as raised:
            requests.process_request_inputs.function(
                original, processor, "1", "x", SamplingParams(extra_args=extra_args)
            )
        if extra_args is None or size == 10:
            assert raised.value is refusal
        else:
            assert len(str(raised.value)) == MOST_QUOTED


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_half_characters_are_refused(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    monkeypatch.setattr(requests, "has_beams", lambda _: True)
    texts: dict[str, Any] = {field: ["a", "b\ud800"]}
    refusal = rf"{field} has half of a surrogate pair, '\\ud800'; fix or remove it"
    with pytest.raises(ValueError, match=refusal):
        requests.search_of_request(SamplingParams(**texts, extra_args={"beam_width": 2}), None)
    by_steps = SamplingParams(**texts, extra_args={"beam_width": 2, "unit": "step", "step_stop": ["."], "scorer": "a"})
    with pytest.raises(ValueError, match=refusal):
        open_step_request("1", "x", by_steps, SimpleNamespace(vllm_config=None), False)


def test_stop_strings_with_what_stands_for_unfinished_characters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "has_beams", lambda _: True)
    params = SamplingParams(stop=["a", "b\ufffd"], extra_args={"beam_width": 2})
    with pytest.raises(ValueError, match=r"stop has U\+FFFD, .*; remove it"):
        requests.search_of_request(params, None)


@pytest.mark.parametrize("priority", [10**39, -(10**39)])
def test_a_priority_that_cannot_be_sent_to_the_engine_is_refused(
    monkeypatch: pytest.MonkeyPatch, priority: int
) -> None:
    monkeypatch.setattr(requests, "has_beams", lambda _: True)
    processor = SimpleNamespace(
        vllm_config=None,
        tokenizer=None,
        model_config=SimpleNamespace(max_model_len=512),
        renderer=SimpleNamespace(mm_processor_cache=None),
    )

    def original(self: Any, request_id: str, prompt: Any, params: SamplingParams, priority: int) -> Any:
        return SimpleNamespace(sampling_params=params, priority=priority)

    params = SamplingParams(max_tokens=4)
    assert requests.process_request_inputs.function(original, processor, "1", "x", params, priority=-7).priority == -7
    with pytest.raises(BeamRequestError, match=f"priority={str(priority)[:10]}.*; pass one closer to 0"):
        requests.process_request_inputs.function(original, processor, "1", "x", params, priority=priority)
