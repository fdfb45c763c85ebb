"""Beams over HTTP: `use_beam_search`, and `vllm_xargs={"beam_width": ...}`, at the OpenAI endpoints.

Responses take the latter alone; messages, as Anthropic has them, are chats to vLLM. Of transcriptions and translations
vLLM answers the best hypothesis alone: their `n` is a width, and nothing else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest
from vllm.exceptions import GenerationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams

from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.entrypoints.requests.refusals import BeamRequestError, refusing_requests, shortening_request_refusals
from vllm_trie.entrypoints.requests.requests import CALLER
from vllm_trie.messages import USE_BEAM_SEARCH, Caller
from vllm_trie.options.request import OPTIONS, options_ask_for_beams, refuse_other_option_names
from vllm_trie.options.shown import shown_option

TextRequest: TypeAlias = CompletionRequest | ChatCompletionRequest
SpeechRequest: TypeAlias = TranscriptionRequest | TranslationRequest

_SEARCHABLE = (CompletionRequest, ChatCompletionRequest, TranscriptionRequest, TranslationRequest)

NO_BEST_OF = ("best_of", 1)  # says nothing; clients that measure servers send it with every completion

ALL_AT_ONCE = ("compact", "trace", "beam_results")  # options: what they return comes with the whole answer

_IS_SERVED = "trie_beam_is_served"  # an attribute of parameters, which is no part of what is rendered of a prompt

_AS_SAMPLING = "trie_beam_as_sampling"  # in `vllm_xargs`, with a `Caller`, which no client can send


@wraps_vllm("to_sampling_params", *_SEARCHABLE, ResponsesRequest)
def to_served_sampling_params(
    original: Callable[..., SamplingParams],
    self: Any,
    max_tokens: int,
    default_sampling_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SamplingParams | BeamSearchParams:
    """Convert a request that may name a beam width in `vllm_xargs`, or be one of `as_served_sampling_request`."""
    xargs = self.vllm_xargs or {}
    if isinstance(xargs.get(_AS_SAMPLING), Caller):
        own = {name: value for name, value in xargs.items() if name != _AS_SAMPLING}
        request = self.model_copy(update={"use_beam_search": True, "vllm_xargs": own})
        return request.to_beam_search_params(max_tokens, default_sampling_params or {})
    if not options_ask_for_beams(xargs) and not options_ask_for_beams(self.model_extra or {}):
        return original(self, max_tokens, default_sampling_params or {}, **kwargs)
    _refuse_server_fields(self)
    _refuse_several_server_prompts(self)
    _refuse_two_server_penalties(self)
    if "length_penalty" in self.model_fields_set:
        xargs = {"length_penalty": self.length_penalty, **xargs}
    draws_steps = xargs.get("unit") == "step"  # by vLLM's own sampler
    defaults = {k: v for k, v in (default_sampling_params or {}).items() if draws_steps or k == "stop_token_ids"}
    fields: dict[str, Any] = {"vllm_xargs": {**xargs}}
    if isinstance(self, ChatCompletionRequest):
        fields["echo"] = False  # from which vLLM derives prompt_logprobs, as if the client had sent them
    with shortening_request_refusals():
        params = original(self.model_copy(update=fields), max_tokens, defaults, **kwargs)
    if isinstance(self, SpeechRequest):
        params.skip_clone = False  # a long recording is several prompts, which vLLM gives the same object
    if not draws_steps:  # else it is known, and each candidate is a request of its own
        mark_as_server_request(params)
    return params


def mark_as_server_request(params: SamplingParams) -> None:
    """Note that these are the parameters of a beam request that came to a server; copies of them lose the note."""
    vars(params)[_IS_SERVED] = True


def as_served_sampling_request(request: TextRequest) -> Any:
    """The request as vLLM streams it: one of `use_beam_search` it refuses, before it makes parameters of it."""
    if not request.use_beam_search:
        return request
    xargs = {**(request.vllm_xargs or {}), _AS_SAMPLING: USE_BEAM_SEARCH}
    return request.model_copy(update={"use_beam_search": False, "vllm_xargs": xargs})


@wraps_vllm("to_beam_search_params", *_SEARCHABLE)
def to_served_beam_params(
    original: Callable[..., BeamSearchParams], self: Any, *args: Any, **kwargs: Any
) -> BeamSearchParams:
    """Convert a `use_beam_search` request, and keep what vLLM's own parameters have no room for."""
    _refuse_server_fields(self)
    _refuse_two_server_penalties(self)
    if (self.vllm_xargs or {}).get("unit") == "step":
        raise BeamRequestError('unit="step" does not work with use_beam_search; put beam_width into vllm_xargs instead')
    with shortening_request_refusals():
        params = original(self, *args, **kwargs)
    params.request = self
    return params


def _refuse_server_fields(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse what a beam request says in vain: vLLM passes over fields that it does not know."""
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise BeamRequestError(
            f"logprobs={shown_option(request.logprobs)} with echo=True would tell of the prompt, where beams "
            "report nothing; "
            "leave one of them out"
        )
    extra = request.model_extra or {}
    unknown = {name: value for name, value in extra.items() if value is not None and (name, value) != NO_BEST_OF}
    for name, value in unknown.items():
        if name in OPTIONS:
            raise BeamRequestError(f'{name}={shown_option(value)} is no field of a request; pass it in "vllm_xargs"')
    with refusing_requests():
        refuse_other_option_names(unknown)


def _refuse_two_server_penalties(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse a field of the request that `vllm_xargs` contradicts."""
    xargs = request.vllm_xargs or {}
    if CALLER in xargs or isinstance(request, ResponsesRequest):  # the one became the other, or there is no such field
        return
    own = request.length_penalty
    other = xargs.get("length_penalty", own)
    if own not in (other, type(request).model_fields["length_penalty"].default):  # which forms fill in
        raise BeamRequestError(
            f"length_penalty={own} of the request is {shown_option(other)} in vllm_xargs; leave one of them out"
        )


@wraps_vllm("to_chat_completion_request", BatchChatCompletionRequest)
def single_served_chat(original: Callable[..., ChatCompletionRequest], self: Any, *args: Any) -> ChatCompletionRequest:
    """Convert one chat of several."""
    fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
    xargs = fields.get("vllm_xargs")
    if options_ask_for_beams(fields) or (isinstance(xargs, dict) and options_ask_for_beams(xargs)):
        raise BeamRequestError(
            "beam_width does not work at /v1/chat/completions/batch; send each chat to /v1/chat/completions"
        )
    return original(self, *args)


def num_server_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> int:
    """How many prompts a request has: for completions they may come as a list of texts, or of lists of tokens."""
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    return len(prompt) if prompt and isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _refuse_several_server_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Of several prompts vLLM's response has what comes with the engine's output for the first."""
    xargs = request.vllm_xargs or {}
    asked = [f"{name}=1" for name in ALL_AT_ONCE if xargs.get(name)]
    if asked and isinstance(request, SpeechRequest):
        raise BeamRequestError(f"{asked[0]} has no place in the answer at this endpoint; leave it out")
    asked += ['unit="step"'] if xargs.get("unit") == "step" else []
    what = next(iter(asked), None)
    if what is not None and (count := num_server_prompts(request)) > 1:
        raise BeamRequestError(f"{what} takes one prompt, and this request has {count}; send each by itself")


def is_server_request(params: Any) -> bool:
    """Whether these are the parameters of a beam request that came to a server."""
    return isinstance(params, SamplingParams) and _IS_SERVED in vars(params)


async def raise_errors_of_server(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a beam request that came to a server, which would not tell why one failed, or not even that.

    Raises:
        GenerationError: it failed; the server answers with the reason.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for hypothesis in output.outputs:
                if hypothesis.finish_reason == "error":
                    raise GenerationError(str(hypothesis.stop_reason or "Internal server error"))
            yield output


def end_response_without_calls(response: ChatCompletionResponse) -> None:
    """vLLM 0.32 says of all that stops that it calls tools, where they are required: also where there is nothing."""
    for choice in response.choices:
        if choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
            choice.finish_reason = "stop"
