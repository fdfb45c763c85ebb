"""`beam_results`: the shape in which SGLang returns hypotheses, of what vLLM's outputs and the engine say."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput

from vllm_trie.entrypoints.output_hooks import completing_by_output_hooks


def output(index: int, text: str, token_ids: list[int], logprob: float, **end: Any) -> CompletionOutput:
    return CompletionOutput(index, text, token_ids, logprob, None, **end)


def request_output(outputs: list[CompletionOutput], answer: dict[str, Any] | None) -> RequestOutput:
    params = answer and {"trie_beam": answer}
    return RequestOutput("0", "prompt", [1], None, outputs, True, kv_transfer_params=params)


def complete(output: RequestOutput) -> None:
    for _ in completing_by_output_hooks(output, None):
        pass


def test_each_hypothesis_has_its_text_its_tokens_its_end_and_its_score() -> None:
    by_eos = output(0, "a b", [5, 6, 2], -1.5, finish_reason="stop")
    by_string = output(1, "a", [5, 13], -1.0, finish_reason="stop", stop_reason="\n")
    by_token = output(2, "a", [5, 7], -1.2, finish_reason="stop", stop_reason=7)
    by_length = output(3, "a c d", [5, 8, 9], -3.0, finish_reason="length")
    scores = [{"sequence_score": -0.5, "matched": 2}, {"sequence_score": -0.5, "matched": None}]
    scores += [{"sequence_score": -0.6, "matched": 7}, {"sequence_score": -1.0, "matched": None}]
    answer: dict[str, Any] = {"beam_results": scores, "steps_per_forward": 2.0}
    complete(request_output([by_eos, by_string, by_token, by_length], answer))
    assert answer["steps_per_forward"] == 2.0
    first, second, third, last = answer["beam_results"]
    assert first == {
        "text": "a b",
        "output_ids": [5, 6, 2],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": 2},
            "sequence_score": -0.5,
            "cumulative_logprob": -1.5,
        },
    }
    assert second["meta_info"]["finish_reason"] == {"type": "stop", "matched": "\n"}
    assert third["meta_info"]["finish_reason"] == {"type": "stop", "matched": 7}
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 3}


def test_an_output_that_stands_for_no_hypothesis_has_no_entry() -> None:
    answer = {"beam_results": [{"sequence_score": -0.5, "matched": 2}]}
    outputs = [output(0, "a", [5, 2], -1.0, finish_reason="stop"), output(1, "", [], 0.0, finish_reason="stop")]
    complete(request_output(outputs, answer))
    assert [entry["output_ids"] for entry in answer["beam_results"]] == [[5, 2]]


@pytest.mark.parametrize("answer", [None, {"token_ids": [[5]]}], ids=str)
def test_other_outputs_stay_as_they_are(answer: dict[str, Any] | None) -> None:
    plain = request_output([output(0, "a", [5], -1.0, finish_reason="length")], answer)
    before = repr(plain)
    complete(plain)
    assert repr(plain) == before
