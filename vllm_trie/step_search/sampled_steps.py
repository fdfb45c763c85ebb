"""Turns the engine's output for a candidate into a step, which ends at a delimiter or with the hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

from vllm_trie.detokenizing import Decode, detokenizing_function
from vllm_trie.search.stop_strings import INCOMPLETE, search_text_after, search_text_context
from vllm_trie.step_search.hypotheses import SampledStep, StepHypothesis

Context = tuple[list[int], str]  # the few tokens before a step on which its text depends, and their text


class Note(NamedTuple):
    """What a request keeps of each step."""

    candidate_id: str
    logprobs: Any  # None unless requested: they are many times as large as a step


class StepSamplingError(RuntimeError):
    """The engine did not sample a candidate."""


class StepAbortedError(StepSamplingError):
    """The request of a candidate was aborted, for example by a pause of the engine, and so its search."""


@dataclass(frozen=True)
class StepReader:
    """Makes steps of outputs.

    Args:
        tokenizer: Of the engine.
        params: Of the user's request.
    """

    tokenizer: Any
    params: SamplingParams

    def step(self, candidate_id: str, beam: StepHypothesis, output: RequestOutput) -> SampledStep:
        """The step that a candidate adds to a hypothesis.

        Raises:
            StepSamplingError: its request did not finish.
        """
        (sampled,) = output.outputs
        if sampled.finish_reason == "abort":
            raise StepAbortedError("the engine aborted a candidate")
        if sampled.finish_reason not in ("stop", "length"):
            raise StepSamplingError(f"the engine ended a candidate: {sampled.finish_reason}, {sampled.stop_reason}")
        is_delimiter = isinstance(sampled.stop_reason, str) and sampled.stop_reason not in (self.params.stop or ())
        assert output.prompt_token_ids is not None
        context = search_text_context(output.prompt_token_ids, self._decode)
        step = SampledStep(
            self._text(context, sampled),
            sampled.token_ids,
            sampled.cumulative_logprob or 0.0,
            None if is_delimiter else sampled.finish_reason,
            None if is_delimiter else sampled.stop_reason,
            Note(candidate_id, sampled.logprobs),
        )
        step = self._ended_by_stop_string(context, beam, step)
        return step if self.params.logprobs is not None else step._replace(note=Note(candidate_id, None))

    def _ended_by_stop_string(self, context: Context, beam: StepHypothesis, step: SampledStep) -> SampledStep:
        """Cut a step at the first stop string, which may have begun in earlier steps, or after a delimiter."""
        stops = self.params.stop or ()
        earlier = beam.text[-max(max(map(len, stops), default=1) - 1, 1) :]
        text = earlier + step.text
        found = [(text.find(stop, max(len(earlier) - len(stop) + 1, 0)), stop) for stop in stops]
        found = [(start - len(earlier), stop) for start, stop in found if start >= 0]
        if not found:
            return step
        start, stop = min(found, key=lambda of_one: of_one[0] + len(of_one[1]))
        end, tokens = start + len(stop), step.token_ids
        lengths, whole = range(len(tokens), 0, -1), step.text[:end]
        count = next(n for n in lengths if not self._text_after(context, tokens[: n - 1]).startswith(whole))
        logprobs = step.note.logprobs[:count]
        sum_logprobs = sum(of[token].logprob for token, of in zip(tokens[:count], logprobs, strict=True))
        is_included = self.params.include_stop_str_in_output
        return SampledStep(
            step.text[: end if is_included else max(start, 0)],
            tokens[:count],
            sum_logprobs,
            "stop",
            stop,
            step.note._replace(logprobs=logprobs),
            0 if is_included else max(-start, 0),
        )

    def _text(self, context: Context, sampled: CompletionOutput) -> str:
        """The text of all its tokens: vLLM cuts it at the delimiter, but the last token may go beyond that."""
        stops_by_token = sampled.finish_reason == "stop" and not isinstance(sampled.stop_reason, str)
        is_cut = stops_by_token and not self.params.include_stop_str_in_output
        return self._text_after(context, sampled.token_ids[: len(sampled.token_ids) - is_cut])

    def _text_after(self, context: Context, tokens: Sequence[int]) -> str:
        """The text of tokens that follow a context, without an incomplete last character."""
        before, text_before = context
        return search_text_after(text_before, self._decode([*before, *tokens])).rstrip(INCOMPLETE)

    @cached_property
    def _decode(self) -> Decode:
        has_spaces = self.params.spaces_between_special_tokens
        return detokenizing_function(self.tokenizer, self.params.skip_special_tokens, has_spaces)
