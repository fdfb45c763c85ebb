"""One request for a search by steps: makes the requests of its candidates and its answer, for both hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils import random_uuid

from vllm_trie.detokenizing import detokenizing_function
from vllm_trie.entrypoints.answers.search_state import empty_answer_outputs
from vllm_trie.messages import FORK, ForkTicketMessage
from vllm_trie.options import OPTIONS, PLUGIN_NAME, StepOptions
from vllm_trie.options.shown import shortened_option_refusal
from vllm_trie.step_search.hypotheses import PlannedStep, StepHypothesis
from vllm_trie.step_search.sampled_steps import StepAbortedError, StepReader, StepSamplingError
from vllm_trie.step_search.scorers import Scorer, StepCandidate
from vllm_trie.step_search.scores import ScorerError
from vllm_trie.step_search.search import StepSearch


@dataclass
class StepRequest:
    """A request and its search. Each round: run its `requests`, `take` the outputs, score the result, and `judge`.

    Args:
        request_id: The user's.
        engine_input: The prompt, as tokens.
        beam: Its beam options.
        reader: Makes steps of outputs.
        scorer: Scores candidates.
        search: The state of the search.
        forks: Whether candidates continue with the held KV blocks of their parents, whatever the prefix cache has.
    """

    request_id: str
    engine_input: Mapping[str, Any]
    beam: StepOptions
    reader: StepReader
    scorer: Scorer
    search: StepSearch
    forks: bool

    def __post_init__(self) -> None:
        self.own_id = f"steps-{random_uuid()}"  # prefix of the ids of its candidates
        self._planned: dict[str, PlannedStep] = {}  # by request id, in order
        self._held: set[str] = set()  # keys of KV blocks that the engine may hold
        self._is_over = False
        self.first: RequestOutput | None = None  # the engine's first output

    @property
    def params(self) -> SamplingParams:
        """The parameters of the user's request."""
        return self.reader.params

    @cached_property
    def prompt(self) -> str:
        """The text of the prompt."""
        text: str | None = self.engine_input.get("prompt")
        return (
            detokenizing_function(self.reader.tokenizer, False)(self.engine_input["prompt_token_ids"])
            if text is None
            else text
        )

    def requests(self) -> dict[str, tuple[dict[str, Any], SamplingParams]]:
        """Prompt and parameters of the requests to run next, by id, in order."""
        number, planned = self.search.num_rounds, self.search.plan()
        self._planned = {
            f"{self.own_id}-{number}{'ahead' * step.is_greedy}-{index}": step for index, step in enumerate(planned)
        }
        shared = _params_of_step_candidates(self.params)
        return {id_: (self._prompt(step), self._params(id_, step, shared)) for id_, step in self._planned.items()}

    def _prompt(self, step: PlannedStep) -> dict[str, Any]:
        tokens = [*self.engine_input["prompt_token_ids"], *step.beam.token_ids]
        prompt = {**self.engine_input, "prompt_token_ids": tokens}
        if step.beam.steps:
            prompt.pop("prompt", None)
        return prompt

    def _params(self, candidate_id: str, step: PlannedStep, shared: SamplingParams) -> SamplingParams:
        params, stop = shared.clone(), list(self.params.stop or ())
        parent = step.beam.notes[-1].candidate_id if step.beam.notes else None
        key = candidate_id if step.stops_at_delimiter else None
        ticket = ForkTicketMessage(key, parent) if self.forks else ForkTicketMessage()
        params.extra_args = {**(params.extra_args or {}), FORK: ticket}
        params.seed, params.max_tokens = step.seed, step.max_tokens
        params.stop = [*stop, *(self.beam.step_stop or ())] if step.stops_at_delimiter else stop
        params.include_stop_str_in_output = step.stops_at_delimiter or self.params.include_stop_str_in_output
        if step.is_greedy:
            params.seed, params.temperature, params.top_p, params.top_k, params.min_p = None, 0.0, 1.0, 0, 0.0
        return params

    def take_released(self) -> list[str]:
        """Keys of held KV blocks that no candidate will continue; the caller aborts them, even if the search failed.

        Of candidates to which the search may return, the best are held, as many as the option `pool` says.
        """
        if not self.forks:
            return []
        needed = set[str]()
        if not self._is_over:
            width, pool = self.search.rules.width, self.beam.pool
            pooled = self.search.pool[: width * self.search.rules.candidates if pool is None else pool]
            going_on = (*self.search.candidates, *self.search.beams, *pooled)
            needed = {hypothesis.notes[-1].candidate_id for hypothesis in going_on if hypothesis.notes}
        released, self._held = self._held - needed, self._held & needed
        return sorted(released)

    def take(self, outputs: Sequence[RequestOutput]) -> list[StepCandidate]:
        """Take the outputs of the requests, in order.

        Returns:
            The candidates to score; none if further `requests` come first.

        Raises:
            StepSamplingError: a request did not finish.
        """
        self.first = self.first or outputs[0]
        ended = list(zip(self._planned.items(), outputs, strict=True))
        self._held.update(id_ for (id_, _), output in ended if isinstance(output.outputs[0].stop_reason, str))
        sampled = [self.reader.step(id_, step.beam, output) for (id_, step), output in ended]
        self._planned = {}
        return [
            StepCandidate(self.prompt, c.steps, c.token_ids, c.scores, c.is_finished, lookahead)
            for c, lookahead in self.search.take(sampled)
        ]

    def judge(self, scores: Any) -> bool:
        """Take the scores of what `take` returned. Returns whether the search is over.

        Raises:
            ScorerError: they are not one number per candidate.
        """
        self._is_over = self.search.judge(scores)
        return self._is_over

    def end(self) -> None:
        """End the search; `take_released` then returns all keys."""
        self._is_over = True
        self._held.update(self._planned)

    def answer(self) -> RequestOutput:
        """The best `n` hypotheses, best first, or all if there are fewer."""
        return self._answer_of(self.search.finished[: self.params.n])

    def _answer_of(self, best: Sequence[StepHypothesis]) -> RequestOutput:
        answer = {
            "scores": [hypothesis.score for hypothesis in best],
            "step_scores": [list(hypothesis.scores) for hypothesis in best],
            "num_rounds": self.search.num_rounds,
            "num_candidates": self.search.num_sampled,
        }
        return self._output([self._completion(index, hypothesis) for index, hypothesis in enumerate(best)], answer)

    def failure(self, error: Exception) -> RequestOutput:
        """End a failed search: `n` outputs with an error, whose stop reason is its cause; or `aborted`."""
        if isinstance(error, StepAbortedError):
            return self.aborted()
        why = str(error) if isinstance(error, ScorerError | StepSamplingError) else f"{type(error).__name__}: {error}"
        return self._without_answer("error", shortened_option_refusal(why))

    def aborted(self) -> RequestOutput:
        """End an aborted search: the best scored candidates, or `n` empty outputs if none was scored."""
        self.end()
        best = self.search.best_so_far(self.params.n)
        unended = [replace(hypothesis, finish_reason=None, stop_reason=None) for hypothesis in best]
        return self._answer_of(unended) if best else self._without_answer("abort", None)

    def _without_answer(self, finish_reason: str, stop_reason: str | None) -> RequestOutput:
        self.end()
        return self._output(empty_answer_outputs(self.params, finish_reason, [stop_reason] * self.params.n), {})

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
            None if self.params.logprobs is None else _joined_logprobs([note.logprobs for note in hypothesis.notes]),
            finish_reason=hypothesis.finish_reason or "abort",
            stop_reason=hypothesis.stop_reason,
        )


def _joined_logprobs(of_steps: Sequence[Any]) -> Any:
    """Log-probabilities of all steps, in vLLM's container of each: a list, or `FlatLogprobs`."""
    joined = of_steps[0][:0]
    joined.extend(chain.from_iterable(of_steps))
    return joined


def step_search_of(candidate_id: str) -> str:
    """The `own_id` of the search to which a candidate's request belongs, if it is one."""
    return candidate_id.rsplit("-", 2)[0]


def _params_of_step_candidates(params: SamplingParams) -> SamplingParams:
    """The parameters that all candidates share: one output each, by vLLM's sampler."""
    extra_args = {k: v for k, v in (params.extra_args or {}).items() if k not in OPTIONS}
    shared = copy(params)
    shared.n, shared.extra_args, shared.output_kind = 1, extra_args or None, RequestOutputKind.FINAL_ONLY
    shared = shared.clone()  # without the scorer, which may hold an engine that cannot be copied
    shared.logprobs = params.logprobs or 0  # without any, vLLM does not fill cumulative_logprob
    return shared
