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
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid

from vllm_trie.compat.patch import arguments, wraps
from vllm_trie.compat.versions import eos_token_ids, has_allowlist
from vllm_trie.entrypoints.requests import CALLER, BeamRequestError, refusing, why_not_behind
from vllm_trie.messages import BEAM_WIDTH, USE_BEAM_SEARCH, Caller
from vllm_trie.options.matrix import OF_HF
from vllm_trie.options.request import OPTIONS, asks_for_beams, refuse_other_names
from vllm_trie.selection import has_beams, why_without_beams

logger = init_logger("vllm.trie_beam.server")

TextRequest: TypeAlias = CompletionRequest | ChatCompletionRequest
SpeechRequest: TypeAlias = TranscriptionRequest | TranslationRequest

_SEARCHABLE = (CompletionRequest, ChatCompletionRequest, TranscriptionRequest, TranslationRequest)

# Beam search does not sample: what a client sends for that, or generation_config.json says, has no say in it.
_NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None}

NO_BEST_OF = ("best_of", 1)  # says nothing; clients that measure servers send it with every completion

ALL_AT_ONCE = ("compact", "trace", "beam_results")  # options: what they return comes with the whole answer

_AS_SAMPLING = "trie_beam_as_sampling"  # in `vllm_xargs`, with a `Caller`, which no client can send


@wraps("to_sampling_params", *_SEARCHABLE, ResponsesRequest)
def to_sampling_params(
    original: Callable[..., SamplingParams],
    self: Any,
    max_tokens: int,
    default_sampling_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SamplingParams | BeamSearchParams:
    """Convert a request that may name a beam width in `vllm_xargs`, or be one of `as_sampling_request`."""
    xargs = self.vllm_xargs or {}
    if isinstance(xargs.get(_AS_SAMPLING), Caller):
        own = {name: value for name, value in xargs.items() if name != _AS_SAMPLING}
        request = self.model_copy(update={"use_beam_search": True, "vllm_xargs": own})
        return request.to_beam_search_params(max_tokens, default_sampling_params or {})
    if not asks_for_beams(xargs) and not asks_for_beams(self.model_extra or {}):
        return original(self, max_tokens, default_sampling_params or {}, **kwargs)
    _refuse_fields(self)
    _refuse_several_prompts(self)
    _refuse_two_penalties(self)
    if "length_penalty" in self.model_fields_set:
        xargs = {"length_penalty": self.length_penalty, **xargs}
    draws_steps = xargs.get("unit") == "step"  # by vLLM's own sampler
    defaults = {k: v for k, v in (default_sampling_params or {}).items() if draws_steps or k == "stop_token_ids"}
    fields: dict[str, Any] = {"vllm_xargs": {**xargs} if draws_steps else {CALLER: BEAM_WIDTH, **xargs}}
    if isinstance(self, ChatCompletionRequest):
        fields["echo"] = False  # from which vLLM derives prompt_logprobs, as if the client had sent them
    params = original(self.model_copy(update=fields), max_tokens, defaults, **kwargs)
    if isinstance(self, SpeechRequest):
        params.skip_clone = False  # a long recording is several prompts, which vLLM gives the same object
    return params


def as_sampling_request(request: TextRequest) -> Any:
    """The request as vLLM streams it: one of `use_beam_search` it refuses, before it makes parameters of it."""
    if not request.use_beam_search:
        return request
    xargs = {**(request.vllm_xargs or {}), _AS_SAMPLING: USE_BEAM_SEARCH}
    return request.model_copy(update={"use_beam_search": False, "vllm_xargs": xargs})


@wraps("to_beam_search_params", *_SEARCHABLE)
def to_beam_search_params(
    original: Callable[..., BeamSearchParams], self: Any, *args: Any, **kwargs: Any
) -> BeamSearchParams:
    """Convert a `use_beam_search` request, and keep what vLLM's own parameters have no room for."""
    _refuse_fields(self)
    _refuse_two_penalties(self)
    if (self.vllm_xargs or {}).get("unit") == "step":
        raise BeamRequestError('unit="step" does not work with use_beam_search; put beam_width into vllm_xargs instead')
    params = original(self, *args, **kwargs)
    params.request = self
    return params


def _refuse_fields(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse what a beam request says in vain: vLLM passes over fields that it does not know."""
    if isinstance(request, CompletionRequest) and request.echo and request.logprobs is not None:
        raise BeamRequestError(
            f"logprobs={request.logprobs} with echo=True would tell of the prompt, where beams report nothing; leave "
            "one of them out"
        )
    extra = request.model_extra or {}
    unknown = {name: value for name, value in extra.items() if value is not None and (name, value) != NO_BEST_OF}
    for name, value in unknown.items():
        if name in OPTIONS:
            raise BeamRequestError(f'{name}={value!r} is no field of a request; pass it in "vllm_xargs"')
    with refusing():
        refuse_other_names(unknown)


def _refuse_two_penalties(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Refuse a field of the request that `vllm_xargs` contradicts."""
    xargs = request.vllm_xargs or {}
    if CALLER in xargs or isinstance(request, ResponsesRequest):  # the one became the other, or there is no such field
        return
    own = request.length_penalty
    other = xargs.get("length_penalty", own)
    if own not in (other, type(request).model_fields["length_penalty"].default):  # which forms fill in
        raise BeamRequestError(f"length_penalty={own} of the request is {other!r} in vllm_xargs; leave one of them out")


@wraps("to_chat_completion_request", BatchChatCompletionRequest)
def single_chat(original: Callable[..., ChatCompletionRequest], self: Any, *args: Any) -> ChatCompletionRequest:
    """Convert one chat of several."""
    fields = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
    xargs = fields.get("vllm_xargs")
    if asks_for_beams(fields) or (isinstance(xargs, dict) and asks_for_beams(xargs)):
        raise BeamRequestError(
            "beam_width does not work at /v1/chat/completions/batch; send each chat to /v1/chat/completions"
        )
    return original(self, *args)


def num_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> int:
    """How many prompts a request has: for completions they may come as a list of texts, or of lists of tokens."""
    prompt = request.prompt if isinstance(request, CompletionRequest) else None
    return len(prompt) if prompt and isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def _refuse_several_prompts(request: TextRequest | ResponsesRequest | SpeechRequest) -> None:
    """Of several prompts vLLM's response has what comes with the engine's output for the first."""
    xargs = request.vllm_xargs or {}
    asked = [f"{name}=1" for name in ALL_AT_ONCE if xargs.get(name)]
    if asked and isinstance(request, SpeechRequest):
        raise BeamRequestError(f"{asked[0]} has no place in the answer at this endpoint; leave it out")
    asked += ['unit="step"'] if xargs.get("unit") == "step" else []
    what = next(iter(asked), None)
    if what is not None and (count := num_prompts(request)) > 1:
        raise BeamRequestError(f"{what} takes one prompt, and this request has {count}; send each by itself")


def is_served(params: Any) -> bool:
    """Whether these are the parameters of a beam request that came to a server."""
    return isinstance(params, SamplingParams) and CALLER in (params.extra_args or {})


async def raise_errors(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
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


@wraps("beam_search", "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin")
async def beam_search(
    original: Callable[..., AsyncGenerator[RequestOutput, None]], self: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    """Servers search in the engine, where it has beams."""
    call = arguments(original, self, *args, **kwargs)  # 0.33 has one more, the request's priority
    prompt, params = call["prompt"], call["params"]
    request: TextRequest | SpeechRequest | None = vars(params).get("request")
    refusal = None
    if not has_beams(self.engine_client.vllm_config):
        refusal = why_without_beams(self.engine_client.vllm_config)
    elif request is None:
        refusal = "at this endpoint"
    elif has_allowlist(params):
        refusal = "with allowed_token_ids"
    else:
        refusal = why_not_behind(prompt, self.engine_client.vllm_config)
    if refusal is not None:
        logger.info_once("use_beam_search %s: vLLM's own client loop runs it, not the engine", refusal)
    if refusal is not None or _is_over_at_once(params):
        outputs = original(self, *args, **kwargs)
    else:
        assert request is not None
        outputs = self.engine_client.generate(
            prompt,
            _sampling_params(request, params, self.model_config.max_logprobs),
            f"{call['request_id']}-{random_uuid()}",
            lora_request=call["lora_request"],
            trace_headers=call["trace_headers"],
            priority=0 if isinstance(request, SpeechRequest) else request.priority,
            session_id=call["session_id"],
        )
    async for output in outputs:
        if refusal is None:
            eos_token_id = self.renderer.get_tokenizer().eos_token_id
            generation_config = self.engine_client.input_processor.generation_config_fields
            _as_vllm_returns_it(output, eos_token_id, eos_token_ids(generation_config, eos_token_id), params)
        yield output


def _is_over_at_once(params: BeamSearchParams) -> bool:
    """Whether vLLM's own loop asks the engine for nothing, and answers with one empty hypothesis."""
    return params.max_tokens == 0 and OPTIONS.keys().isdisjoint(vars(params)["request"].vllm_xargs or {})


def _sampling_params(
    request: TextRequest | SpeechRequest, params: BeamSearchParams, max_logprobs: int
) -> SamplingParams:
    """All of a `use_beam_search` request: its `n` is the width, unless `vllm_xargs` names another."""
    xargs: dict[str, Any] = dict(request.vllm_xargs or {})
    if not (has_width := asks_for_beams(xargs)):
        xargs["beam_width"] = request.n or 1
    if all(xargs.get(name, neutral := OPTIONS[name].default) == neutral for name in OF_HF):
        xargs.setdefault("semantics", "vllm")
    xargs[CALLER] = USE_BEAM_SEARCH._replace(width="beam_width") if has_width else USE_BEAM_SEARCH
    xargs.setdefault("length_penalty", request.length_penalty)
    copied = request.model_copy(update={**_NO_SAMPLING, "vllm_xargs": xargs})
    sampling_params = copied.to_sampling_params(params.max_tokens, {})
    if isinstance(request, SpeechRequest):
        sampling_params.temperature = 1.0  # where vLLM's default is to take the likeliest token
        sampling_params.logprobs = vars(params).get("logprobs")  # for the segments of a verbose answer
    if (asked := sampling_params.logprobs) is not None:
        sampling_params.logprobs = _num_logprobs(asked, 2 * params.beam_width, max_logprobs)
    return sampling_params


def _num_logprobs(asked: int, vllms_own: int, most: int) -> int:
    """vLLM's own loop reports as many log-probabilities as it has, `vllms_own`, however many are asked for."""
    num = vllms_own if asked == -1 else asked
    return num if most == -1 else min(num, most)


def _as_vllm_returns_it(
    output: RequestOutput, eos_token_id: int | None, eos_token_ids: set[int], params: BeamSearchParams
) -> None:
    """vLLM's own loop names the EOS token as stop reason, and leaves it out of the tokens unless told otherwise."""
    if _is_over_at_once(params):
        output.outputs[0].token_ids = _Tokens()
        return
    for hypothesis in output.outputs:
        if not hypothesis.token_ids or hypothesis.token_ids[-1] not in eos_token_ids:  # it ends with an item, say
            continue
        if hypothesis.finish_reason == "stop" and hypothesis.stop_reason is None:
            hypothesis.stop_reason = eos_token_id
        if hypothesis.stop_reason in eos_token_ids and not params.include_stop_str_in_output:
            hypothesis.token_ids = _Tokens(hypothesis.token_ids[:-1])


def end_without_calls(response: ChatCompletionResponse) -> None:
    """vLLM 0.32 says of all that stops that it calls tools, where they are required: also where there is nothing."""
    for choice in response.choices:
        if choice.finish_reason == "tool_calls" and not choice.message.tool_calls:
            choice.finish_reason = "stop"


class _Tokens(list[int]):
    """Tokens of a stream's last part, perhaps none: vLLM takes what is false for no part at all."""

    def __bool__(self) -> bool:
        return True
