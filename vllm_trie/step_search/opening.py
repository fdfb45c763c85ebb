"""Checks a request for a search by steps, and begins the search, for both hooks."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from vllm_trie.entrypoints.requests.limits import check_request_stops, check_request_widths, request_limits_of_engine
from vllm_trie.entrypoints.requests.refusals import refuse_request_half_texts
from vllm_trie.entrypoints.requests.requests import refuse_request_marks, refuse_unknown_request_arguments
from vllm_trie.options import StepOptions, parse_options
from vllm_trie.sampling_params import refuse_sampling_params
from vllm_trie.step_search.request import StepRequest
from vllm_trie.step_search.rules import StepRules
from vllm_trie.step_search.sampled_steps import StepReader
from vllm_trie.step_search.scorers import step_scorer_of
from vllm_trie.step_search.search import StepSearch
from vllm_trie.supported_engines import plugin_config_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine


def open_step_request(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    engine: AsyncLLM | LLMEngine,
    is_offline: bool,
    tokenization_kwargs: dict[str, Any] | None = None,
) -> StepRequest:
    """Check a request for a search by steps, and begin it.

    Args:
        prompt: The user's, or as vLLM's renderer returns it.
        engine: Samples the candidates.
        is_offline: Whether its scorer may be a URL.
        tokenization_kwargs: For the renderer, if the prompt is not rendered.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    vllm_config, beam = engine.vllm_config, parse_options(params.extra_args)
    assert isinstance(beam, StepOptions)
    refuse_request_marks(params.extra_args or {})
    refuse_unknown_request_arguments(params.extra_args or {}, vllm_config)
    refuse_request_half_texts(params)
    refuse_sampling_params(params, beam)
    check_request_widths(params.n, beam, request_limits_of_engine(vllm_config))
    check_request_stops(params)
    if engine.renderer.tokenizer is None:
        raise ValueError('unit="step" needs a tokenizer; start the engine without skip_tokenizer_init')
    if isinstance(prompt, EngineCoreRequest | AsyncGenerator):
        raise ValueError(f'unit="step" works on prompts of text or tokens, not on a {type(prompt).__name__}')
    engine_input = _rendered_step_prompt(prompt, engine, tokenization_kwargs or {})
    if engine_input["type"] != "token":
        raise ValueError('unit="step" works on prompts of text or tokens; send only text')
    room = vllm_config.model_config.max_model_len - len(engine_input["prompt_token_ids"])
    rules = StepRules(
        width=beam.beam_width,
        candidates=beam.candidates,
        max_tokens=max(room if params.max_tokens is None else min(params.max_tokens, room), 1),
        max_steps=beam.max_steps,
        stops_early=beam.early_stopping is True,
        seed=random.getrandbits(63) if params.seed is None else params.seed,
        allot=beam.allot,
        allot_temperature=beam.allot_temperature,
        prefer_shared=beam.prefer_shared,
        order=beam.order,
        exploration=beam.exploration,
        lookahead=beam.lookahead,
    )
    scorer = step_scorer_of(beam.scorer, plugin_config_of(vllm_config).scorers, is_offline)
    forks = vllm_config.parallel_config.data_parallel_size == 1  # otherwise candidates may go to other engines
    reader = StepReader(engine.renderer.tokenizer, params)
    return StepRequest(request_id, engine_input, beam, reader, scorer, StepSearch(rules), forks)


def _rendered_step_prompt(prompt: Any, engine: AsyncLLM | LLMEngine, tokenization_kwargs: dict[str, Any]) -> Any:
    if isinstance(prompt, dict) and "type" in prompt:
        return prompt
    parsed = parse_model_prompt(engine.model_config, prompt)
    tok_params = engine.renderer.default_cmpl_tok_params.with_kwargs(**tokenization_kwargs)
    (rendered,) = engine.renderer.render_cmpl([parsed], tok_params)
    return rendered
