"""The hook of searches by steps in an `LLMEngine`: one request to its user is one per candidate to the engine's core.

All searches sample at the same time, and one whose candidates are complete does not wait for others. While a scorer
runs, an engine core in another process continues with the other searches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from vllm.inputs import PromptType
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import arguments_to_vllm
from vllm_trie.entrypoints.output_hooks import OfflineHook
from vllm_trie.entrypoints.requests.refusals import refusing_requests
from vllm_trie.step_search.opening import open_step_request
from vllm_trie.step_search.request import StepRequest, step_search_of
from vllm_trie.step_search.scorers import Scorer, StepCandidate
from vllm_trie.step_search.scores import UnreachableScorerError, checked_step_scores


@dataclass
class _RunningStepSearch:
    """A search whose candidates are being sampled."""

    request: StepRequest
    options: dict[str, Any]  # of vLLM's `add_request`, for all candidates
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)  # of this round, by request id

    @property
    def unfinished(self) -> list[str]:
        """The requests of this round that have not finished."""
        return [candidate_id for candidate_id, output in self.outputs.items() if output is None]


Asking: TypeAlias = tuple[_RunningStepSearch, list[StepCandidate]]
OF_ONE_REQUEST = {"self", "request_id", "prompt", "params", "prompt_text", "arrival_time"}


class StepSearches(OfflineHook[_RunningStepSearch]):
    """The searches by steps of an engine; `waiting` has those that are sampling, by their `own_id`."""

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
        """Begin a search by steps, as vLLM's `add_request`."""
        with refusing_requests():
            call = arguments_to_vllm(original, engine, request_id, prompt, params, *args, **kwargs)
            request = open_step_request(request_id, prompt, params, engine, True, call.get("tokenization_kwargs"))
        options = {name: call[name] for name in call if name not in OF_ONE_REQUEST}
        self._begin_round(engine, _RunningStepSearch(request, options))
        return request.own_id

    def _begin_round(self, engine: LLMEngine, running: _RunningStepSearch) -> None:
        """Send the candidates of a round to the engine; if it refuses one, abort all of them."""
        running.outputs = {}
        try:
            for candidate_id, (prompt, params) in running.request.requests().items():
                engine.add_request(candidate_id, cast(PromptType, prompt), params, **running.options)
                running.outputs[candidate_id] = None
        except BaseException:
            engine.abort_request(list(running.outputs))
            _give_up_step_search(engine, running)
            raise
        self.waiting[running.request.own_id] = running

    def take(self, engine: LLMEngine, outputs: list[Any]) -> list[Any]:
        """Take candidates' outputs from those of an engine step. Returns the others, and those of finished searches."""
        others, sampled = [], []
        for output in outputs:
            running = self.waiting.get(step_search_of(output.request_id))
            if running is None:
                others.append(output)
                continue
            running.outputs[output.request_id] = output
            if not running.unfinished:
                sampled.append(self.waiting.pop(running.request.own_id))
        try:
            return [*others, *self._next_rounds(engine, sampled)]
        except BaseException:  # such as an interrupt by the user
            for running in sampled:
                self.waiting.pop(running.request.own_id, None)
                engine.abort_request(running.unfinished)  # of searches that have begun another round
                _give_up_step_search(engine, running)
            raise

    def abort(self, engine: LLMEngine, names: AbstractSet[str]) -> list[str]:
        """End searches with these ids: their `own_id`, the user's, or those of their candidates."""
        for own_id, running in list(self.waiting.items()):
            if names & {own_id, running.request.request_id, *running.outputs}:
                del self.waiting[own_id]
                engine.abort_request(running.unfinished)
                _give_up_step_search(engine, running)
        return []

    def num_more_outputs(self) -> int:
        """Outputs of searches minus the candidates that are being sampled."""
        return sum(search.request.params.n - len(search.unfinished) for search in self.waiting.values())

    def _next_rounds(self, engine: LLMEngine, sampled: list[_RunningStepSearch]) -> list[RequestOutput]:
        """Score sampled candidates, and begin the next rounds. Returns the answers of finished searches."""
        answers, asking = [], []
        for running in sampled:
            try:
                if candidates := running.request.take([o for o in running.outputs.values() if o is not None]):
                    asking.append((running, candidates))
                else:
                    self._begin_round(engine, running)
            except Exception as error:  # of the engine, or a refusal: it ends only this search
                answers.append(running.request.failure(error))
                _release_step_search(engine, running)
        for running, scores in _scored_step_searches(asking):
            try:
                if isinstance(scores, Exception):
                    raise scores
                if running.request.judge(scores):
                    answers.append(running.request.answer())
                else:
                    self._begin_round(engine, running)
            except Exception as error:  # of the scorer, or a refusal: it ends only this search
                answers.append(running.request.failure(error))
            _release_step_search(engine, running)
        return answers


def _give_up_step_search(engine: LLMEngine, running: _RunningStepSearch) -> None:
    running.request.end()
    _release_step_search(engine, running)


def _release_step_search(engine: LLMEngine, running: _RunningStepSearch) -> None:
    if keys := running.request.take_released():
        engine.engine_core.abort_requests(keys)


def _scored_step_searches(asking: list[Asking]) -> Iterator[tuple[_RunningStepSearch, list[float] | Exception]]:
    """Call each scorer once for all its searches; if that fails, once per search."""
    by_scorer: dict[Any, list[Asking]] = {}
    for running, candidates in asking:
        scorer = running.request.beam.scorer
        by_scorer.setdefault(scorer if isinstance(scorer, str) else id(scorer), []).append((running, candidates))
    for together in by_scorer.values():
        all_candidates = [candidate for _, candidates in together for candidate in candidates]
        scores = _ask_step_scorer(together[0][0].request.scorer, all_candidates)
        if isinstance(scores, Exception):
            yield from _step_searches_scored_alone(together, scores)
            continue
        for running, candidates in together:
            yield running, scores[: len(candidates)]
            scores = scores[len(candidates) :]


def _step_searches_scored_alone(
    failed: list[Asking], failure: Exception
) -> Iterator[tuple[_RunningStepSearch, list[float] | Exception]]:
    """Call a scorer, which failed for these searches together, once per search, until its endpoint is unreachable.

    The first search of several tries even such an endpoint again: all questions at once may have been too large.
    """
    scores: list[float] | Exception = failure
    for number, (running, candidates) in enumerate(failed):
        if len(failed) > 1 and not (number and isinstance(scores, UnreachableScorerError)):
            scores = _ask_step_scorer(running.request.scorer, candidates)
        yield running, scores


def _ask_step_scorer(scorer: Scorer, candidates: list[StepCandidate]) -> list[float] | Exception:
    try:
        return checked_step_scores(scorer(list(candidates)), len(candidates))
    except Exception as error:
        return error
