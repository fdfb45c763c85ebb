"""Runs `use_beam_search` requests to servers in the engine, and answers them as vLLM's own beam search does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextvars import ContextVar
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams, SamplingParams
from vllm.utils import random_uuid

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.compat.versions import vllm_beams_eos_ids, vllm_beams_have_allowlist
from vllm_trie.entrypoints.requests.refusals import BeamRequestError, refusing_requests
from vllm_trie.entrypoints.requests.requests import CALLER, why_no_request_after
from vllm_trie.entrypoints.server.server import SpeechRequest, TextRequest, served_by_vllms_rules
from vllm_trie.messages import USE_BEAM_SEARCH
from vllm_trie.options.request import OPTIONS, options_ask_for_beams, refuse_other_option_names
from vllm_trie.options.shown import shown_option
from vllm_trie.supported_engines import has_beams, why_without_beams

logger = init_logger("vllm.trie_beam.server")

# The rank that the headers of the request that is being served name: vLLM's own beam search does not take one.
DATA_PARALLEL_RANK: ContextVar[int | None] = ContextVar("data_parallel_rank", default=None)

# Beam search does not sample: sampling fields of the client or of generation_config.json have no effect.
_NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None, "min_p": None, "seed": None}


@wraps_vllm("beam_search", "vllm.entrypoints.generate.beam_search.online:BeamSearchOnlineMixin")
async def serve_beam_search(
    original: Callable[..., AsyncGenerator[RequestOutput, None]], self: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[RequestOutput, None]:
    """Search in the engine if it has beams and supports the request, else in vLLM's own loop."""
    call = arguments_to_vllm(original, self, *args, **kwargs)  # 0.33 has one more, the request's priority
    prompt, params = call["prompt"], call["params"]
    request: TextRequest | SpeechRequest | None = vars(params).get("request")
    refusal = None
    if not has_beams(self.engine_client.vllm_config):
        refusal = why_without_beams(self.engine_client.vllm_config)
    elif request is None:
        refusal = "at this endpoint"
    elif vllm_beams_have_allowlist(params):
        refusal = "with allowed_token_ids"
    else:
        refusal = why_no_request_after(prompt, self.engine_client.vllm_config)
    if refusal is not None:
        _refuse_beam_options_of_vllm(request, refusal)
        logger.info_once("use_beam_search %s: vLLM's own client loop runs it, not the engine", refusal)
    if refusal is not None or _is_served_at_once(params):
        outputs = original(self, *args, **kwargs)
    else:
        assert request is not None
        outputs = self.engine_client.generate(
            prompt,
            _served_beam_search_params(request, params, self.model_config.max_logprobs),
            f"{call['request_id']}-{random_uuid()}",
            lora_request=call["lora_request"],
            trace_headers=call["trace_headers"],
            priority=0 if isinstance(request, SpeechRequest) else request.priority,
            session_id=call["session_id"],
            data_parallel_rank=DATA_PARALLEL_RANK.get(),
            **_served_reasoning(self, request, prompt),
        )
    async for output in outputs:
        if refusal is None:
            eos_token_id = self.renderer.get_tokenizer().eos_token_id
            generation_config = self.engine_client.input_processor.generation_config_fields
            _served_as_by_vllm(output, eos_token_id, vllm_beams_eos_ids(generation_config, eos_token_id), params)
        yield output


def _served_reasoning(self: Any, request: TextRequest | SpeechRequest, prompt: Any) -> dict[str, Any]:
    """What vLLM tells the engine of a chat's reasoning, except in its own beam search."""
    if not isinstance(request, ChatCompletionRequest) or self.parser_cls is None:
        return {}
    kwargs = self._effective_chat_template_kwargs(request)
    parser = self._make_parser(request, self.renderer.get_tokenizer(), kwargs)
    tokens = self._extract_prompt_components(prompt).token_ids
    return dict(self._engine_reasoning_kwargs(request, parser, kwargs, tokens))


def _refuse_beam_options_of_vllm(request: TextRequest | SpeechRequest | None, why: str) -> None:
    """Refuse options of the plugin where vLLM's own loop runs, which would ignore them."""
    xargs = (request and request.vllm_xargs) or {}
    if (name := next((name for name in xargs if name in OPTIONS), None)) is not None:
        shown = shown_option(xargs[name])
        raise BeamRequestError(
            f"use_beam_search {why}; {name}={shown} has no effect in vLLM's own loop: leave it or use_beam_search out"
        )


def _is_served_at_once(params: BeamSearchParams) -> bool:
    """Whether vLLM's own loop answers with one empty hypothesis without calling the engine."""
    return params.max_tokens == 0


def _served_beam_search_params(
    request: TextRequest | SpeechRequest, params: BeamSearchParams, max_logprobs: int
) -> SamplingParams:
    """The parameters of a `use_beam_search` request; its `n` is the width, unless `vllm_xargs` has one."""
    xargs: dict[str, Any] = dict(request.vllm_xargs or {})
    if not (has_width := options_ask_for_beams(xargs)):
        with refusing_requests():
            refuse_other_option_names(xargs, n_is_width=True)
        xargs["beam_width"] = request.n or 1
    if served_by_vllms_rules(request, xargs):
        xargs["semantics"] = "vllm"
    xargs[CALLER] = USE_BEAM_SEARCH._replace(width="beam_width") if has_width else USE_BEAM_SEARCH
    xargs.setdefault("length_penalty", request.length_penalty)
    copied = request.model_copy(update={**_NO_SAMPLING, "vllm_xargs": xargs})
    sampling_params = copied.to_sampling_params(params.max_tokens, {"skip_special_tokens": params.skip_special_tokens})
    if isinstance(request, SpeechRequest):
        sampling_params.temperature = 1.0  # vLLM's default here is greedy decoding
        sampling_params.logprobs = vars(params).get("logprobs")  # for the segments of a verbose answer
    if (asked := sampling_params.logprobs) is not None:
        sampling_params.logprobs = _num_served_logprobs(asked, 2 * params.beam_width, max_logprobs)
    return sampling_params


def _num_served_logprobs(asked: int, vllms_own: int, most: int) -> int:
    """The number of log-probabilities to report: of all, -1, vLLM's own loop reports `vllms_own`."""
    num = vllms_own if asked == -1 else asked
    return num if most == -1 else min(num, most)


def _served_as_by_vllm(
    output: RequestOutput, eos_token_id: int | None, eos_token_ids: set[int], params: BeamSearchParams
) -> None:
    """Answer as vLLM's loop: the EOS token is the stop reason, and is left out of the tokens unless requested."""
    if _is_served_at_once(params):
        output.outputs[0].token_ids = _Tokens()
        return
    for hypothesis in output.outputs:
        if not hypothesis.token_ids or hypothesis.token_ids[-1] not in eos_token_ids:  # such as an item's end
            continue
        if hypothesis.finish_reason == "stop" and hypothesis.stop_reason is None:
            hypothesis.stop_reason = eos_token_id
        ends = hypothesis.stop_reason in eos_token_ids or hypothesis.finish_reason == "abort"  # without stop reason
        if ends and not params.include_stop_str_in_output:
            hypothesis.token_ids = _Tokens(hypothesis.token_ids[:-1])


class _Tokens(list[int]):
    """Tokens of a stream's last part, true even if empty: vLLM would skip a part that is false."""

    def __bool__(self) -> bool:
        return True
