"""Splits the single answer of a search into its n outputs, each made by vLLM's own code.

vLLM turns a request with `n` outputs into n requests. For a search the front end sends one, and splits its answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain
from typing import Any, TypeVar, cast

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestState
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.entrypoints.answers.hypothesis_texts import (
    HypothesisTexts,
    NoHypothesisTexts,
    can_share_hypothesis_texts,
)
from vllm_trie.entrypoints.output_hooks import completing_by_output_hooks
from vllm_trie.messages import HYPOTHESES, NO_HYPOTHESIS, TICKET, GroupTicketMessage, SentHypotheses
from vllm_trie.options import PLUGIN_NAME

NOTHING = SentHypotheses([], [], [], [])
MAKING = "trie_beam_making"  # attribute of a server's output: the iterator that makes its hypotheses
SECONDS_AT_ONCE = 0.005  # of work before other requests get a turn
LOGPROBS_AT_ONCE = 640  # that are processed between two looks at the clock: they take about as long

Output = TypeVar("Output", bound=RequestOutput | None)


@wraps_vllm("add_request", OutputProcessor)
def add_answer_state(
    original: Callable[..., None], self: OutputProcessor, request: EngineCoreRequest, *args: Any, **kwargs: Any
) -> None:
    """Give a request that is a search an `AnswerState`."""
    is_new = request.request_id not in self.request_states
    original(self, request, *args, **kwargs)
    if is_new and (ticket := GroupTicketMessage.of(request.sampling_params)) is not None:
        state = self.request_states[request.request_id]
        self.request_states[request.request_id] = AnswerState(state, request, self.tokenizer, ticket.n)


class AnswerState(RequestState):
    """The front end's state of a search. With a single output, which may be streamed, it acts as vLLM's.

    Args:
        state: vLLM's state of the request.
        tokenizer: The engine's, if it has one.
        n: Outputs.
    """

    def __init__(self, state: RequestState, request: EngineCoreRequest, tokenizer: Any, n: int) -> None:
        params = request.sampling_params
        assert params is not None
        self.__dict__.update(vars(state))
        self.n = n
        self._engine_tokenizer = tokenizer
        if n == 1:
            return
        self._one = state  # makes each output in turn
        self._request, self._tokenizer = _answer_state_without_data(request), tokenizer if params.detokenize else None
        self._kept = _KeptAnswerOutput()
        self.detokenizer = cast("IncrementalDetokenizer", self._kept)
        self.logprobs_processor = cast("LogprobsProcessor", self._kept)
        self._counts = _AnswerCounts(n)
        self.parent_req = cast("ParentRequest", self._counts)

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> RequestOutput | None:
        """See `RequestState`. A search with several outputs makes none before it has ended."""
        more = {**(kv_transfer_params or {})}
        answer = {**more.pop(PLUGIN_NAME, {})}
        sent = SentHypotheses(*answer.pop(HYPOTHESES, NOTHING))
        if answer:
            more[PLUGIN_NAME] = answer
        if sent.are_aborted:  # even if a stop token or a stop string ended the hypothesis
            finish_reason, stop_reason = FinishReason.ABORT, None
        if self.n == 1:
            of_one = new_token_ids, pooling_output, finish_reason, stop_reason, more or None
            return self._completed(super().make_request_output(*of_one, *args, **kwargs))
        if finish_reason is None:
            return None
        self._counts.longest = max(sent.lengths, default=0)
        making = chain(self._outputs(sent), self._without_hypotheses(len(sent.lengths), finish_reason, stop_reason))
        is_served = self.queue is not None
        made = [cast("CompletionOutput", None)] if is_served else [*filter(None, making)]  # vLLM reads the first one
        output = self._new_request_output(self.external_req_id, made, True, more or None, *args)
        if is_served:
            output.outputs.clear()
            vars(output)[MAKING] = making
        return self._completed(output)

    def _completed(self, output: Output) -> Output:
        """Complete an output; a server does so later, while other requests go on."""
        if self.queue is None:
            deque(completing_by_output_hooks(output, self._engine_tokenizer), maxlen=0)
        return output

    def _outputs(self, sent: SentHypotheses) -> Iterator[CompletionOutput | None]:
        """The outputs of hypotheses, and None whenever other requests may get a turn.

        vLLM's code makes one output per kind, which is copied for others of that kind, or all if they may differ more.
        """
        if not sent.lengths:
            return
        whole = self._kept.output
        assert whole is not None
        texts = self._texts(whole, sent.lengths)
        alike: dict[tuple[int, int, int | None], Callable[..., CompletionOutput]] = {}  # by kind, makes further outputs
        kinds = zip(sent.lengths, sent.finish_reasons, sent.stop_reasons, strict=True)
        of_each = zip(accumulate(sent.lengths), kinds, sent.cumulative_logprobs, strict=True)
        for index, (end, kind, total) in enumerate(of_each):
            length, reason, stop = kind
            tokens = whole.new_token_ids[end - length : end]
            if texts is not None and kind in alike:
                text = texts.text(index, tokens, reason == FinishReason.STOP)
                yield alike[kind](index=index, text=text, token_ids=tokens, cumulative_logprob=total)
                continue
            part = EngineCoreOutput("", tokens, finish_reason=FinishReason(reason), stop_reason=stop)
            if whole.new_logprobs is not None:
                part.new_logprobs = whole.new_logprobs.slice_request(end - length, length)
            output = yield from self._output(index, part, total)
            if sent.are_aborted:
                output.finish_reason, output.stop_reason = str(FinishReason.ABORT), None
            alike[kind] = partial(CompletionOutput, **vars(output))
            yield output

    def _texts(self, whole: EngineCoreOutput, lengths: list[int]) -> HypothesisTexts | NoHypothesisTexts | None:
        """Makes texts of hypotheses; None if hypotheses of one kind differ in more than tokens, text and sum."""
        assert self._request.sampling_params is not None
        if self._request.sampling_params.logprobs is not None:
            return None
        if self._tokenizer is None:
            return NoHypothesisTexts()
        detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, self._request)
        return (
            HypothesisTexts(detokenizer, whole.new_token_ids, lengths)
            if can_share_hypothesis_texts(detokenizer)
            else None
        )

    def _without_hypotheses(
        self, count: int, finish_reason: FinishReason, stop_reason: int | str | None
    ) -> Iterator[CompletionOutput | None]:
        """The outputs after the first `count`, without hypotheses: bans leave fewer, or the search failed."""
        for index in range(count, self.n):
            part = EngineCoreOutput("", [], finish_reason=finish_reason, stop_reason=stop_reason)
            if finish_reason is FinishReason.LENGTH:
                part.finish_reason = FinishReason.STOP
            if finish_reason is not FinishReason.ERROR and index > 0:
                part.stop_reason = NO_HYPOTHESIS
            yield (yield from self._output(index, part, None))

    def _output(
        self, index: int, part: EngineCoreOutput, total: float | None
    ) -> Generator[None, None, CompletionOutput]:
        """The output that vLLM makes of one hypothesis; yields when other requests may get a turn.

        Args:
            total: The sum of its log-probabilities; None without a hypothesis.
        """
        one, reason, stop = self._one, part.finish_reason, part.stop_reason
        one.request_index = index
        one.detokenizer = IncrementalDetokenizer()
        if part.new_token_ids:  # otherwise it would decode the prompt for nothing
            one.detokenizer = IncrementalDetokenizer.from_new_request(self._tokenizer, self._request)
        one.logprobs_processor = LogprobsProcessor.from_new_request(self._tokenizer, self._request)
        if stop_string := one.detokenizer.update(part.new_token_ids, reason == FinishReason.STOP):
            reason, stop = FinishReason.STOP, stop_string
            OutputProcessor._trim_surplus_tokens(one, part, 0)
        if part.new_logprobs is None:
            one.logprobs_processor.cumulative_logprob = total
        else:
            num_tokens = max(LOGPROBS_AT_ONCE // part.new_logprobs.logprobs.shape[1], 1)
            for start in range(0, len(part.new_token_ids), num_tokens):
                few = part.new_logprobs.slice_request(start, num_tokens)
                one.logprobs_processor.update_from_output(EngineCoreOutput("", [], few))
                yield
        return one._new_completion_output(part.new_token_ids, reason, stop)


async def whole_answer(output: RequestOutput, tokenizer: Any = None) -> RequestOutput:
    """Complete an output of a server. It may take seconds, during which other requests go on.

    Args:
        tokenizer: The engine's, if it has one.
    """
    begun = time.monotonic()
    for one in vars(output).pop(MAKING, ()):
        if one is not None:
            output.outputs.append(one)
        if time.monotonic() - begun > SECONDS_AT_ONCE:
            await asyncio.sleep(0)
            begun = time.monotonic()
    for _ in completing_by_output_hooks(output, tokenizer):
        await asyncio.sleep(0)
    return output


def _answer_state_without_data(request: EngineCoreRequest) -> EngineCoreRequest:
    """A copy of a request for its detokenizer, without images and item sets, which would be held during the search."""
    request = copy(request)
    request.mm_features, request.sampling_params = None, copy(request.sampling_params)
    assert request.sampling_params is not None
    request.sampling_params.extra_args = {TICKET: {}}  # see `entrypoints.answers.answer_start`
    return request


def empty_answer_outputs(
    params: SamplingParams, finish_reason: str, stop_reasons: Iterable[str | None]
) -> list[CompletionOutput]:
    """Empty outputs, one per stop reason, of a search that never reached the engine."""
    has_logprobs = params.logprobs is not None
    return [
        CompletionOutput(index, "", [], None, [] if has_logprobs else None, None, finish_reason, reason)
        for index, reason in enumerate(stop_reasons)
    ]


class _KeptAnswerOutput:
    """Replaces detokenizer and logprobs processor: keeps the engine's output until it is split."""

    prompt_logprobs = prompt_token_id_logprobs = None
    output: EngineCoreOutput | None = None

    def update(self, *_: Any) -> None:
        """Ignore the tokens, as stop strings are found once they are split."""

    def update_from_output(self, output: EngineCoreOutput) -> None:
        self.output = output

    def num_output_tokens(self) -> int:
        return 0

    def pop_prompt_logprobs(self) -> None:
        """None: searches have no prompt log-probabilities."""

    pop_prompt_token_id_logprobs = pop_prompt_logprobs


@dataclass
class _AnswerCounts:
    """Replaces vLLM's parent of a request with several outputs, as far as its metrics need one."""

    n: int
    longest: int = 0  # tokens of an output
    request_id: str = ""
    child_requests: set[str] = field(default_factory=set)

    def observe_num_generation_tokens(self, _: int) -> int:
        return self.longest
