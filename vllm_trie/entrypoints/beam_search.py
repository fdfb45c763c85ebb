"""`LLM.beam_search` in the engine: same arguments, same results, no request per beam and token."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from vllm.entrypoints.common.offline import OfflineInferenceMixin
from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput, BeamSearchSequence
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.entrypoints.requests import FROM_LLM_BEAM_SEARCH
from vllm_trie.patching import Patch
from vllm_trie.plugin import has_beams, is_selected, why_without_beams

logger = init_logger("vllm.trie_beam.beam_search")

ROOT = (-1, -1)

beam_search = Patch("vllm.entrypoints.generate.beam_search.offline:BeamSearchOfflineMixin", "beam_search")
run_engine = Patch("vllm.entrypoints.common.offline:OfflineInferenceMixin", "_run_engine")


def search_in_engine() -> None:
    """From now on, `LLM.beam_search` runs in every engine of this process that has beams."""
    if not beam_search.is_applied:
        beam_search.apply(_in_engine(BeamSearchOfflineMixin.beam_search))
        run_engine.apply(_aborting(OfflineInferenceMixin._run_engine))


def _in_engine(original: Callable[..., list[BeamSearchOutput]]) -> Callable[..., list[BeamSearchOutput]]:
    @functools.wraps(original)
    def beam_search(
        self: Any,
        prompts: list[Any],
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        vllm_config = self.llm_engine.vllm_config
        refusal, inputs = None, []
        if not has_beams(vllm_config):
            refusal = why_without_beams(vllm_config)
        elif params.structured_outputs is not None:
            refusal = "with structured_outputs"
        else:
            inputs = self._preprocess_cmpl(prompts)
            if any(engine_input["type"] != "token" for engine_input in inputs):
                refusal = "on prompts that are not text or tokens"
        if refusal is None:
            adapters = self._lora_request_to_seq(lora_request, len(inputs))
            return _search(self, list(zip(inputs, adapters, strict=True)), params, use_tqdm, concurrency_limit)
        if is_selected(vllm_config.additional_config):
            logger.info_once("LLM.beam_search %s: vLLM's own client loop runs it, not the engine", refusal)
        return original(self, prompts, params, lora_request, use_tqdm, concurrency_limit)

    return beam_search


def _search(
    llm: Any,
    inputs: list[tuple[Any, LoRARequest | None]],
    params: BeamSearchParams,
    use_tqdm: bool,
    concurrency_limit: int | None,
) -> list[BeamSearchOutput]:
    engine: LLMEngine = llm.llm_engine
    engine.input_processor.resolve_watermarking(params)
    tokenizer = llm.renderer.get_tokenizer()
    sampling_params = SamplingParams(
        n=params.beam_width,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        watermarking=False,
        detokenize=False,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={
            "beam_width": params.beam_width,
            "length_penalty": params.length_penalty,
            "semantics": "vllm",
            FROM_LLM_BEAM_SEARCH: True,
        },
    )
    limit = len(inputs) if concurrency_limit is None else concurrency_limit
    if limit < 1 and inputs:
        raise ValueError(f"concurrency_limit={concurrency_limit} lets nothing run; pass at least 1, or None")
    if limit < len(inputs):  # the last ones would be checked only after the first ones were searched
        for engine_input, _ in inputs:
            engine.input_processor.process_inputs(
                "check", engine_input, sampling_params, supported_tasks=engine.get_supported_tasks()
            )

    outputs: dict[str, RequestOutput] = {}
    waiting = [(str(next(llm.request_counter)), engine_input, adapter) for engine_input, adapter in inputs]
    request_ids = [request_id for request_id, _, _ in waiting]
    waiting.reverse()
    running: set[str] = set()
    with _aborted_on_error(engine), tqdm(total=len(inputs), desc="Beam search", disable=not use_tqdm) as progress:
        while waiting or running:
            while waiting and len(running) < limit:
                request_id, engine_input, adapter = waiting.pop()
                engine.add_request(request_id, engine_input, sampling_params, lora_request=adapter)
                running.add(request_id)
            for output in engine.step():
                if output.request_id in running:
                    running.remove(output.request_id)
                    outputs[output.request_id] = output
                    progress.update()

    results = []
    for request_id, (engine_input, adapter) in zip(request_ids, inputs, strict=True):
        places: dict[Any, Any] = {}
        sequences = [_sequence(one, engine_input, tokenizer, params, places) for one in outputs[request_id].outputs]
        for sequence in sequences:
            sequence.lora_request = adapter
        results.append(BeamSearchOutput(sequences))
    return results


def _sequence(
    output: CompletionOutput, engine_input: Any, tokenizer: Any, params: BeamSearchParams, places: dict[Any, Any]
) -> BeamSearchSequence:
    """One hypothesis as vLLM's own loop returns it: the prompt is part of its tokens and of its text.

    Args:
        places: Log-probabilities by what comes before them; hypotheses share them as they share prefixes.
    """
    tokens = [*engine_input["prompt_token_ids"], *output.token_ids]
    failed = output.finish_reason in ("abort", "error")
    return BeamSearchSequence(
        orig_prompt=engine_input,
        tokens=tokens,
        logprobs=_logprobs(output, places),
        cum_logprob=output.cumulative_logprob or 0.0,
        text=tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
        finish_reason=output.finish_reason if failed else None,
        stop_reason=output.stop_reason if failed else None,
    )


def _logprobs(output: CompletionOutput, places: dict[Any, Any]) -> list[dict[int, Any]]:
    """For each token the log-probabilities at its place."""
    logprobs, node = [], ROOT
    for position, token in enumerate(output.token_ids):
        if node not in places:
            places[node] = len(places), output.logprobs[position]
        number, place = places[node]
        logprobs.append(place)
        node = number, token
    return logprobs


def _aborting(original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(original)
    def _run_engine(self: Any, *args: Any, **kwargs: Any) -> list[Any]:
        if not has_beams(self.llm_engine.vllm_config):
            return original(self, *args, **kwargs)
        with _aborted_on_error(self.llm_engine):
            return original(self, *args, **kwargs)

    return _run_engine


@contextmanager
def _aborted_on_error(engine: LLMEngine) -> Iterator[None]:
    """End what runs when the user interrupts: vLLM would go on with it during the next call."""
    try:
        yield
    except BaseException:
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        raise
