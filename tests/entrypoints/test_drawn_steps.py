"""What the engine drew for a candidate, as a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_trie.entrypoints.step_search.drawn_steps import StepReader
from vllm_trie.search.step_search.hypotheses import StepHypothesis

LETTERS = SimpleNamespace(decode=lambda tokens, skip_special_tokens: "".join(map(chr, tokens)))


@pytest.mark.parametrize("num_logprobs", [None, 0])
@pytest.mark.parametrize(("text", "kept"), [("ab\n", "ab\n"), ("aSTOPb\n", "a")])
def test_logprobs_are_kept_where_they_were_asked_for(num_logprobs: int | None, text: str, kept: str) -> None:
    """A search that returns to candidates holds many of them."""
    logprobs: Any = [{ord(letter): Logprob(-1.0)} for letter in text]
    drawn = CompletionOutput(0, text, [*map(ord, text)], -len(text), logprobs, finish_reason="stop", stop_reason="\n")
    output = RequestOutput("0", "x", [ord("x")], None, [drawn], finished=True)
    reader = StepReader(LETTERS, SamplingParams(stop=["STOP"], logprobs=num_logprobs))
    step = reader.step("0", StepHypothesis(), output)
    assert step.text == kept
    assert step.sum_logprobs == -len(step.token_ids)
    assert step.note.logprobs == (None if num_logprobs is None else logprobs[: len(step.token_ids)])
