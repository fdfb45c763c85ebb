"""What the engine drew for a candidate, as a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from tests.support.tokenizers import word_pieces
from vllm_trie.step_search.hypotheses import StepHypothesis
from vllm_trie.step_search.sampled_steps import StepReader

LETTERS = word_pieces([f"##{chr(number)}" for number in range(128)])  # no spaces between them
WORDS = word_pieces(["a", "b", ".", "##b"])


def ids(text: str) -> list[int]:
    return [LETTERS.convert_tokens_to_ids(f"##{letter}") for letter in text]


def sampled(tokens: list[int], text: str, reason: str | None, kind: str = "stop") -> RequestOutput:
    """What vLLM returns of a candidate, each of whose tokens is as probable as any other."""
    logprobs: Any = [{token: Logprob(-1.0)} for token in tokens]
    candidate = CompletionOutput(0, text, tokens, -len(tokens), logprobs, finish_reason=kind, stop_reason=reason)
    return RequestOutput("0", "x", [1], None, [candidate], finished=True)


@pytest.mark.parametrize("num_logprobs", [None, 0])
@pytest.mark.parametrize(("text", "kept"), [("ab\n", "ab\n"), ("aSTOPb\n", "a")])
def test_logprobs_are_kept_where_they_were_asked_for(num_logprobs: int | None, text: str, kept: str) -> None:
    """A search that returns to candidates holds many of them."""
    output = sampled(ids(text), text, "\n")
    reader = StepReader(LETTERS, SamplingParams(stop=["STOP"], logprobs=num_logprobs))
    step = reader.step("0", StepHypothesis(), output)
    assert step.text == kept
    assert step.sum_logprobs == -len(step.token_ids)
    assert step.note.logprobs == (None if num_logprobs is None else output.outputs[0].logprobs[: len(step.token_ids)])


@pytest.mark.parametrize("stop", [" .", "a .", " b"])
def test_a_step_ends_where_vllm_ended_it_whatever_decode_cleans(stop: str) -> None:
    """A tokenizer may remove spaces before punctuation, where vLLM's detokenizer leaves them."""
    a, b, dot, more = (WORDS.convert_tokens_to_ids(word) for word in ("a", "b", ".", "##b"))
    params = SamplingParams(stop=[stop], include_stop_str_in_output=True)
    request: Any = SimpleNamespace(request_id="0", prompt_token_ids=[a], prompt_embeds=None, sampling_params=params)
    by_vllm = IncrementalDetokenizer.from_new_request(WORDS, request)
    assert by_vllm.update([a, more, a, dot, more, b], False) == stop
    output = sampled([*by_vllm.output_token_ids], by_vllm.get_next_output_text(True, False), stop)
    step = StepReader(WORDS, params).step("0", StepHypothesis(), output)
    assert (step.text, [*step.token_ids]) == (output.outputs[0].text, output.outputs[0].token_ids)
    assert (step.finish_reason, step.stop_reason) == ("stop", stop)
    assert step.sum_logprobs == -len(step.token_ids)
