"""Hypotheses of a search by steps, and how a step that was drawn makes a longer one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Path = tuple[int, ...]  # from the prompt on, the number of each node among the children of the one before it


@dataclass(frozen=True)
class StepHypothesis:
    """A text so far: the steps that led there.

    Args:
        steps: The text of each step.
        token_ids: Of all steps, one after the other.
        scores: What the scorer said of it after each step; the newest one is its score.
        sum_logprobs: Of all tokens.
        finish_reason: Why it cannot go on, "stop" or "length"; None if it can.
        stop_reason: The stop token or stop string that ended it, if one did.
        notes: What whoever draws wants to keep of each step.
        path: Where it is in the tree of candidates: for each step its number, from 0, among those drawn at that place.
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


class StepDraw(NamedTuple):
    """One candidate to draw, or what would follow one.

    Args:
        beam: What it continues.
        path: Where it will be in the tree.
        seed: Decides what is drawn.
        max_tokens: The most tokens to draw, at least one.
        stops_at_delimiter: Whether it ends with its step; else with the hypothesis.
        is_greedy: Whether it is a lookahead: what would follow `beam`, to be shown to the scorer, and then forgotten.
    """

    beam: StepHypothesis
    path: Path
    seed: int
    max_tokens: int
    stops_at_delimiter: bool
    is_greedy: bool = False

    def extended_by(self, step: DrawnStep) -> StepHypothesis:
        """The candidate, once its step is drawn."""
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
    """A candidate that the scorer is asked about, and what would follow it greedily, if that is looked at."""

    candidate: StepHypothesis
    lookahead: str = ""


class DrawnStep(NamedTuple):
    """What was drawn: one step.

    Args:
        finish_reason: "stop" or "length" where the hypothesis ends; None where only the step does.
        taken_back: Characters of earlier steps that belong to a stop string, which this step completes.
    """

    text: str
    token_ids: Sequence[int]
    sum_logprobs: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    note: Any = None
    taken_back: int = 0


def derived_step_seed(seed: int, path: Path) -> int:
    """The seed of 63 bits by which the candidate at this place of the tree is drawn, whenever that is."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _steps_without_end(steps: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The steps without their last `count` characters; no step is dropped, and one may be empty."""
    if not count:
        return steps
    *others, last = steps
    return (*_steps_without_end(tuple(others), max(count - len(last), 0)), last[: max(len(last) - count, 0)])
