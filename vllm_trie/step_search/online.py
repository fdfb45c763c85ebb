"""The hook of searches by steps in an `AsyncLLM`, for servers: one request of a client is many of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Container
from typing import Any, TypeVar

from vllm.exceptions import GenerationError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_trie.compat.patch import arguments_to_vllm
from vllm_trie.compat.versions import is_refusal_of_paused_vllm
from vllm_trie.entrypoints.output_hooks import OnlineHook
from vllm_trie.entrypoints.requests.refusals import refusing_requests
from vllm_trie.step_search.opening import open_step_request
from vllm_trie.step_search.request import StepRequest
from vllm_trie.step_search.sampled_steps import StepAbortedError, StepSamplingError
from vllm_trie.step_search.scorers import HttpStepScorer, StepCandidate
from vllm_trie.step_search.scores import checked_step_scores

logger = init_logger("vllm.trie_beam.step_search")

T = TypeVar("T")
SampleCandidate = Callable[..., AsyncGenerator[RequestOutput, None]]


class StepSearches(OnlineHook):
    """The searches by steps of an engine."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[RequestOutput], str] = {}  # -> id of the request

    def generate(
        self,
        original: SampleCandidate,
        engine: AsyncLLM,
        prompt: Any,
        params: SamplingParams,
        request_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a search by steps, with the arguments of vLLM's `generate`; `original` samples its candidates."""
        with refusing_requests():
            call = arguments_to_vllm(original, engine, prompt, params, request_id, *args, **kwargs)
            request = open_step_request(request_id, prompt, params, engine, False, call.get("tokenization_kwargs"))
        options = {name: value for name, value in kwargs.items() if name != "prompt_text"}

        def sample_candidate(candidate_id: str, prompt: Any, params: Any) -> AsyncGenerator[RequestOutput, None]:
            return original(engine, prompt, params, candidate_id, *args, **options)

        return self._search(engine, request, sample_candidate)

    def cancel(self, request_ids: Container[str] | None = None) -> None:
        """End the searches of these requests, or all searches."""
        for searching, request_id in self._running.items():
            if request_ids is None or request_id in request_ids:
                searching.cancel()

    async def _search(
        self, engine: AsyncLLM, request: StepRequest, sample: SampleCandidate
    ) -> AsyncGenerator[RequestOutput, None]:
        """The only output of a search. If its client disconnects or aborts it, its candidates are aborted.

        Raises:
            GenerationError: the scorer failed.
        """
        searching = asyncio.ensure_future(_answer_of_step_search(engine, request, sample))
        self._running[searching] = request.request_id
        try:
            await asyncio.wait([searching])
            yield request.aborted() if searching.cancelled() else searching.result()
        finally:
            del self._running[searching]
            searching.cancel()
            await asyncio.wait([searching])
            request.end()
            await _release_online_step_search(engine, request)


async def _answer_of_step_search(engine: AsyncLLM, request: StepRequest, sample: SampleCandidate) -> RequestOutput:
    is_over = False
    while not is_over:
        requests = await _step_search_in_thread(request.requests)
        try:
            sampled = await _all_sampled_steps(
                [_last_step_output(sample(candidate_id, *candidate)) for candidate_id, candidate in requests.items()]
            )
        except GenerationError as error:
            if request.search.best_so_far(1) and is_refusal_of_paused_vllm(error):
                return request.aborted()
            raise
        try:
            if candidates := await _step_search_in_thread(request.take, sampled):
                is_over = await _step_search_in_thread(request.judge, await _step_scores(request, candidates))
        except StepAbortedError:
            return request.aborted()
        except Exception as error:
            why = request.failure(error).outputs[0].stop_reason
            logger.error("Search %s ended: %s", request.request_id, why)
            raise GenerationError(str(why)) from error
        await _release_online_step_search(engine, request)
    return request.answer()


async def _step_search_in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run the computations of a search while others are served; a cancellation waits until they are done."""
    running = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(running)
    finally:
        await asyncio.wait([running])


async def _release_online_step_search(engine: AsyncLLM, request: StepRequest) -> None:
    if keys := request.take_released():
        await engine.engine_core.abort_requests_async(keys)


async def _all_sampled_steps(outputs: list[Any]) -> list[RequestOutput]:
    """All outputs; if one fails, the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(one) for one in outputs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _last_step_output(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    last = None
    async for output in outputs:
        last = output
    if last is None:
        raise StepSamplingError("the engine returned no output")
    return last


async def _step_scores(request: StepRequest, candidates: list[StepCandidate]) -> list[float]:
    if isinstance(request.scorer, HttpStepScorer):
        return checked_step_scores(await request.scorer.ask(candidates), len(candidates))
    return checked_step_scores(await asyncio.to_thread(request.scorer, candidates), len(candidates))
