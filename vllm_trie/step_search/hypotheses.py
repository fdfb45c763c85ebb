"""Hypotheses of a search by steps, and how a sampled step extends one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Path = tuple[int, ...]  # from the prompt on, the number of each node among its parent's children


@dataclass(frozen=True)
class StepHypothesis:
    """A hypothesis: the steps so far.

    Args:
        steps: The text of each step.
        token_ids: Of all steps, concatenated.
        scores: The scorer's value after each step; the last one is its score.
        sum_logprobs: The sum of the log-probabilities of all tokens.
        finish_reason: Why it cannot go on, "stop" or "length"; None if it can.
        stop_reason: The stop token or stop string that ended it, if any.
        notes: What the caller keeps of each step.
        path: Its place in the tree of candidates: the number of each step, from 0, among its siblings.
        step_lengths: Tokens of each step.
    """

    steps: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    sum_logprobs: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    notes: tuple[Any, ...] = ()
    path: Path = ()
    step_lengths: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.steps)

    @property
    def score(self) -> float:
        return self.scores[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


class PlannedStep(NamedTuple):
    """One candidate to sample, or a lookahead after one.

    Args:
        beam: The hypothesis that it continues.
        path: Its place in the tree.
        seed: Of sampling.
        max_tokens: The most tokens to sample, at least one.
        stops_at_delimiter: Whether it ends with its step; otherwise with the hypothesis.
        is_greedy: Whether it is a lookahead: a continuation of `beam` that only the scorer sees.
    """

    beam: StepHypothesis
    path: Path
    seed: int
    max_tokens: int
    stops_at_delimiter: bool
    is_greedy: bool = False

    def extended_by(self, step: SampledStep) -> StepHypothesis:
        """The candidate, once its step is sampled."""
        beam, token_ids = self.beam, (*self.beam.token_ids, *step.token_ids)
        return StepHypothesis(
            (*_steps_without_end(beam.steps, step.taken_back), step.text),
            token_ids,
            beam.scores,
            beam.sum_logprobs + step.sum_logprobs,
            step.finish_reason or ("length" if len(step.token_ids) >= self.max_tokens else None),
            step.stop_reason,
            (*beam.notes, step.note),
            self.path,
            (*beam.step_lengths, len(step.token_ids)),
        )


class StepQuestion(NamedTuple):
    """A candidate to be scored, and its greedy lookahead, if any."""

    candidate: StepHypothesis
    lookahead: str = ""


class SampledStep(NamedTuple):
    """One sampled step.

    Args:
        finish_reason: "stop" or "length" if the hypothesis ends; None if only the step does.
        taken_back: Characters of earlier steps that belong to a stop string which this step completes.
    """

    text: str
    token_ids: Sequence[int]
    sum_logprobs: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    note: Any = None
    taken_back: int = 0


def derived_step_seed(seed: int, path: Path) -> int:
    """The seed of 63 bits of the candidate at this place of the tree, whenever it is sampled."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _steps_without_end(steps: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The steps without their last `count` characters; no step is dropped, and one may be empty."""
    if not count:
        return steps
    *others, last = steps
    return (*_steps_without_end(tuple(others), max(count - len(last), 0)), last[: max(len(last) - count, 0)])
