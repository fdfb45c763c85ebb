"""`beam_results`: the hypotheses of a search in the format of SGLang's beam search.

SGLang 0.5.23, `beam_search/output.py: build_beam_search_out`: a list in `meta_info`, best first. Each entry has `text`,
`output_ids`, and its own `meta_info` with `finish_reason` and `sequence_score`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput

BEAM_RESULTS = "beam_results"


def complete_answer_beam_results(output: RequestOutput, answer: dict[str, Any], _: Any) -> Iterator[None]:
    """Complete the `beam_results` of an answer, of which the engine sends only scores and stop tokens."""
    found = zip(output.outputs, answer[BEAM_RESULTS], strict=False)  # outputs without a hypothesis come last
    answer[BEAM_RESULTS] = [_answer_beam_result(hypothesis, **sent) for hypothesis, sent in found]
    yield


def _answer_beam_result(hypothesis: CompletionOutput, sequence_score: float, matched: int | None) -> dict[str, Any]:
    """One entry of `beam_results`.

    Args:
        matched: The stop token that ended it. A stop string is the output's stop reason instead.
    """
    if hypothesis.finish_reason == "stop":
        end = {"type": "stop", "matched": matched if hypothesis.stop_reason is None else hypothesis.stop_reason}
    else:
        end = {"type": hypothesis.finish_reason, "length": len(hypothesis.token_ids)}
    scores = {"sequence_score": sequence_score, "cumulative_logprob": hypothesis.cumulative_logprob}
    meta_info = {"finish_reason": end, **scores}
    return {"text": hypothesis.text, "output_ids": [*hypothesis.token_ids], "meta_info": meta_info}
