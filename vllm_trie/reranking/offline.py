"""The hook of `rerank` in an `LLMEngine`: the engine's core returns the whole pool, and the user gets the best `n`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.detokenizing import detokenizing_function
from vllm_trie.entrypoints.answers.beam_results import BEAM_RESULTS
from vllm_trie.entrypoints.answers.compact import answer_of_search
from vllm_trie.entrypoints.output_hooks import OfflineHook
from vllm_trie.entrypoints.requests.limits import check_request_n
from vllm_trie.entrypoints.requests.refusals import refusing_requests
from vllm_trie.messages import NO_HYPOTHESIS
from vllm_trie.options import PLUGIN_NAME, BeamParams, parse_options
from vllm_trie.options.parts import Reranking as RerankingOptions
from vllm_trie.options.shown import shortened_option_refusal, shown_option
from vllm_trie.reranking.metrics import HypothesisPair, Metric, rerank_metric_of
from vllm_trie.reranking.minimum_bayes_risk import Pairs, rank_by_risk
from vllm_trie.sampling_params import refuse_sampling_params

logger = init_logger("vllm.trie_beam.reranking")


class _Asked(NamedTuple):
    """How the pool of a request is ranked, and how many hypotheses are returned."""

    request_id: str  # the user's
    beam: BeamParams
    metric: Metric
    n: int
    tokenizer: Any


class Reranking(OfflineHook[_Asked]):
    """The requests of an engine whose pools are to be ranked; `waiting` has them by ids of the engine's requests."""

    def add_request(
        self,
        original: Callable[..., str],
        engine: LLMEngine,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        *args: Any,
        **kwargs: Any,
    ) -> str:
        """Add a request that returns the whole pool, as vLLM's `add_request`."""
        with refusing_requests():
            asked = _checked_rerank_request(request_id, params, engine)
        own_id = f"rerank-{random_uuid()}"
        engine_id = original(engine, own_id, prompt, _rerank_pool_params(params, asked.beam), *args, **kwargs)
        self.waiting[own_id] = asked
        return engine_id

    def take(self, engine: LLMEngine, outputs: list[Any]) -> list[Any]:
        """Rerank the outputs of finished requests, and keep the best `n`."""
        finished = [output for output in outputs if output.request_id in self.waiting and output.finished]
        # Forget all of them first, as the user may interrupt a metric.
        asked = [self.waiting.pop(output.request_id) for output in finished]
        for output, of_output in zip(finished, asked, strict=True):
            output.request_id = of_output.request_id
            _rerank(output, of_output)
        return outputs

    def abort(self, engine: LLMEngine, names: AbstractSet[str]) -> list[str]:
        """Forget aborted requests."""
        gone = [own_id for own_id, asked in self.waiting.items() if own_id in names or asked.request_id in names]
        for own_id in gone:
            del self.waiting[own_id]
        return gone

    def num_more_outputs(self) -> int:
        """Minus the hypotheses that are searched but not returned."""
        return sum(asked.n - asked.beam.beam_width for asked in self.waiting.values())


def _checked_rerank_request(request_id: str, params: SamplingParams, engine: LLMEngine) -> _Asked:
    """Check a request with `rerank`.

    Raises:
        ValueError: names the option, its value and what would work.
    """
    beam = parse_options(params.extra_args)
    if not isinstance(beam, BeamParams):
        raise ValueError(f"rerank={shown_option((params.extra_args or {})['rerank'])} needs beams; add beam_width")
    refuse_sampling_params(params, beam)
    check_request_n(params.n, beam)
    if (tokenizer := engine.renderer.tokenizer) is None:
        raise ValueError(f"rerank={beam.rerank!r} compares texts; start the engine without skip_tokenizer_init")
    return _Asked(request_id, beam, rerank_metric_of(beam.metric), params.n, tokenizer)


def _rerank_pool_params(params: SamplingParams, beam: BeamParams) -> SamplingParams:
    """The parameters of a request for all hypotheses of the search, without options of reranking."""
    of_pool = copy(params)
    of_pool.n, of_pool.output_kind = beam.beam_width, RequestOutputKind.FINAL_ONLY
    options = params.extra_args or {}
    of_pool.extra_args = {name: value for name, value in options.items() if name not in RerankingOptions.model_fields}
    return of_pool


def _rerank(output: RequestOutput, asked: _Asked) -> None:
    pool = [found for found in output.outputs if found.stop_reason != NO_HYPOTHESIS]
    others = [found for found in output.outputs if found.stop_reason == NO_HYPOTHESIS]
    if not pool or any(found.finish_reason in ("error", "abort") for found in pool):
        _return_reranked(output, output.outputs[: asked.n], range(asked.n))
        return

    def judge(pairs: Pairs) -> Iterable[Any]:
        return asked.metric([HypothesisPair(prompt, *pair) for pair in pairs])

    beam, prompt = asked.beam, output.prompt
    try:
        prompt = detokenizing_function(asked.tokenizer, False)(output.prompt_token_ids) if prompt is None else prompt
        texts, weights = [found.text for found in pool], _rerank_weights(pool, beam.rerank_scale)
        ranking = rank_by_risk(texts, judge, weights, beam.rerank_confidence, asked.n)
    except Exception as error:  # of the metric: only this request fails, and its hypotheses are kept
        reason = shortened_option_refusal(f"rerank={beam.rerank!r}: {type(error).__name__}: {error}")
        logger.error("The hypotheses of request %s stay in the search's order: %s", output.request_id, reason)
        failed = output.outputs[: asked.n]
        failed = [replace(found, finish_reason="error", stop_reason=reason) for found in failed]
        _return_reranked(output, failed, range(asked.n))
        return
    best = ranking.order[: asked.n]
    found = [*(pool[place] for place in best), *others][: asked.n]
    _return_reranked(output, [replace(hypothesis, index=index) for index, hypothesis in enumerate(found)], best)
    answer = {"utilities": [ranking.utilities[place] for place in best], "search_ranks": best}
    own = {**answer_of_search(output), **answer, "num_judged": ranking.num_judged}
    output.kv_transfer_params = {**(output.kv_transfer_params or {}), PLUGIN_NAME: own}


def _return_reranked(output: RequestOutput, found: list[CompletionOutput], places: Sequence[int]) -> None:
    """Return these outputs, and the `beam_results` at these places of the pool."""
    output.outputs = found
    of_search = answer_of_search(output)
    if (results := of_search.get(BEAM_RESULTS)) is not None:
        of_search[BEAM_RESULTS] = [results[place] for place in places if place < len(results)]


def _rerank_weights(pool: list[CompletionOutput], scale: float) -> np.ndarray | None:
    """[pool] the model's probabilities to the power of `scale`; 0 for duplicates. None: equal weights."""
    if not scale:
        return None
    sums = np.array([found.cumulative_logprob for found in pool], np.float64)
    weights = np.exp(scale * (sums - sums.max()))
    seen = set[tuple[int, ...]]()
    for place, found in enumerate(pool):
        if (token_ids := tuple(found.token_ids)) in seen:
            weights[place] = 0.0
        seen.add(token_ids)
    return weights
