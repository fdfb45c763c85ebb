"""Check beam requests in the front end, and stamp them so that their n outputs find together."""

from __future__ import annotations

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
from vllm_trie.entrypoints.limits import engine_limits, validate
from vllm_trie.messages import BEAM_WIDTH, LLM_BEAM_SEARCH, TICKET, Caller, GroupTicket
from vllm_trie.options import PLUGIN_NAME, BeamParams, TrieBeamConfig, resolve
from vllm_trie.selection import has_beams, why_without_beams

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


class BeamRequestError(VLLMValidationError, ValueError):
    """A request that beam search refuses: a ValueError offline, a 400 from the server."""


@contextmanager
def refusing(caller: Caller = BEAM_WIDTH) -> Iterator[None]:
    """Make every ValueError of the block a refusal of the request, in the words of who asks."""
    try:
        yield
    except ValueError as error:
        raise BeamRequestError(caller.in_its_words(str(error))) from None


CALLER = "trie_beam_caller"  # in `extra_args`: a `Caller`, which no client of a server can send

process_inputs = Patch("vllm.v1.engine.input_processor:InputProcessor", "process_inputs")
validate_spec_decode = Patch("vllm.sampling_params:SamplingParams", "_validate_spec_decode")


def check_requests() -> None:
    """From now on, check the requests of every engine in this process."""
    process_inputs.wrap(_check)
    validate_spec_decode.wrap(_validate_others)


def _check(
    original: Callable[..., EngineCoreRequest],
    self: InputProcessor,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> EngineCoreRequest:
    beam, caller = None, BEAM_WIDTH
    if isinstance(params, SamplingParams):
        caller = _caller(params)
        with refusing(caller):
            _refuse_without_kernel(params, self.vllm_config)
            beam = searches(params, self.vllm_config)
    request = original(self, request_id, prompt, params, *args, **kwargs)
    with refusing(caller):
        if request.sampling_params is not None and has_beams(self.vllm_config):
            _refuse_too_long(request.sampling_params)
        if beam is not None:
            _prepare(request, beam, caller, params.stop_token_ids, self)
    return request


def _caller(params: SamplingParams) -> Caller:
    said = (params.extra_args or {}).get(CALLER)
    return said if isinstance(said, Caller) else BEAM_WIDTH


def _refuse_without_kernel(params: SamplingParams, vllm_config: VllmConfig) -> None:
    if params.thinking_token_budget is not None and has_beams(vllm_config) and needs_cpu_kernels():
        raise ValueError(
            f"thinking_token_budget={params.thinking_token_budget} is not supported by {PLUGIN_NAME} on a CPU without "
            "Triton; leave it out, or start the engine without the plugin"
        )


def _validate_others(
    original: Callable[..., None], self: SamplingParams, speculative_config: SpeculativeConfig | None
) -> None:
    if "beam_width" not in (self.extra_args or {}):  # verifying a forest, beams honour min_p and logit_bias
        original(self, speculative_config)


def _refuse_too_long(params: SamplingParams) -> None:
    """Refuse lists that Model Runner V2 has no room for: it would end, and with it all other requests."""
    from vllm.v1.worker.gpu.sample import logit_bias  # not before a worker in this process has patched torch for a CPU

    masked = params.all_stop_token_ids if params.min_tokens else ()
    for name, tokens, most in (
        ("allowed_token_ids", params.allowed_token_ids or (), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias or (), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", masked, logit_bias.MAX_NUM_STOP_TOKEN_IDS),
    ):
        if len(tokens) > most:
            raise ValueError(
                f"{len(tokens)} {name} are more than the {most} that Model Runner V2 takes; leave some out"
            )


def searches(params: SamplingParams, vllm_config: VllmConfig) -> BeamParams | None:
    """The search that a request asks an engine for, if any.

    Raises:
        ValueError: naming the option, its value and what would work.
    """
    if TICKET in (params.extra_args or {}):
        raise ValueError(f"{TICKET} is a mark of the front end's own; leave it out")
    beam = BeamParams.from_extra_args(params.extra_args)
    if beam is None:
        return None
    if not has_beams(vllm_config):
        raise ValueError(f"beam_width={beam.beam_width} {why_without_beams(vllm_config)}")
    config = TrieBeamConfig.from_additional_config(vllm_config.additional_config)
    return resolve(beam, config, vllm_config.speculative_config is not None)


def _prepare(
    request: EngineCoreRequest,
    beam: BeamParams,
    caller: Caller,
    own_stop_token_ids: list[int] | None,
    processor: InputProcessor,
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
    if caller == LLM_BEAM_SEARCH:  # as many as vLLM's own loop returns, whatever max_logprobs allows
        params.logprobs = 2 * beam.beam_width
    eos_token_id = processor.renderer.get_eos_token_id()
    ticket = GroupTicket(random_uuid(), params.n, eos_token_id, beam.model_dump(), caller)
    others = {name: value for name, value in (params.extra_args or {}).items() if name != CALLER}
    params.extra_args = {**others, TICKET: asdict(ticket)}
