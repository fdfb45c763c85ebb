"""Search by steps: candidates are drawn up to a delimiter, and what a scorer says of them decides which go on.

This is the search alone: who runs it draws the candidates and asks the scorer (`entrypoints.step_search`). The rules
are those of beam search with process rewards in "Scaling LLM Test-Time Compute", as search-and-learn has them. Each
round draws `width * candidates` candidates, dealt out evenly over the beams. Those that have ended leave the beam, and
compete in the end. Of the others the best `width` go on. The last of `max_steps` rounds draws to the end. Candidates of
equal text are one (there that is an option): the best would else be copies of each other. Ties go to the earlier one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple


class ScorerError(ValueError):
    """A scorer failed, or returned what are no scores."""


@dataclass(frozen=True)
class StepRules:
    """What one search asks for.

    Args:
        width: Beams that go on after each round, and finished hypotheses that are kept.
        candidates: Candidates of a round, per beam of `width`.
        max_tokens: The most tokens that a hypothesis can have.
        max_steps: Rounds; in the last one candidates are drawn to their end. None: as many as it takes.
        stops_early: Whether the search is over once `width` hypotheses are finished.
        seed: Decides what is drawn.
    """

    width: int
    candidates: int
    max_tokens: int
    max_steps: int | None
    stops_early: bool
    seed: int


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
    """

    steps: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    sum_logprobs: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    notes: tuple[Any, ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.steps)

    @property
    def score(self) -> float:
        return self.scores[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


class Draw(NamedTuple):
    """One candidate to draw.

    Args:
        beam: What it continues.
        seed: Decides what is drawn.
        max_tokens: The most tokens to draw, at least one.
        stops_at_delimiter: Whether it ends with its step; else with the hypothesis.
    """

    beam: StepHypothesis
    seed: int
    max_tokens: int
    stops_at_delimiter: bool


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


@dataclass
class StepSearch:
    """One search. Each round: draw what `draws` asks for, `take` it, and `judge` what that returns.

    Args:
        rules: What it asks for.
    """

    rules: StepRules
    beams: list[StepHypothesis] = field(default_factory=lambda: [StepHypothesis()])  # that go on, best first
    finished: list[StepHypothesis] = field(default_factory=list)  # best first, at most `width`
    num_rounds: int = 0  # that are over
    num_drawn: int = 0  # candidates
    _drawing: list[StepHypothesis] = field(default_factory=list)  # the beam that each draw continues
    _candidates: list[StepHypothesis] = field(default_factory=list)  # of this round, not judged yet

    def draws(self) -> list[Draw]:
        """The candidates of the next round: the first of each beam, best beam first, then the second of each, ..."""
        rules, number = self.rules, self.num_rounds
        is_last = rules.max_steps is not None and number + 1 >= rules.max_steps
        draws = []
        for index in range(rules.width * rules.candidates):
            nth, rank = divmod(index, len(self.beams))
            beam = self.beams[rank]
            seed = derived_seed(rules.seed, number, rank, nth)
            draws.append(Draw(beam, seed, rules.max_tokens - len(beam.token_ids), not is_last))
        self._drawing = [draw.beam for draw in draws]
        self.num_drawn += len(draws)
        return draws

    def take(self, drawn: Sequence[DrawnStep]) -> list[StepHypothesis]:
        """Take what was drawn, in the order of `draws`. Returns the candidates to score, each text once."""
        drawn_of = zip(self._drawing, drawn, strict=True)
        self._candidates = _distinct(_extended(beam, step, self.rules.max_tokens) for beam, step in drawn_of)
        return list(self._candidates)

    def judge(self, scores: Iterable[Any]) -> bool:
        """Take the scores of the candidates that `take` returned. Returns whether the search is over.

        Raises:
            ScorerError: these are not as many numbers.
        """
        values = checked_scores(scores, len(self._candidates))
        scored = [replace(c, scores=(*c.scores, value)) for c, value in zip(self._candidates, values, strict=True)]
        ranked = sorted(scored, key=lambda c: -c.score)  # stable: ties go to the earlier candidate
        width = self.rules.width
        ended = [*self.finished, *(c for c in ranked if c.is_finished)]
        self.finished = sorted(_distinct(ended), key=lambda c: -c.score)[:width]
        self.beams = [c for c in ranked if not c.is_finished][:width]
        self.num_rounds += 1
        return not self.beams or (self.rules.stops_early and len(self.finished) == width)


def checked_scores(scores: Iterable[Any], count: int) -> list[float]:
    """What a scorer returned, as `count` numbers.

    Raises:
        ScorerError: it is something else.
    """
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError) as error:
        raise ScorerError(f"the scorer returned what are no scores: {error}; return a number per candidate") from None
    if len(values) != count:
        raise ScorerError(f"the scorer returned {len(values)} scores for {count} candidates; return one for each")
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ScorerError(f"the scorer returned {value} for candidate {index} of {count}; return finite numbers")
    return values


def derived_seed(*numbers: int) -> int:
    """A seed of 63 bits that is the same wherever these numbers are."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _extended(beam: StepHypothesis, step: DrawnStep, max_tokens: int) -> StepHypothesis:
    token_ids = *beam.token_ids, *step.token_ids
    return StepHypothesis(
        (*_without_end(beam.steps, step.taken_back), step.text),
        token_ids,
        beam.scores,
        beam.sum_logprobs + step.sum_logprobs,
        step.finish_reason or ("length" if len(token_ids) >= max_tokens else None),
        step.stop_reason,
        (*beam.notes, step.note),
    )


def _without_end(steps: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The steps without their last `count` characters; no step is dropped, and one may be empty."""
    if not count:
        return steps
    *others, last = steps
    return (*_without_end(tuple(others), max(count - len(last), 0)), last[: max(len(last) - count, 0)])


def _distinct(candidates: Iterable[StepHypothesis]) -> list[StepHypothesis]:
    """The first of those that are alike: an equal text that has ended, or that has not."""
    first: dict[tuple[str, bool], StepHypothesis] = {}
    for candidate in candidates:
        first.setdefault((candidate.text, candidate.is_finished), candidate)
    return [*first.values()]
