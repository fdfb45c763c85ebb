"""One request that searches by steps: the candidates' requests, and the answer."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid
from vllm.v1.engine import EngineCoreRequest

from vllm_trie.entrypoints.limits import check_widths, engine_limits
from vllm_trie.entrypoints.requests import refuse_unknown
from vllm_trie.entrypoints.step_search.drawn_steps import DrawError, StepReader
from vllm_trie.entrypoints.step_search.scorers import Scorer, StepCandidate, scorer_of
from vllm_trie.messages import FORK, ForkTicket
from vllm_trie.options import OPTIONS, PLUGIN_NAME, StepParams, asks_for_beams, parse_options
from vllm_trie.sampling_params import matrix_fields, refuse_unsupported
from vllm_trie.search.step_search.hypotheses import StepHypothesis
from vllm_trie.search.step_search.rules import StepRules
from vllm_trie.search.step_search.scores import ScorerError
from vllm_trie.search.step_search.search import StepSearch
from vllm_trie.selection import config_of

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine


class _Candidate(NamedTuple):
    """One that is being drawn."""

    prompt: dict[str, Any]
    params: SamplingParams
    continues: StepHypothesis


@dataclass
class StepRequest:
    """A request and its search.

    Args:
        request_id: As whoever asks calls it.
        engine_input: The prompt, as tokens.
        beam: Its beam options.
        reader: Makes steps of outputs.
        scorer: What gives candidates their scores.
        search: What has been found.
        forks: Whether candidates go on with the KV blocks of what they continue, whatever of it is cached.
    """

    request_id: str
    engine_input: Mapping[str, Any]
    beam: StepParams
    reader: StepReader
    scorer: Scorer
    search: StepSearch
    forks: bool = True

    def __post_init__(self) -> None:
        self.own_id = f"steps-{random_uuid()}"  # what the ids of its candidates begin with
        self._drawing: dict[str, _Candidate] = {}  # by the ids of their requests, in their order
        self._held: set[str] = set()  # keys of KV blocks that the engine may hold
        self._is_over = False
        self.first: RequestOutput | None = None  # of all that the engine returned

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.reader.params

    @cached_property
    def prompt(self) -> str:
        """Its text."""
        text = self.engine_input.get("prompt")
        return str(self.reader.tokenizer.decode(self.engine_input["prompt_token_ids"]) if text is None else text)

    def requests(self) -> dict[str, tuple[dict[str, Any], SamplingParams]]:
        """Prompt and parameters of each candidate of the next round, by the id of its request, in their order."""
        stop, step_stop = list(self.params.stop or ()), list(self.beam.step_stop or ())
        shared, self._drawing = _for_candidates(self.params), {}
        for index, draw in enumerate(self.search.draws()):
            candidate_id = f"{self.own_id}-{self.search.num_rounds}-{index}"
            parent = draw.beam.notes[-1].candidate_id if draw.beam.notes else None
            key = candidate_id if draw.stops_at_delimiter else None
            params = shared.clone()
            ticket = ForkTicket(key, parent) if self.forks else ForkTicket()
            params.extra_args = {**(params.extra_args or {}), FORK: ticket}
            params.seed, params.max_tokens = draw.seed, draw.max_tokens
            params.stop = [*stop, *step_stop] if draw.stops_at_delimiter else stop
            params.include_stop_str_in_output = draw.stops_at_delimiter or self.params.include_stop_str_in_output
            tokens = [*self.engine_input["prompt_token_ids"], *draw.beam.token_ids]
            prompt = {**self.engine_input, "prompt_token_ids": tokens}
            if draw.beam.steps:
                prompt.pop("prompt", None)
            self._drawing[candidate_id] = _Candidate(prompt, params, draw.beam)
        return {candidate_id: candidate[:2] for candidate_id, candidate in self._drawing.items()}

    def take_released(self) -> list[str]:
        """Keys of KV blocks that no candidate will go on from: to be aborted, whatever became of the search."""
        if not self.forks:
            return []
        needed = set() if self._is_over else {beam.notes[-1].candidate_id for beam in self.search.beams if beam.notes}
        released, self._held = self._held - needed, self._held & needed
        return sorted(released)

    def take(self, outputs: Sequence[RequestOutput]) -> list[StepCandidate]:
        """Take what the requests returned, in their order. Returns what is to be scored.

        Raises:
            DrawError: a request came to no end.
        """
        self.first = self.first or outputs[0]
        ended = list(zip(self._drawing.items(), outputs, strict=True))
        self._held.update(id_ for (id_, _), output in ended if isinstance(output.outputs[0].stop_reason, str))
        drawn = [self.reader.step(id_, candidate.continues, output) for (id_, candidate), output in ended]
        self._drawing = {}
        return [
            StepCandidate(self.prompt, c.steps, c.token_ids, c.scores, c.is_finished) for c in self.search.take(drawn)
        ]

    def judge(self, scores: Any) -> bool:
        """Take the scores of what `take` returned. Returns whether the search is over.

        Raises:
            ScorerError: these are not as many numbers.
        """
        self._is_over = self.search.judge(scores)
        return self._is_over

    def end(self) -> None:
        """Give up: `take_released` tells what is to be released."""
        self._is_over = True
        self._held.update(self._drawing)

    def answer(self) -> RequestOutput:
        """The best `n` hypotheses, best first; fewer if there are fewer."""
        best = self.search.finished[: self.params.n]
        answer = {
            "scores": [hypothesis.score for hypothesis in best],
            "step_scores": [list(hypothesis.scores) for hypothesis in best],
            "num_rounds": self.search.num_rounds,
            "num_candidates": self.search.num_drawn,
        }
        return self._output([self._completion(index, hypothesis) for index, hypothesis in enumerate(best)], answer)

    def failure(self, error: Exception) -> RequestOutput:
        """The end of a search that cannot go on: `n` outputs in an error, whose stop reason says why."""
        why = str(error) if isinstance(error, ScorerError | DrawError) else f"{type(error).__name__}: {error}"
        return self._without_answer("error", why)

    def aborted(self) -> RequestOutput:
        """The end of a search that somebody else ended."""
        return self._without_answer("abort", None)

    def _without_answer(self, finish_reason: str, stop_reason: str | None) -> RequestOutput:
        self.end()
        none = [CompletionOutput(i, "", [], None, None, None, finish_reason, stop_reason) for i in range(self.params.n)]
        return self._output(none, {})

    def _output(self, outputs: list[CompletionOutput], answer: dict[str, Any]) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.engine_input.get("prompt"),
            list(self.engine_input["prompt_token_ids"]),
            None,
            outputs,
            finished=True,
            lora_request=self.first and self.first.lora_request,
            num_cached_tokens=self.first and self.first.num_cached_tokens,
            kv_transfer_params={PLUGIN_NAME: answer} if answer else None,
        )

    def _completion(self, index: int, hypothesis: StepHypothesis) -> CompletionOutput:
        return CompletionOutput(
            index,
            hypothesis.text,
            list(hypothesis.token_ids),
            hypothesis.sum_logprobs,
            None
            if self.params.logprobs is None
            else [*chain.from_iterable(note.logprobs for note in hypothesis.notes)],
            finish_reason=hypothesis.finish_reason,
            stop_reason=hypothesis.stop_reason,
        )


def search_of(candidate_id: str) -> str:
    """The own id of the search that a candidate's request would belong to."""
    return candidate_id.rsplit("-", 2)[0]


def asks_for_steps(params: Any) -> bool:
    """Whether these parameters of a request ask for a search by steps."""
    extra_args = (params.extra_args if isinstance(params, SamplingParams) else None) or {}
    return asks_for_beams(extra_args) and extra_args.get("unit") == "step"


def open_request(
    request_id: str,
    prompt: Any,
    params: SamplingParams,
    engine: AsyncLLM | LLMEngine,
    is_offline: bool,
    tokenization_kwargs: dict[str, Any] | None = None,
) -> StepRequest:
    """Check a request that asks for a search by steps, and begin it.

    Args:
        prompt: As it is, or as vLLM's renderer returns it.
        engine: Which draws the candidates.
        is_offline: Whether its scorer may be a URL.
        tokenization_kwargs: For the renderer, of a prompt as it is.

    Raises:
        ValueError: naming the option, its value and what would work.
    """
    vllm_config, beam = engine.vllm_config, parse_options(params.extra_args)
    assert isinstance(beam, StepParams)
    refuse_unknown(params.extra_args or {}, vllm_config)
    refuse_unsupported(matrix_fields(params), beam)
    check_widths(params.n, beam, engine_limits(vllm_config))
    if engine.renderer.tokenizer is None:
        raise ValueError('unit="step" needs a tokenizer; start the engine without skip_tokenizer_init')
    if isinstance(prompt, EngineCoreRequest | AsyncGenerator):
        raise ValueError(f'unit="step" works on prompts of text or tokens, not on a {type(prompt).__name__}')
    engine_input = _rendered(prompt, engine, tokenization_kwargs or {})
    if engine_input["type"] != "token":
        raise ValueError('unit="step" works on prompts of text or tokens; send text alone')
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
    )
    scorer = scorer_of(beam.scorer, config_of(vllm_config).scorers, is_offline)
    forks = vllm_config.parallel_config.data_parallel_size == 1  # else candidates go to any engine
    reader = StepReader(engine.renderer.tokenizer, params)
    return StepRequest(request_id, engine_input, beam, reader, scorer, StepSearch(rules), forks)


def _rendered(prompt: Any, engine: AsyncLLM | LLMEngine, tokenization_kwargs: dict[str, Any]) -> Any:
    if isinstance(prompt, dict) and "type" in prompt:
        return prompt
    parsed = parse_model_prompt(engine.model_config, prompt)
    tok_params = engine.renderer.default_cmpl_tok_params.with_kwargs(**tokenization_kwargs)
    (rendered,) = engine.renderer.render_cmpl([parsed], tok_params)
    return rendered


def _for_candidates(params: SamplingParams) -> SamplingParams:
    """What all candidates have in common: one output each, by vLLM's own sampler."""
    extra_args = {k: v for k, v in (params.extra_args or {}).items() if k not in OPTIONS}
    shared = copy(params)
    shared.n, shared.extra_args, shared.output_kind = 1, extra_args or None, RequestOutputKind.FINAL_ONLY
    shared = shared.clone()  # now that the scorer is out of it, which may hold an engine that cannot be copied
    shared.logprobs = params.logprobs or 0  # without any, vLLM does not fill cumulative_logprob
    return shared
