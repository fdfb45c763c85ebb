"""Searches by steps in an `LLMEngine`: to its callers each is one request, to the engine's core one per candidate.

All searches draw at once, and one whose candidates are in does not wait for the others. While the scorer runs, an
engine in a process of its own goes on with these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from vllm.outputs import RequestOutput
from vllm.v1.engine.llm_engine import LLMEngine

from vllm_trie.compat.patch import arguments, wraps
from vllm_trie.entrypoints.beam_results import add_beam_results
from vllm_trie.entrypoints.requests import refusing
from vllm_trie.entrypoints.reranking.offline import add_reranked, asks_for_reranking, forget, num_left_out, rerank
from vllm_trie.entrypoints.step_search.opening import asks_for_steps, open_request
from vllm_trie.entrypoints.step_search.request import StepRequest, search_of
from vllm_trie.entrypoints.step_search.scorers import Scorer, StepCandidate
from vllm_trie.entrypoints.trace_texts import add_texts
from vllm_trie.search.step_search.scores import checked_scores
from vllm_trie.selection import has_beams


@dataclass
class _Running:
    """A search whose candidates are being drawn."""

    request: StepRequest
    options: dict[str, Any]  # of vLLM's `add_request`, the same for all candidates
    outputs: dict[str, RequestOutput | None] = field(default_factory=dict)  # of this round's requests, by their ids

    @property
    def drawing(self) -> list[str]:
        """Of these requests, those that are not over."""
        return [candidate_id for candidate_id, output in self.outputs.items() if output is None]


Asking: TypeAlias = tuple[_Running, list[StepCandidate]]
OF_ONE_REQUEST = {"self", "request_id", "prompt", "params", "prompt_text", "arrival_time"}
_searches: WeakKeyDictionary[LLMEngine, dict[str, _Running]] = WeakKeyDictionary()  # that draw, by their own ids


@wraps("add_request", LLMEngine)
def add_request(
    original: Callable[..., str], self: LLMEngine, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> str:
    if asks_for_reranking(params) and has_beams(self.vllm_config):
        return add_reranked(original, self, request_id, prompt, params, *args, **kwargs)
    if not asks_for_steps(params) or not has_beams(self.vllm_config):
        return original(self, request_id, prompt, params, *args, **kwargs)
    with refusing():
        call = arguments(original, self, request_id, prompt, params, *args, **kwargs)
        request = open_request(request_id, prompt, params, self, True, call.get("tokenization_kwargs"))
    options = {name: call[name] for name in call if name not in OF_ONE_REQUEST}
    _draw(self, _Running(request, options))
    return request.own_id


def _draw(engine: LLMEngine, running: _Running) -> None:
    """Send the candidates of a round to the engine: all of them, or none if it refuses one."""
    running.outputs = {}
    try:
        for candidate_id, (prompt, params) in running.request.requests().items():
            add_request.original(engine, candidate_id, prompt, params, **running.options)
            running.outputs[candidate_id] = None
    except BaseException:
        abort_request.original(engine, list(running.outputs))
        _give_up(engine, running)
        raise
    _searches.setdefault(engine, {})[running.request.own_id] = running


@wraps("step", LLMEngine)
def step(original: Callable[..., list[Any]], self: LLMEngine, *args: Any, **kwargs: Any) -> list[Any]:
    outputs = original(self, *args, **kwargs)
    add_texts(outputs, self.renderer.tokenizer)
    add_beam_results(outputs)
    rerank(self, outputs)
    if not (searches := _searches.get(self)):
        return outputs
    others, drawn = [], []
    for output in outputs:
        running = searches.get(search_of(output.request_id))
        if running is None:
            others.append(output)
            continue
        running.outputs[output.request_id] = output
        if not running.drawing:
            drawn.append(searches.pop(running.request.own_id))
    try:
        return [*others, *_next_rounds(self, drawn)]
    except BaseException:  # the user interrupts
        for running in drawn:
            searches.pop(running.request.own_id, None)
            abort_request.original(self, running.drawing)  # of those that draw again
            _give_up(self, running)
        raise


def _next_rounds(engine: LLMEngine, drawn: list[_Running]) -> list[RequestOutput]:
    """Score what was drawn, and draw again. Returns the answers of searches that are over."""
    answers, asking = [], []
    for running in drawn:
        try:
            if candidates := running.request.take([o for o in running.outputs.values() if o is not None]):
                asking.append((running, candidates))
            else:
                _draw(engine, running)
        except Exception as error:  # of the engine, or of a request that it refuses: it ends this search alone
            answers.append(running.request.failure(error))
            _release(engine, running)
    for running, scores in _scored(asking):
        try:
            if isinstance(scores, Exception):
                raise scores
            if running.request.judge(scores):
                answers.append(running.request.answer())
            else:
                _draw(engine, running)
        except Exception as error:  # the scorer's, or of a request that the engine refuses: it ends this search alone
            answers.append(running.request.failure(error))
        _release(engine, running)
    return answers


def _give_up(engine: LLMEngine, running: _Running) -> None:
    running.request.end()
    _release(engine, running)


def _release(engine: LLMEngine, running: _Running) -> None:
    if keys := running.request.take_released():
        engine.engine_core.abort_requests(keys)


def _scored(asking: list[Asking]) -> Iterator[tuple[_Running, list[float] | Exception]]:
    """Ask each scorer once for all searches that have it; where that fails, for each search by itself."""
    by_scorer: dict[Any, list[Asking]] = {}
    for running, candidates in asking:
        scorer = running.request.beam.scorer
        by_scorer.setdefault(scorer if isinstance(scorer, str) else id(scorer), []).append((running, candidates))
    for together in by_scorer.values():
        all_candidates = [candidate for _, candidates in together for candidate in candidates]
        scores = _ask(together[0][0].request.scorer, all_candidates)
        for running, candidates in together:
            if isinstance(scores, list):
                yield running, scores[: len(candidates)]
                scores = scores[len(candidates) :]
            else:
                yield running, scores if len(together) == 1 else _ask(running.request.scorer, candidates)


def _ask(scorer: Scorer, candidates: list[StepCandidate]) -> list[float] | Exception:
    try:
        return checked_scores(scorer(list(candidates)), len(candidates))
    except Exception as error:
        return error


@wraps("abort_request", LLMEngine)
def abort_request(
    original: Callable[..., None], self: LLMEngine, request_ids: Iterable[str], *args: Any, **kwargs: Any
) -> None:
    """End searches, too, whether the ids are theirs or those of their candidates, as the engine calls them."""
    request_ids = list(request_ids)
    states, parents = self.output_processor.request_states, self.output_processor.parent_requests
    own = [of[id_] for of in (states, parents) for id_ in request_ids if id_ in of]
    named = {*request_ids, *(request.external_req_id for request in own)}
    request_ids += forget(self, named)
    if searches := _searches.get(self):
        for own_id, running in list(searches.items()):
            if named & {own_id, running.request.request_id, *running.outputs}:
                del searches[own_id]
                original(self, running.drawing)
                _give_up(self, running)
    original(self, request_ids, *args, **kwargs)


@wraps("get_num_unfinished_requests", LLMEngine)
def count_unfinished(original: Callable[..., int], self: LLMEngine, *args: Any, **kwargs: Any) -> int:
    """Each search counts as the outputs that it will have."""
    searches = _searches.get(self, {}).values()
    more = sum(search.request.params.n - len(search.drawing) for search in searches)
    return original(self, *args, **kwargs) + more - num_left_out(self)
