"""Checks beam requests in vLLM's `InputProcessor`, and sends each to the engine as one request, whatever its `n`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

from vllm_trie.compat.cpu import vllm_needs_cpu_kernels
from vllm_trie.compat.patch import wraps_vllm
from vllm_trie.compat.versions import own_vllm_beams
from vllm_trie.entrypoints.requests.limits import BlocksNeeded, request_limits_of_engine, validate_request
from vllm_trie.entrypoints.requests.refusals import (
    BeamRequestError,
    refuse_request_half_texts,
    refusing_requests,
    shortening_request_refusals,
)
from vllm_trie.entrypoints.requests.request_data import (
    BRINGS,
    READ,
    REASONING,
    RequestData,
    RequestReasoning,
    check_request_data,
    read_request_data,
)
from vllm_trie.messages import BEAM_WIDTH, FORK, LLM_BEAM_SEARCH, TICKET, Caller, ForkTicketMessage, GroupTicketMessage
from vllm_trie.options import OPTIONS, PLUGIN_NAME, BeamParams, StepOptions, options_ask_for_beams, parse_options
from vllm_trie.options.contrast import check_contrast_option
from vllm_trie.options.resolve import resolve_options
from vllm_trie.options.shown import shown_option, shown_option_name
from vllm_trie.options.table import cure_for_option
from vllm_trie.sampling_params import (
    refuse_sampling_params,
    sampling_params_have_grammar,
    sampling_params_stops,
)
from vllm_trie.speculative_config import speculative_config_drafts, speculative_config_without_amateur
from vllm_trie.supported_engines import (
    engine_has_logits_processors,
    has_beams,
    model_decoder_prompt,
    model_padding_token,
    model_suppressed_tokens,
    model_timestamp_rules,
    plugin_config_of,
    why_without_beams,
)

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig


CALLER = "trie_beam_caller"  # key of a `Caller` in `extra_args`; clients of a server cannot send one

SINGLE_TOKENS = "trie_beam_single_tokens"  # key of a `Caller`, see `entrypoints.server.single_tokens`

# Keys that only the front end may set in `extra_args`, and their types, which clients cannot send.
_MARKS = {
    TICKET: GroupTicketMessage,
    FORK: ForkTicketMessage,
    CALLER: Caller,
    SINGLE_TOKENS: Caller,
    READ: RequestData,
    REASONING: RequestReasoning,
}
_READ_BY_VLLM = {"kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "session_id"}  # in `extra_args`


@wraps_vllm("process_inputs", InputProcessor)
def process_request_inputs(
    original: Callable[..., EngineCoreRequest],
    self: InputProcessor,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> EngineCoreRequest:
    """Process a request as vLLM does, and give it a ticket if it asks for beams."""
    data = None
    if isinstance(params, BeamSearchParams):  # passed to `LLM.generate`, for example
        width, most = params.beam_width, params.max_tokens
        raise BeamRequestError(
            f"BeamSearchParams(beam_width={width}, ...) is only for LLM.beam_search; call that, or pass "
            f"vllm_trie.beam_params({width}, n={width}, max_tokens={most}) here"
        )
    try:
        if isinstance(params, SamplingParams):
            with refusing_requests():
                _refuse_request_without_kernel(params, self.vllm_config)
                data = RequestData.of(params) or read_request(params, self, self.tokenizer)
                params = params if data is None else data.instead_of_texts(params)
        with nullcontext() if data is None else shortening_request_refusals():
            request = original(self, request_id, prompt, params, *args, **kwargs)
        if (own := request.sampling_params) is None:
            return request
        with refusing_requests():
            if has_beams(self.vllm_config):
                _refuse_far_request_priority(request.priority)
                _refuse_long_request_lists(own)
                _fit_request_lengths(own, self.model_config.max_model_len)
            if data is not None:
                _prepare_request(request, data, _request_caller(params), params.stop_token_ids, self)
    except Exception:
        forget_unsent_request(self, prompt)
        raise
    if isinstance(ticket := (own.extra_args or {}).get(FORK), ForkTicketMessage):
        own.extra_args = {**(own.extra_args or {}), FORK: ticket._asdict()}  # for the engine's process to decode
    return request


def _request_caller(params: SamplingParams) -> Caller:
    caller = (params.extra_args or {}).get(CALLER)
    return caller if isinstance(caller, Caller) else BEAM_WIDTH


def _refuse_request_without_kernel(params: SamplingParams, vllm_config: VllmConfig) -> None:
    if params.thinking_token_budget is not None and has_beams(vllm_config) and vllm_needs_cpu_kernels():
        raise ValueError(
            f"thinking_token_budget={params.thinking_token_budget} is not supported by {PLUGIN_NAME} on a CPU without "
            "Triton; leave it out, or start the engine without the plugin"
        )


@wraps_vllm("_validate_spec_decode", SamplingParams)
def validate_request_spec_decode(
    original: Callable[..., None], self: SamplingParams, speculative_config: SpeculativeConfig | None
) -> None:
    if not options_ask_for_beams(self.extra_args or {}):  # in forests, beams support min_p and logit_bias
        original(self, speculative_config)


def _refuse_far_request_priority(priority: int) -> None:
    """Refuse a priority that cannot be sent to the engine: vLLM bounds it in the body, but not in a header."""
    if not -(1 << 63) <= priority < 1 << 63:
        raise ValueError(f"priority={shown_option(priority)} has more than 64 bits; pass one closer to 0")


def _refuse_long_request_lists(params: SamplingParams) -> None:
    """Refuse lists that Model Runner V2 has no room for: they would end the engine."""
    from vllm.v1.worker.gpu.sample import logit_bias  # here: a worker in this process must first patch torch for a CPU

    masked = params.all_stop_token_ids if params.min_tokens else ()
    bad = [token for word in params.bad_words_token_ids or () for token in word]
    for name, tokens, most in (
        ("tokens of bad_words", bad, envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
        ("allowed_token_ids", params.allowed_token_ids or (), logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", params.logit_bias or (), logit_bias.MAX_NUM_LOGIT_BIAS_TOKENS),
        ("stop_token_ids with min_tokens", masked, logit_bias.MAX_NUM_STOP_TOKEN_IDS),
    ):
        if len(tokens) > most:
            raise ValueError(
                f"{len(tokens)} {name} are more than the {most} that Model Runner V2 supports; leave some out"
            )


def _fit_request_lengths(params: SamplingParams, longest: int) -> None:
    """Cap `min_tokens` and `max_tokens` at the longest sequence: beyond 32 bits they would end a worker."""
    params.min_tokens = min(params.min_tokens, longest)
    if params.max_tokens is not None:
        params.max_tokens = min(params.max_tokens, longest)


def read_request(params: SamplingParams, processor: InputProcessor, tokenizer: Any) -> RequestData | None:
    """The options of a request's search and the data that it brings; None if it does not ask for beams.

    Raises:
        BeamRequestError: names the option, its value and what would work.
    """
    with refusing_requests():
        beam = search_of_request(params, processor.vllm_config)
        return None if beam is None else read_request_data(beam, processor, tokenizer)


def search_of_request(params: SamplingParams, vllm_config: VllmConfig) -> BeamParams | None:
    """The options of a request's search, resolved for its engine; None if it does not ask for beams.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    refuse_request_marks(params.extra_args or {})
    beam = parse_options(params.extra_args)
    if beam is None:
        return None
    caller = _request_caller(params)
    if not has_beams(vllm_config):
        raise ValueError(f"{caller.width}={beam.beam_width} {why_without_beams(vllm_config)}")
    if isinstance(beam, StepOptions):
        raise ValueError('unit="step" works in LLM.generate, LLM.chat and the endpoints for completions, not here')
    refuse_unknown_request_arguments(params.extra_args or {}, vllm_config)
    refuse_request_half_texts(params)
    fields = refuse_sampling_params(params, beam, caller.feature)  # before the engine's defaults apply
    check_contrast_option(beam.contrast, speculative_config_without_amateur(vllm_config))
    return resolve_options(beam, plugin_config_of(vllm_config), speculative_config_drafts(vllm_config), fields)


def refuse_request_marks(extra_args: Mapping[str, Any]) -> None:
    """Refuse keys in `extra_args` that only the front end may set.

    Raises:
        ValueError: names the key.
    """
    for name, kind in _MARKS.items():
        if name in extra_args and not isinstance(extra_args[name], kind):
            raise ValueError(f"{name} is reserved for the front end; leave it out")


def refuse_unknown_request_arguments(extra_args: Mapping[str, Any], vllm_config: VllmConfig) -> None:
    """Refuse keys of `extra_args` that nothing reads; custom logits processors may read any key.

    Raises:
        ValueError: names the key, its value and what would work.
    """
    known = OPTIONS.keys() | _MARKS.keys() | _READ_BY_VLLM
    for name, value in extra_args.items():
        if name in SamplingParams.__struct_fields__:
            raise ValueError(
                f"{name}={shown_option(value)} has no effect in vllm_xargs (extra_args); it is a field of the request"
            )
        if name not in known and not engine_has_logits_processors(vllm_config):
            raise ValueError(
                f"unknown option {shown_option_name(name)}={shown_option(value)}; {cure_for_option(name, OPTIONS)}"
            )


def why_no_request_after(engine_input: Any, vllm_config: VllmConfig) -> str | None:
    """Why this engine does not search after such a prompt, as vLLM's renderer returns it; None if it does.

    Returns:
        A phrase that follows the name of the requested feature.
    """
    kind = engine_input["type"]
    if kind == "multimodal":
        return _why_no_request_with("multimodal prompts", vllm_config)
    return None if kind in ("token", "enc_dec") else "works on prompts of text or tokens, not on prompt_embeds"


def _why_no_request_with(shown: str, vllm_config: VllmConfig) -> str | None:
    """Why rows of beams would not see the inputs of a prompt other than tokens; None if they would."""
    reasons = {
        f"works on {shown} only without a draft model, which does not see them; start vLLM without it, or let n-grams "
        "draft": speculative_config_drafts(vllm_config) == "model",
        f"does not work on {shown} of a model whose images are attended in both directions; send only text": shown
        != "prompt_embeds"
        and vllm_config.model_config.is_mm_prefix_lm,
    }
    return next((why for why, is_so in reasons.items() if is_so), None)


def forget_unsent_request(processor: InputProcessor, engine_input: Any) -> None:
    """Forget the images of a refused prompt, which the renderer considers sent, so that they can be sent again."""
    cache = processor.renderer.mm_processor_cache
    if cache is None or not isinstance(engine_input, dict) or engine_input.get("type") != "multimodal":
        return
    for modality, hashes in engine_input["mm_hashes"].items():
        for image, mm_hash in zip(engine_input["mm_kwargs"][modality], hashes, strict=True):
            if image is not None:  # otherwise the engine has it
                cache.invalidate(mm_hash)


def _prepare_request(
    request: EngineCoreRequest,
    data: RequestData,
    caller: Caller,
    own_stop_token_ids: list[int] | None,
    processor: InputProcessor,
) -> None:
    """Refuse what beam search does not support in this request, and give it its ticket."""
    params, vllm_config, model_config = request.sampling_params, processor.vllm_config, processor.model_config
    assert params is not None
    beam, item_set = data.beam, data.item_set
    if beam.rerank is not None:
        raise ValueError(f"rerank={beam.rerank!r} works in LLM.generate, LLM.chat and batch jobs, not here")
    if request.prompt_embeds is not None or request.mm_features:
        shown = "multimodal prompts" if request.mm_features else "prompt_embeds"
        if refusal := _why_no_request_with(shown, vllm_config):
            raise ValueError(f"{caller.feature} {refusal}")
    elif model_config.is_encoder_decoder:
        raise ValueError(f"{caller.feature} needs data for this model's encoder; add multi_modal_data to the prompt")
    if request.resumable:
        raise ValueError(f"{caller.feature} does not work with streaming input; send the prompt in one piece")
    if beam.beam_results and params.n > 1 and params.output_kind is not RequestOutputKind.FINAL_ONLY:
        raise ValueError(
            f"beam_results=True with n={params.n} needs all hypotheses in one output; set output_kind=FINAL_ONLY, as "
            "LLM.generate does"
        )
    if params.stop and processor.tokenizer is None:
        raise ValueError("stop strings need a tokenizer; start the engine without skip_tokenizer_init")
    if beam.semantics == "vllm" and not own_vllm_beams().stops_by_generation_config:
        params.stop_token_ids = list(own_stop_token_ids or ())
    if beam.semantics == "hf" and request.prompt_token_ids is not None:
        request.prompt_token_ids = model_decoder_prompt(
            model_config, processor.generation_config_fields, request.prompt_token_ids
        )
    check_request_data(data, model_config.get_vocab_size(), sampling_params_stops(params))
    if data.phrases is not None:
        beam = beam.model_copy(update={"phrase_boosts": data.phrases})
    num_beams = beam.beam_width
    if data.has_items:
        from vllm_trie.entrypoints.requests.catalogs import resolve_request_items  # here: few requests have items

        beam, num_beams = resolve_request_items(params, beam, item_set, vllm_config, processor.tokenizer)
    if sampling_params_have_grammar(params):
        from vllm_trie.entrypoints.requests.grammars import prepare_request_grammar  # here: few requests need it

        prepare_request_grammar(
            params, request.prompt_token_ids or [], vllm_config.structured_outputs_config, processor.tokenizer
        )
    features = request.mm_features if model_config.is_encoder_decoder and request.mm_features else ()
    num_prompt = length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds)
    num_encoded = sum(feature.mm_position.get_num_embeds() for feature in features)
    needed = BlocksNeeded(num_prompt, num_beams, num_encoded)
    validate_request(params, beam, request_limits_of_engine(vllm_config), needed, caller.width)
    if caller == LLM_BEAM_SEARCH:  # as many as vLLM's own loop returns, whatever max_logprobs allows
        params.logprobs = 2 * beam.beam_width
    eos_token_id = processor.renderer.get_eos_token_id()
    padding = (
        model_padding_token(model_config, processor.generation_config_fields) if beam.num_beam_groups > 1 else None
    )
    content = None if item_set is None else item_set.to_bytes()
    excluded = None if data.exclusion is None else vars(data.exclusion)
    suppressed = timestamps = None
    if beam.semantics == "hf":
        generation_config = processor.generation_config_fields
        suppressed = model_suppressed_tokens(model_config, generation_config)
        if not (data.has_items or sampling_params_have_grammar(params) or params.allowed_token_ids):  # of text alone
            timestamps = model_timestamp_rules(model_config, generation_config, request.prompt_token_ids or ())
    ticket = GroupTicketMessage(
        params.n,
        eos_token_id,
        beam.model_dump(),
        caller,
        item_set=content,
        exclusion=excluded,
        padding=padding,
        suppressed=suppressed,
        timestamps=timestamps,
    )
    dropped = {CALLER, SINGLE_TOKENS, READ, REASONING, *BRINGS}  # in the ticket, or needed only by the front end
    others = {name: value for name, value in (params.extra_args or {}).items() if name not in dropped}
    params.extra_args, params.n = {**others, TICKET: ticket.to_dict()}, 1
