"""Check beam requests in the front end, and stamp them so that their n outputs find together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_trie.params import TICKET, BeamParams, EngineLimits, GroupTicket, validate
from vllm_trie.patching import Patch, installed_vllm, record_of
from vllm_trie.plugin import SCHEDULER

if TYPE_CHECKING:
    from vllm.config import VllmConfig

process_inputs = Patch("vllm.v1.engine.input_processor:InputProcessor", "process_inputs")


def check_requests() -> None:
    """From now on, check the requests of every engine in this process.

    Raises:
        PatchError: this version of vLLM is not supported.
    """
    if not process_inputs.is_applied:
        record_of(installed_vllm()[0])
        process_inputs.apply(_checking(InputProcessor.process_inputs))


def _checking(original: Callable[..., EngineCoreRequest]) -> Callable[..., EngineCoreRequest]:
    @functools.wraps(original)
    def process_inputs(
        self: InputProcessor, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> EngineCoreRequest:
        beam = BeamParams.from_extra_args(params.extra_args) if isinstance(params, SamplingParams) else None
        if beam is not None and self.vllm_config.scheduler_config.scheduler_cls != SCHEDULER:
            raise ValueError(
                f"beam_width={beam.beam_width} on an engine without beam search; "
                f'start it with additional_config={{"trie_beam": {{}}}}'
            )
        request = original(self, request_id, prompt, params, *args, **kwargs)
        if beam is not None:
            _prepare(request, beam, self.vllm_config)
        return request

    return process_inputs


def _prepare(request: EngineCoreRequest, beam: BeamParams, vllm_config: VllmConfig) -> None:
    """Refuse what beam search cannot do for this request, and give it its ticket."""
    params = request.sampling_params
    assert params is not None
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        raise ValueError("beam_width works on prompts of text or tokens, not on prompt_embeds")
    if request.mm_features:
        raise ValueError("beam_width does not work on multimodal prompts; send text alone")
    if request.lora_request is not None:
        raise ValueError("beam_width does not work with a LoRA adapter; leave out lora_request")
    if request.resumable:
        raise ValueError("beam_width does not work with streaming input; send the prompt in one piece")
    validate(params, beam, len(request.prompt_token_ids), engine_limits(vllm_config))
    ticket = GroupTicket(key=random_uuid(), n=params.n)
    params.extra_args = {**(params.extra_args or {}), TICKET: asdict(ticket)}


def engine_limits(vllm_config: VllmConfig) -> EngineLimits:
    """What this engine can hold."""
    cache = vllm_config.cache_config
    return EngineLimits(
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        max_model_len=vllm_config.model_config.max_model_len,
        vocab_size=vllm_config.model_config.get_vocab_size(),
        block_size=cache.block_size,
        num_blocks=cache.num_gpu_blocks - 1 if cache.num_gpu_blocks else None,
    )
