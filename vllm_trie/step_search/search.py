"""Search by steps: candidates are sampled up to a delimiter, and a scorer decides which of them go on.

This is only the search: its caller samples the candidates and calls the scorer (`request.py`). By default the rules are
those of beam search with process rewards in "Scaling LLM Test-Time Compute", as in search-and-learn. Each round samples
`width * candidates` candidates, spread evenly over the beams. Those that have ended leave the beam and compete at the
end. Of the others the best `width` go on. The last of `max_steps` rounds samples to the end. Candidates with equal
texts are merged (an option in search-and-learn), as the best would otherwise be copies of each other. Ties go to the
earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_trie.step_search.allotment import allot_steps_by_score, allot_steps_evenly, steps_worth_their_kv
from vllm_trie.step_search.hypotheses import PlannedStep, SampledStep, StepHypothesis, StepQuestion, derived_step_seed
from vllm_trie.step_search.open_candidates import open_step_candidates
from vllm_trie.step_search.rules import StepRules
from vllm_trie.step_search.scores import checked_step_scores


@dataclass
class StepSearch:
    """One search. Each round: sample what `plan` asks for, `take` it, and `judge` the returned candidates, if any.

    Args:
        rules: Its rules.
    """

    rules: StepRules
    beams: list[StepHypothesis] = field(default_factory=lambda: [StepHypothesis()])  # those that go on, best first
    finished: list[StepHypothesis] = field(default_factory=list)  # best first, at most `width`
    num_rounds: int = 0  # finished ones
    num_sampled: int = 0  # candidates
    candidates: list[StepHypothesis] = field(default_factory=list)  # of this round, not yet judged
    _planned: list[PlannedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._budget = self.rules.width * self.rules.candidates  # candidates of the next round
        self._shares = [self._budget]  # of each beam
        self._open = open_step_candidates(self.rules)

    @property
    def pool(self) -> list[StepHypothesis]:
        """Candidates that did not go on but still may, best first."""
        return self._open.candidates

    def plan(self) -> list[PlannedStep]:
        """What to sample next: lookaheads of this round's candidates, or the candidates of the next round.

        The latter are the first candidate of each beam, best beam first, then the second of each, and so on.
        """
        if not self.candidates:
            self._planned = self._next_candidates()
            self.num_sampled += len(self._planned)
        return list(self._planned)

    def _next_candidates(self) -> list[PlannedStep]:
        rules, planned = self.rules, list[PlannedStep]()
        is_last = rules.max_steps is not None and self.num_rounds + 1 >= rules.max_steps
        for nth in range(max(self._shares)):
            for beam in (beam for beam, share in zip(self.beams, self._shares, strict=True) if nth < share):
                path = *beam.path, nth
                left = rules.max_tokens - len(beam.token_ids)
                planned.append(PlannedStep(beam, path, derived_step_seed(rules.seed, path), left, not is_last))
        return planned

    def take(self, sampled: Sequence[SampledStep]) -> list[StepQuestion]:
        """Take the sampled steps, in the order of `plan`.

        Returns:
            The candidates to score, each text once; none if `plan` asks for their lookaheads first.
        """
        if self.candidates:
            lookaheads = {planned.path: step.text for planned, step in zip(self._planned, sampled, strict=True)}
            return [StepQuestion(c, lookaheads.get(c.path, "")) for c in self.candidates]
        extended = [planned.extended_by(step) for planned, step in zip(self._planned, sampled, strict=True)]
        if self.rules.allot == "rebase":
            self._budget -= sum(candidate.is_finished for candidate in extended)
        self.candidates = self._distinct(extended)
        self._planned = self._lookaheads()
        return [] if self._planned else [StepQuestion(c) for c in self.candidates]

    def _lookaheads(self) -> list[PlannedStep]:
        most, max_tokens = self.rules.lookahead, self.rules.max_tokens
        live = [c for c in self.candidates if most and not c.is_finished]
        return [
            PlannedStep(c, c.path, 0, min(most, max_tokens - len(c.token_ids)), False, is_greedy=True) for c in live
        ]

    def judge(self, scores: Iterable[Any]) -> bool:
        """Take the scores of the candidates that `take` returned. Returns whether the search is over.

        Raises:
            ScorerError: they are not one number per candidate.
        """
        values, width = checked_step_scores(scores, len(self.candidates)), self.rules.width
        scored = [replace(c, scores=(*c.scores, value)) for c, value in zip(self.candidates, values, strict=True)]
        self.candidates = []
        ranked = _ranked_step_candidates(scored)
        if self.rules.allot == "dvts":
            ranked = _first_step_of_each(ranked, self._subtree)
        ended = [*self.finished, *(c for c in ranked if c.is_finished)]
        self.finished = _ranked_step_candidates(_first_step_of_each(ended, lambda c: c.text))[:width]
        self._open.add(ranked)
        self._allot()
        self.num_rounds += 1
        is_enough = self.rules.stops_early and len(self.finished) == width
        return not self.beams or is_enough or self.num_rounds == self.rules.max_steps

    def best_so_far(self, count: int) -> list[StepHypothesis]:
        """The best `count` scored candidates, best first, each text once: the answer if the search ends now."""
        scored = [hypothesis for hypothesis in (*self.finished, *self.beams, *self.pool) if hypothesis.scores]
        return _ranked_step_candidates(_first_step_of_each(scored, lambda c: c.text))[:count]

    def _allot(self) -> None:
        """Decide which of the open candidates go on, and how many new candidates each gets.

        "rebase" follows the paper's algorithm and the authors' code: all that have not ended share what is left of the
        first budget, from which each candidate that has ended takes one. When nothing is left, the search ends. The
        paper does not mention copies: here copies of an ended candidate take one each, as they were sampled, and
        copies of one that goes on have one share.

        "dvts" follows search-and-learn: only the best candidate of each subtree goes on, and if it has ended, so has
        the subtree. There all candidates of a subtree's last round are results; here only its best one is.
        """
        rules = self.rules
        beams = self._open.first(len(self.pool) if rules.allot == "rebase" else rules.width)
        shares = list[int]()
        if beams and rules.allot == "rebase":
            shares = self._by_score(beams)
            if rules.prefer_shared and self._budget:
                beams = steps_worth_their_kv(beams, shares, rules.prefer_shared)
                shares = self._by_score(beams)
        elif beams:
            shares = allot_steps_evenly(
                len(beams), rules.candidates * len(beams) if rules.allot == "dvts" else self._budget
            )
        self.beams = [beam for beam, share in zip(beams, shares, strict=True) if share]
        self._shares = [share for share in shares if share]
        self._open.close(self.beams)

    def _by_score(self, beams: Sequence[StepHypothesis]) -> list[int]:
        return allot_steps_by_score([beam.score for beam in beams], self._budget, self.rules.allot_temperature)

    def _distinct(self, candidates: Iterable[StepHypothesis]) -> list[StepHypothesis]:
        """The first of equal candidates: with the same text, both ended or not, in the same subtree."""
        return _first_step_of_each(candidates, lambda c: (self._subtree(c), c.text, c.is_finished))

    def _subtree(self, candidate: StepHypothesis) -> int:
        """The number of its subtree under "dvts", whose subtrees are independent; otherwise 0."""
        return candidate.path[0] % self.rules.width if self.rules.allot == "dvts" else 0


def _ranked_step_candidates(candidates: Iterable[StepHypothesis]) -> list[StepHypothesis]:
    """Best first; ties go to the earlier candidate."""
    return sorted(candidates, key=lambda c: -c.score)


def _first_step_of_each(
    candidates: Iterable[StepHypothesis], kind: Callable[[StepHypothesis], Any]
) -> list[StepHypothesis]:
    first: dict[Any, StepHypothesis] = {}
    for candidate in candidates:
        first.setdefault(kind(candidate), candidate)
    return [*first.values()]
