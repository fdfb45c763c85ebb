"""Runs `LLM.beam_search` in the engine: same arguments, same results, no request per beam and token.

It also makes `LLM` abort its requests when the user interrupts it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from tqdm import tqdm
from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput, BeamSearchSequence
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.compat.versions import vllm_beams_have_allowlist
from vllm_trie.entrypoints.llm_engine import llm_engine_abort_all
from vllm_trie.entrypoints.requests.refusals import BeamRequestError, refusing_requests
from vllm_trie.entrypoints.requests.requests import CALLER, forget_unsent_request, why_no_request_after
from vllm_trie.messages import LLM_BEAM_SEARCH, NO_HYPOTHESIS
from vllm_trie.options import BeamParams, options_ask_for_beams
from vllm_trie.supported_engines import has_beams, is_plugin_selected, why_without_beams

logger = init_logger("vllm.trie_beam.beam_search")

ROOT = (-1, -1)


@wraps_vllm("beam_search", "vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin")
def llm_beam_search(
    original: Callable[..., list[BeamSearchOutput]], self: Any, *args: Any, **kwargs: Any
) -> list[BeamSearchOutput]:
    """Run `LLM.beam_search` in the engine if that has beams and supports the arguments, else vLLM's own loop."""
    call = arguments_to_vllm(original, self, *args, **kwargs)  # 0.33 has one more, the priority
    params: BeamSearchParams = call["params"]
    if has_beams(self.llm_engine.vllm_config):
        _refuse_other_llm_params(params)
    if params.max_tokens == 0:  # vLLM's loop then does not call the engine
        return original(self, *args, **kwargs)
    vllm_config = self.llm_engine.vllm_config
    refusal, inputs = None, None
    if not has_beams(vllm_config):
        refusal = why_without_beams(vllm_config)
    elif params.structured_outputs is not None and params.ignore_eos:
        refusal = "with structured_outputs and ignore_eos"
    elif vllm_beams_have_allowlist(params):
        refusal = "with allowed_token_ids"
    else:
        inputs = self._preprocess_cmpl(call["prompts"])
        refusals = (why_no_request_after(engine_input, vllm_config) for engine_input in inputs)
        refusal = next(filter(None, refusals), None)
    if refusal is None:
        assert inputs is not None
        adapters = self._lora_request_to_seq(call["lora_request"], len(inputs))
        priorities = self._priority_to_seq(call.get("priority"), len(inputs))
        prompts = list(map(_Prompt, inputs, adapters, priorities))
        try:
            return _llm_search(self, prompts, params, call["use_tqdm"], call["concurrency_limit"])
        except BaseException:
            for engine_input in inputs:
                forget_unsent_request(self.llm_engine.input_processor, engine_input)
            raise
    if is_plugin_selected(vllm_config):
        logger.info_once("LLM.beam_search %s: vLLM's own client loop runs it, not the engine", refusal)
    with _rendered_llm_inputs(self, inputs) if inputs is not None else nullcontext():
        return original(self, *args, **kwargs)


def _refuse_other_llm_params(params: Any) -> None:
    """Refuse parameters that are not `BeamSearchParams`, and name the call that takes them."""
    if isinstance(params, BeamSearchParams):
        return
    kind = type(params).__name__
    what_works = "pass one BeamSearchParams(beam_width=..., max_tokens=...) for all prompts"
    if isinstance(params, SamplingParams) and options_ask_for_beams(params.extra_args or {}):
        what_works = "call LLM.generate(prompts, params) with what beam_params returns"
    raise BeamRequestError(f"LLM.beam_search takes BeamSearchParams, not {kind}; {what_works}")


@contextmanager
def _rendered_llm_inputs(llm: Any, inputs: Sequence[Any]) -> Iterator[None]:
    """Give vLLM's loop the rendered prompts: vLLM takes an image that is rendered twice for sent already."""
    llm._preprocess_cmpl = lambda prompts: inputs
    try:
        yield
    finally:
        del llm._preprocess_cmpl


class _Prompt(NamedTuple):
    engine_input: Any
    adapter: LoRARequest | None
    priority: int


def _llm_search(
    llm: Any, prompts: list[_Prompt], params: BeamSearchParams, use_tqdm: bool, concurrency_limit: int | None
) -> list[BeamSearchOutput]:
    engine: LLMEngine = llm.llm_engine
    engine.input_processor.resolve_watermarking(params)
    tokenizer = llm.renderer.get_tokenizer()
    with refusing_requests():
        beam = BeamParams(beam_width=params.beam_width, length_penalty=params.length_penalty, semantics="vllm")
    sampling_params = SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        watermarking=False,
        detokenize=False,
        flat_logprobs=True,
        structured_outputs=params.structured_outputs,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={**beam.model_dump(exclude_unset=True), CALLER: LLM_BEAM_SEARCH},
    )
    limit = len(prompts) if concurrency_limit is None else concurrency_limit
    if limit < 1 and prompts:
        raise ValueError(f"concurrency_limit={concurrency_limit} allows no request; pass at least 1, or None")
    if limit < len(prompts):  # check all prompts before any is searched
        tasks = engine.get_supported_tasks()
        for prompt in prompts:
            engine.input_processor.process_inputs("check", prompt.engine_input, sampling_params, supported_tasks=tasks)

    outputs: dict[str, RequestOutput] = {}
    request_ids = [str(next(llm.request_counter)) for _ in prompts]
    waiting = list(zip(request_ids, prompts, strict=True))[::-1]
    running: set[str] = set()
    with _llm_aborted_on_error(engine), tqdm(total=len(prompts), desc="Beam search", disable=not use_tqdm) as progress:
        while waiting or running:
            while waiting and len(running) < limit:
                request_id, prompt = waiting.pop()
                more = {"lora_request": prompt.adapter, "priority": prompt.priority}
                engine.add_request(request_id, prompt.engine_input, sampling_params, **more)
                running.add(request_id)
            for output in engine.step():
                if output.request_id in running:
                    running.remove(output.request_id)
                    outputs[output.request_id] = output
                    progress.update()

    results = []
    for request_id, prompt in zip(request_ids, prompts, strict=True):
        places: dict[Any, Any] = {}
        found = [output for output in outputs[request_id].outputs if output.stop_reason != NO_HYPOTHESIS]
        results.append(
            BeamSearchOutput([_llm_beam_sequence(output, prompt, tokenizer, params, places) for output in found])
        )
    return results


def _llm_beam_sequence(
    output: CompletionOutput, prompt: _Prompt, tokenizer: Any, params: BeamSearchParams, places: dict[Any, Any]
) -> BeamSearchSequence:
    """One hypothesis as vLLM's own loop returns it: its tokens and text include the prompt.

    Args:
        places: Log-probabilities by prefix, which hypotheses share.
    """
    engine_input = prompt.engine_input
    decoder_input = engine_input["decoder_prompt"] if engine_input["type"] == "enc_dec" else engine_input
    tokens = [*decoder_input["prompt_token_ids"], *output.token_ids]
    failed = output.finish_reason in ("abort", "error")
    return BeamSearchSequence(
        orig_prompt=engine_input,
        tokens=tokens,
        logprobs=_llm_beam_logprobs(output, places),
        lora_request=prompt.adapter,
        cum_logprob=output.cumulative_logprob or 0.0,
        text=tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
        finish_reason=output.finish_reason if failed else None,
        stop_reason=output.stop_reason if failed else None,
    )


def _llm_beam_logprobs(output: CompletionOutput, places: dict[Any, Any]) -> list[dict[int, Any]]:
    """The log-probabilities at the position of each token."""
    logprobs, node = [], ROOT
    for position, token in enumerate(output.token_ids):
        if node not in places:
            places[node] = len(places), output.logprobs[position]
        number, place = places[node]
        logprobs.append(place)
        node = number, token
    return logprobs


@wraps_vllm("_run_engine", "vllm.entrypoints.common.offline:OfflineInferenceMixin")
def llm_run_engine(original: Callable[..., list[Any]], self: Any, *args: Any, **kwargs: Any) -> list[Any]:
    engine: LLMEngine = self.llm_engine
    with _llm_aborted_on_error(engine) if has_beams(engine.vllm_config) else nullcontext():
        return original(self, *args, **kwargs)


@contextmanager
def _llm_aborted_on_error(engine: LLMEngine) -> Iterator[None]:
    """Abort all requests when the user interrupts: vLLM would go on with them during the next call."""
    try:
        yield
    except BaseException:
        llm_engine_abort_all(engine)
        raise
