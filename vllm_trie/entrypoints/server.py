"""Beams over HTTP: `use_beam_search`, and `vllm_xargs={"beam_width": ...}`, at the OpenAI endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid

from vllm_trie.compat.patch import Patch, arguments
from vllm_trie.compat.versions import eos_token_ids, has_allowlist
from vllm_trie.entrypoints.requests import CALLER, BeamRequestError, refusing
from vllm_trie.messages import BEAM_WIDTH, USE_BEAM_SEARCH, Caller
from vllm_trie.options import BeamParams, refuse_other_names
from vllm_trie.selection import has_beams, why_without_beams

logger = init_logger("vllm.trie_beam.server")

_COMPLETION = "vllm.entrypoints.openai.completion.protocol:CompletionRequest"
_CHAT = "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"
beam_search = Patch("vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin", "beam_search")
conversions = [
    (Patch(request, "to_beam_search_params"), Patch(request, "to_sampling_params")) for request in (_COMPLETION, _CHAT)
]

# Beam search does not sample: what a client sends for that, or generation_config.json says, has no say in it.
_NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None}


def serve_beams() -> None:
    """From now on, the servers of this process search in the engine, where it has beams."""
    beam_search.wrap(_beam_search)
    for to_beam_search_params, to_sampling_params in conversions:
        to_beam_search_params.wrap(_to_beam_search_params)
        to_sampling_params.wrap(_to_sampling_params)


def _to_sampling_params(
    original: Callable[..., SamplingParams],
    self: Any,
    max_tokens: int,
    default_sampling_params: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SamplingParams:
    """Convert a request that may name a beam width in `vllm_xargs`."""
    xargs = self.vllm_xargs or {}
    if "beam_width" not in xargs and "beam_width" not in (self.model_extra or {}):
        return original(self, max_tokens, default_sampling_params or {}, **kwargs)
    _refuse_fields(self, BEAM_WIDTH)
    if "length_penalty" in self.model_fields_set:
        xargs = {"length_penalty": self.length_penalty, **xargs}
    defaults = {k: v for k, v in (default_sampling_params or {}).items() if k == "stop_token_ids"}
    return original(self.model_copy(update={"vllm_xargs": dict(xargs)}), max_tokens, defaults, **kwargs)


def _to_beam_search_params(
    original: Callable[..., BeamSearchParams], self: Any, *args: Any, **kwargs: Any
) -> BeamSearchParams:
    """Convert a `use_beam_search` request, and keep what vLLM's own parameters have no room for."""
    _refuse_fields(self, USE_BEAM_SEARCH)
    params = original(self, *args, **kwargs)
    params.request = self
    return params


def _refuse_fields(request: CompletionRequest | ChatCompletionRequest, caller: Caller) -> None:
    """Refuse what a beam request says in vain: vLLM passes over fields that it does not know."""
    if request.stream:
        raise BeamRequestError(f"stream=true is not supported together with {caller.feature}; leave it out")
    unknown = {name: value for name, value in (request.model_extra or {}).items() if value is not None}
    for name, value in unknown.items():
        if name in BeamParams.model_fields:
            raise BeamRequestError(f'{name}={value!r} is no field of a request; pass it in "vllm_xargs"')
    with refusing(caller):
        refuse_other_names(unknown)


async def _beam_search(
    original: Callable[..., AsyncGenerator[RequestOutput, None]], self: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    given = arguments(original, self, *args, **kwargs)  # 0.33 has one more, the request's priority
    prompt, params = given["prompt"], given["params"]
    request: CompletionRequest | ChatCompletionRequest | None = vars(params).get("request")
    refusal = None
    if not has_beams(self.engine_client.vllm_config):
        refusal = why_without_beams(self.engine_client.vllm_config)
    elif request is None:
        refusal = "at this endpoint"
    elif prompt["type"] != "token":
        refusal = "on prompts that are not text or tokens"
    elif has_allowlist(params):
        refusal = "with allowed_token_ids"
    if refusal is not None:
        logger.info_once("use_beam_search %s: vLLM's own client loop runs it, not the engine", refusal)
        outputs = original(self, *args, **kwargs)
    else:
        assert request is not None
        outputs = self.engine_client.generate(
            prompt,
            _sampling_params(request, params.max_tokens),
            f"{given['request_id']}-{random_uuid()}",
            lora_request=given["lora_request"],
            trace_headers=given["trace_headers"],
            priority=request.priority,
            session_id=given["session_id"],
        )
    async for output in outputs:
        if refusal is None:
            eos_token_id = self.renderer.get_tokenizer().eos_token_id
            generation_config = self.engine_client.input_processor.generation_config_fields
            _as_vllm_returns_it(output, eos_token_id, eos_token_ids(generation_config, eos_token_id), params)
        yield output


def _sampling_params(request: CompletionRequest | ChatCompletionRequest, max_tokens: int) -> SamplingParams:
    """All of a `use_beam_search` request: its `n` is the width, unless `vllm_xargs` names another."""
    xargs: dict[str, Any] = {"beam_width": request.n or 1, "semantics": "vllm", **(request.vllm_xargs or {})}
    has_width = "beam_width" in (request.vllm_xargs or {})
    xargs[CALLER] = USE_BEAM_SEARCH._replace(width="beam_width") if has_width else USE_BEAM_SEARCH
    xargs.setdefault("length_penalty", request.length_penalty)
    return request.model_copy(update={**_NO_SAMPLING, "vllm_xargs": xargs}).to_sampling_params(max_tokens, {})


def _as_vllm_returns_it(
    output: RequestOutput, eos_token_id: int | None, eos_token_ids: set[int], params: BeamSearchParams
) -> None:
    """vLLM's own loop names the EOS token as stop reason, and leaves it out of the tokens unless told otherwise."""
    for hypothesis in output.outputs:
        if hypothesis.finish_reason == "stop" and hypothesis.stop_reason is None:
            hypothesis.stop_reason = eos_token_id
        if hypothesis.stop_reason in eos_token_ids and not params.include_stop_str_in_output:
            hypothesis.token_ids = hypothesis.token_ids[:-1]
