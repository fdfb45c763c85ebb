"""Beams over HTTP: `use_beam_search`, and `vllm_xargs={"beam_width": ...}`, at the OpenAI endpoints.

Responses take only the latter; vLLM handles Anthropic's messages as chats. For transcriptions and translations vLLM
returns only the best hypothesis, so that their `n` is only a width.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
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
from vllm_trie.options.matrix import OF_HF, options_clash
from vllm_trie.options.request import OPTIONS, options_ask_for_beams, refuse_other_option_names
from vllm_trie.options.shown import shown_option

TextRequest: TypeAlias = CompletionRequest | ChatCompletionRequest
SpeechRequest: TypeAlias = TranscriptionRequest | TranslationRequest

_SEARCHABLE = (CompletionRequest, ChatCompletionRequest, TranscriptionRequest, TranslationRequest)

NO_BEST_OF = ("best_of", 1)  # has no effect; benchmark clients send it with every completion

ALL_AT_ONCE = ("compact", "trace", "beam_results")  # options whose results come with the whole answer

_IS_SERVED = "trie_beam_is_served"  # an attribute of parameters, and so not serialized

_DEFAULTS = ("stop_token_ids", "skip_special_tokens")  # of the server that a search heeds: what does not sample

_AS_SAMPLING = "trie_beam_as_sampling"  # in `vllm_xargs`, with a `Caller`, which clients cannot send


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
    samples_steps = xargs.get("unit") == "step"  # by vLLM's sampler
    defaults = {k: v for k, v in (default_sampling_params or {}).items() if samples_steps or k in _DEFAULTS}
    fields: dict[str, Any] = {"vllm_xargs": {**xargs}}
    if isinstance(self, ChatCompletionRequest):
        fields["echo"] = False  # otherwise vLLM derives prompt_logprobs from it
    with shortening_request_refusals():
        params = original(self.model_copy(update=fields), max_tokens, defaults, **kwargs)
    if isinstance(self, SpeechRequest):
        params.skip_clone = False  # a long recording is several prompts with the same params object
    if not samples_steps:  # a search by steps makes a request per candidate
        mark_as_server_request(params)
    return params


def mark_as_server_request(params: SamplingParams) -> None:
    """Mark parameters as those of a beam request to a server; copies lose the mark."""
    vars(params)[_IS_SERVED] = True


def as_served_sampling_request(request: TextRequest) -> Any:
    """A copy of a `use_beam_search` request that vLLM will stream: it refuses to stream the original."""
    if not request.use_beam_search:
        return request
    xargs = {**(request.vllm_xargs or {}), _AS_SAMPLING: USE_BEAM_SEARCH}
    return request.model_copy(update={"use_beam_search": False, "vllm_xargs": xargs})


@wraps_vllm("to_beam_search_params", *_SEARCHABLE)
def to_served_beam_params(
    original: Callable[..., BeamSearchParams], self: Any, *args: Any, **kwargs: Any
) -> BeamSearchParams:
    """Convert a `use_beam_search` request, and attach it to the parameters, which lack some of its fields."""
    _refuse_server_fields(self, uses_beam_search=True)
    _refuse_two_server_penalties(self)
    if (self.vllm_xargs or {}).get("unit") == "step":
        raise BeamRequestError('unit="step" does not work with use_beam_search; put beam_width into vllm_xargs instead')
    with shortening_request_refusals():
        params = original(self, *args, **kwargs)
    params.request = self
    return params


def _refuse_server_fields(
    request: TextRequest | ResponsesRequest | SpeechRequest, uses_beam_search: bool = False
) -> None:
    """Refuse fields that would have no effect: vLLM ignores fields that it does not know."""
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise BeamRequestError(
            f"logprobs={shown_option(request.logprobs)} with echo=True asks for log-probabilities of the prompt, which "
            "beams do not report; leave one of them out"
        )
    extra, xargs = request.model_extra or {}, request.vllm_xargs or {}
    unknown = {name: value for name, value in extra.items() if value is not None and (name, value) != NO_BEST_OF}
    for name, value in unknown.items():
        if name in OPTIONS:
            by_vllms_rules = uses_beam_search and served_by_vllms_rules(request, {**xargs, name: value})
            clashes = by_vllms_rules and options_clash({name: value, "semantics": "vllm"})
            where = '"vllm_xargs" with semantics="hf"' if clashes else '"vllm_xargs"'
            raise BeamRequestError(f"{name}={shown_option(value)} is not a field of a request; pass it in {where}")
    with refusing_requests():
        refuse_other_option_names(unknown, n_is_width=uses_beam_search and not options_ask_for_beams(xargs))


def served_by_vllms_rules(request: TextRequest | ResponsesRequest | SpeechRequest, xargs: Mapping[str, Any]) -> bool:
    """Whether vLLM's rules are the default of a `use_beam_search` request with these `vllm_xargs`.

    They are not for speech, whose end they would repeat up to `max_tokens`.
    """
    if isinstance(request, SpeechRequest) or "semantics" in xargs:
        return False
    return all(xargs.get(name, neutral := OPTIONS[name].default) == neutral for name in OF_HF)


def _refuse_two_server_penalties(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse a field of the request that `vllm_xargs` contradicts."""
    xargs = request.vllm_xargs or {}
    if CALLER in xargs or isinstance(request, ResponsesRequest):  # already merged, or without this field
        return
    own = request.length_penalty
    other = xargs.get("length_penalty", own)
    if own not in (other, type(request).model_fields["length_penalty"].default):  # forms fill in defaults
        raise BeamRequestError(
            f"length_penalty={own} of the request is {shown_option(other)} in vllm_xargs; leave one of them out"
        )


@wraps_vllm("to_chat_completion_request", BatchChatCompletionRequest)
def single_served_chat(original: Callable[..., ChatCompletionRequest], self: Any, *args: Any) -> ChatCompletionRequest:
    """Convert one chat of a batch, and refuse beams in it."""
    fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
    xargs = fields.get("vllm_xargs")
    if options_ask_for_beams(fields) or (isinstance(xargs, dict) and options_ask_for_beams(xargs)):
        raise BeamRequestError(
            "beam_width does not work at /v1/chat/completions/batch; send each chat to /v1/chat/completions"
        )
    return original(self, *args)


def num_server_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> int:
    """How many prompts a request has: a completion may have lists of texts, of lists of tokens, and of embeddings."""
    if not isinstance(request, CompletionRequest):
        return 1
    prompt, embeds = request.prompt, request.prompt_embeds
    is_list = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    num_texts = len(prompt) if is_list else prompt is not None
    return max(num_texts + (len(embeds) if isinstance(embeds, list) else embeds is not None), 1)


def _refuse_several_server_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse several prompts with options whose results vLLM's response has only for the first prompt."""
    xargs = request.vllm_xargs or {}
    asked = [f"{name}=1" for name in ALL_AT_ONCE if xargs.get(name)]
    if asked and isinstance(request, SpeechRequest):
        raise BeamRequestError(f"{asked[0]} is not supported at this endpoint; leave it out")
    asked += ['unit="step"'] if xargs.get("unit") == "step" else []
    what = next(iter(asked), None)
    if what is not None and (count := num_server_prompts(request)) > 1:
        raise BeamRequestError(f"{what} takes one prompt, and this request has {count}; send each separately")


def is_server_request(params: Any) -> bool:
    """Whether these are the parameters of a beam request that came to a server."""
    return isinstance(params, SamplingParams) and _IS_SERVED in vars(params)


async def raise_errors_of_server(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a beam request to a server, which would otherwise hide the reason of a failure, or the failure.

    Raises:
        GenerationError: the request failed; the server answers with the reason.
    """
    async with aclosing(outputs):
        async for output in outputs:
            for hypothesis in output.outputs:
                if hypothesis.finish_reason == "error":
                    raise GenerationError(str(hypothesis.stop_reason or "Internal server error"))
            yield output


def end_response_without_calls(response: ChatCompletionResponse) -> None:
    """Correct vLLM 0.32, which with required tools reports "tool_calls" for every stop, even without a call."""
    for choice in response.choices:
        if choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
            choice.finish_reason = "stop"
