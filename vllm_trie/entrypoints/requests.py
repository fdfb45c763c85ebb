"""Check beam requests in the front end, and stamp them so that their n outputs find together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_trie.compat.cpu import needs_cpu_kernels
from vllm_trie.compat.patch import Patch
from vllm_trie.compat.versions import own_beams
from vllm_trie.config import PLUGIN_NAME, TrieBeamConfig
from vllm_trie.messages import TICKET, GroupTicket
from vllm_trie.params import BeamParams, EngineLimits, validate
from vllm_trie.selection import has_beams, why_without_beams
from vllm_trie.speculation_options import OPTIONS, resolve

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


class BeamRequestError(VLLMValidationError, ValueError):
    """A request that beam search refuses: a ValueError offline, a 400 from the server."""


@contextmanager
def refusing() -> Iterator[None]:
    """Make every ValueError of the block a refusal of the request."""
    try:
        yield
    except ValueError as error:
        raise BeamRequestError(str(error)) from None


FROM_LLM_BEAM_SEARCH = "trie_beam_from_llm"  # in `extra_args`: True, which no client of a server can send

process_inputs = Patch("vllm.v1.engine.input_processor:InputProcessor", "process_inputs")
validate_spec_decode = Patch("vllm.sampling_params:SamplingParams", "_validate_spec_decode")


def check_requests() -> None:
    """From now on, check the requests of every engine in this process."""
    if not process_inputs.is_applied:
        process_inputs.apply(_checking(InputProcessor.process_inputs))
        validate_spec_decode.apply(_for_others(SamplingParams._validate_spec_decode))


def _checking(original: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
    @functools.wraps(original)
    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        beam = None
        if isinstance(params, SamplingParams):
            with refusing():
                _refuse_without_kernel(params, self.vllm_config)
                beam = searches(params, self.vllm_config)
        request = original(self, request_id, prompt, params, *args, **kwargs)
        with refusing():
            if request.sampling_params is not None and has_beams(self.vllm_config):
                _refuse_too_long(request.sampling_params)
            if beam is not None:
                _prepare(request, beam, params.stop_token_ids, self)
        return request

    return process_inputs


def _refuse_without_kernel(params: SamplingParams, vllm_config: VllmConfig) -> None:
    if params.thinking_token_budget is not None and has_beams(vllm_config) and needs_cpu_kernels():
        raise ValueError(
            f"thinking_token_budget={params.thinking_token_budget} is not supported by {PLUGIN_NAME} on a CPU without "
            "Triton; leave it out, or start the engine without the plugin"
        )


def _for_others(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def validate_spec_decode(self: SamplingParams, speculative_config: SpeculativeConfig | None) -> None:
        if "beam_width" not in (self.extra_args or {}):  # verifying a forest, beams honour min_p and logit_bias
            original(self, speculative_config)

    return validate_spec_decode


def _refuse_too_long(params: SamplingParams) -> None:
    """Refuse lists that Model Runner V2 has no room for: it would end, and with it all other requests."""
    from vllm.v1.worker.gpu.sample import logit_bias  # not before a worker in this process has patched torch for a CPU

    lists = {
        "allowed_token_ids": (len(params.allowed_token_ids or ()), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        "logit_bias": (len(params.logit_bias or ()), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        "stop_token_ids with min_tokens": (
            len(params.all_stop_token_ids) if params.min_tokens else 0,
            logit_bias.MAX_NUM_STOP_TOKEN_IDS,
        ),
    }
    for name, (length, most) in lists.items():
        if length > most:
            raise ValueError(f"{length} {name} are more than the {most} that Model Runner V2 takes; leave some out")


def searches(params: SamplingParams, vllm_config: VllmConfig) -> BeamParams | None:
    """The search that a request asks an engine for, if any.

    Raises:
        ValueError: naming the option, its value and what would work.
    """
    config = TrieBeamConfig.from_additional_config(vllm_config.additional_config)
    beam = BeamParams.from_extra_args(params.extra_args, config.semantics)
    if beam is None:
        return None
    if not has_beams(vllm_config):
        raise ValueError(f"beam_width={beam.beam_width} {why_without_beams(vllm_config)}")
    has_drafts = vllm_config.speculative_config is not None
    return resolve(beam, config, has_drafts)


def _prepare(
    request: EngineCoreRequest, beam: BeamParams, own_stop_token_ids: list[int] | None, processor: InputProcessor
) -> None:
    """Refuse what beam search cannot do for this request, and give it its ticket."""
    params = request.sampling_params
    assert params is not None
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("beam_width works on prompts of text or tokens, not on prompt_embeds")
    if request.mm_features:
        raise ValueError("beam_width does not work on multimodal prompts; send text alone")
    if request.resumable:
        raise ValueError("beam_width does not work with streaming input; send the prompt in one piece")
    if params.output_kind is RequestOutputKind.DELTA:
        raise ValueError("beam_width does not work with stream=true: hypotheses are known when the search is over")
    if params.stop and processor.tokenizer is None:
        raise ValueError("stop strings need a tokenizer; start the engine without skip_tokenizer_init")
    if beam.semantics == "vllm" and not own_beams().stops_by_generation_config:
        params.stop_token_ids = list(own_stop_token_ids or ())
    validate(params, beam, len(request.prompt_token_ids), engine_limits(processor.vllm_config))
    extra_args = dict(params.extra_args or {})
    offline = extra_args.pop(FROM_LLM_BEAM_SEARCH, None) is True
    if offline:  # as many as vLLM's own loop returns, whatever max_logprobs allows
        params.logprobs = 2 * beam.beam_width
    ticket = GroupTicket(random_uuid(), params.n, processor.renderer.get_eos_token_id(), offline)
    extra_args |= {name: value for name in OPTIONS if (value := getattr(beam, name)) is not None}
    params.extra_args = {**extra_args, "semantics": beam.semantics, TICKET: asdict(ticket)}


def engine_limits(vllm_config: VllmConfig) -> EngineLimits:
    """What this engine can hold."""
    cache = vllm_config.cache_config
    return EngineLimits(
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1 if cache.num_gpu_blocks else None,
        max_beam_width=TrieBeamConfig.from_additional_config(vllm_config.additional_config).max_beam_width,
        has_window=vllm_config.model_config.get_sliding_window() is not None,
    )
