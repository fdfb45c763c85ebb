"""`beam_results`: the hypotheses of a search in the shape in which SGLang returns those of its own.

SGLang 0.5.23, `beam_search/output.py: build_beam_search_out`: a list in `meta_info`, best first, whose entries have
`text`, `output_ids`, and in a `meta_info` of their own `finish_reason` and `sequence_score`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_trie.options import PLUGIN_NAME

BEAM_RESULTS = "beam_results"


def asks_for_beam_results(params: Any) -> bool:
    """Whether these are the parameters of a request that asks for them."""
    return isinstance(params, SamplingParams) and bool((params.extra_args or {}).get(BEAM_RESULTS))


async def with_beam_results(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request that asks for them, with complete `beam_results`."""
    async with aclosing(outputs):
        async for output in outputs:
            add_beam_results([output])
            yield output


def add_beam_results(outputs: Sequence[Any]) -> None:
    """Complete the `beam_results` of outputs that have them: the engine sends scores and stop tokens alone."""
    for output in outputs:
        answer = (output.kv_transfer_params or {}).get(PLUGIN_NAME) if isinstance(output, RequestOutput) else None
        if answer and BEAM_RESULTS in answer:  # where bans leave fewer hypotheses, other outputs stand for none
            found = zip(output.outputs, answer[BEAM_RESULTS], strict=False)
            answer[BEAM_RESULTS] = [_beam_result(hypothesis, **sent) for hypothesis, sent in found]


def _beam_result(hypothesis: CompletionOutput, sequence_score: float, matched: int | None) -> dict[str, Any]:
    """One entry.

    Args:
        matched: The stop token that ended it. A stop string, which vLLM finds, is the output's stop reason.
    """
    if hypothesis.finish_reason == "stop":
        end = {"type": "stop", "matched": matched if hypothesis.stop_reason is None else hypothesis.stop_reason}
    else:
        end = {"type": hypothesis.finish_reason, "length": len(hypothesis.token_ids)}
    scores = {"sequence_score": sequence_score, "cumulative_logprob": hypothesis.cumulative_logprob}
    meta_info = {"finish_reason": end, **scores}
    return {"text": hypothesis.text, "output_ids": [*hypothesis.token_ids], "meta_info": meta_info}
