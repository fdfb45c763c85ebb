"""The open candidates of a search by steps, in the order of expansion: by rounds, best first, or by the rule of MCTS.

None is expanded twice. The order depends only on scores and on places in the tree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_trie.step_search.hypotheses import Path, StepHypothesis
from vllm_trie.step_search.rules import StepRules


@dataclass
class OpenStepCandidates:
    """Open candidates of a breadth-first search: only those of the last round.

    Args:
        candidates: Best first; ties go to the earlier one.
    """

    candidates: list[StepHypothesis] = field(default_factory=list)

    def add(self, judged: Sequence[StepHypothesis]) -> None:
        """Add the candidates of a round, best first, including those that have ended."""
        self.candidates = [c for c in judged if not c.is_finished]

    def first(self, count: int) -> list[StepHypothesis]:
        """The next candidates to expand, at most `count`."""
        return self.candidates[:count]

    def close(self, expanded: Sequence[StepHypothesis]) -> None:
        """Remove the candidates that were expanded."""
        self.candidates = []


@dataclass
class BestStepFirst(OpenStepCandidates):
    """Open candidates of a best-first search: those of all rounds."""

    def add(self, judged: Sequence[StepHypothesis]) -> None:
        live = (c for c in judged if not c.is_finished)
        self.candidates = sorted([*self.candidates, *live], key=lambda c: -c.score)

    def close(self, expanded: Sequence[StepHypothesis]) -> None:
        paths = {c.path for c in expanded}
        self.candidates = [c for c in self.candidates if c.path not in paths]


@dataclass
class StepTreeSearch(BestStepFirst):
    """Open candidates of all rounds, selected by UCT (Kocsis and Szepesvari 2006), the rule of MCTS.

    From the root it goes to the child with the greatest mean + exploration * sqrt(ln(visits of the parent) / visits),
    until it reaches an open candidate. A candidate counts as a visit of itself and of all nodes on its path, with its
    score as the value; there are no rollouts. Expansions that a round has already chosen count as the visits that they
    will be, without a value, as in WU-UCT (Liu et al. 2020). Subtrees without open candidates are left out.

    Args:
        exploration: The constant; 1.0 suits scores from 0 to 1.
        candidates_each: Visits that an expansion counts as.
    """

    exploration: float = 1.0
    candidates_each: int = 1
    _visits: Counter[Path] = field(default_factory=Counter)
    _sums: dict[Path, float] = field(default_factory=dict)  # of scores
    _children: dict[Path, list[Path]] = field(default_factory=dict)
    _num_open: Counter[Path] = field(default_factory=Counter)  # open candidates of each subtree

    def add(self, judged: Sequence[StepHypothesis]) -> None:
        super().add(judged)
        for candidate in judged:
            self._children.setdefault(candidate.path[:-1], []).append(candidate.path)
            for path in _way_to_step_candidate(candidate):
                self._visits[path] += 1
                self._sums[path] = self._sums.get(path, 0.0) + candidate.score
                self._num_open[path] += not candidate.is_finished

    def first(self, count: int) -> list[StepHypothesis]:
        candidates, taken = {c.path: c for c in self.candidates}, Counter[Path]()
        chosen = list[StepHypothesis]()
        for _ in range(min(count, len(candidates))):
            path: Path = ()
            while path not in candidates:
                path = self._child(path, taken)
            chosen.append(candidates[path])
            taken.update(_way_to_step_candidate(chosen[-1]))
        return chosen

    def close(self, expanded: Sequence[StepHypothesis]) -> None:
        super().close(expanded)
        for candidate in expanded:
            self._num_open.subtract(_way_to_step_candidate(candidate))

    def _child(self, parent: Path, taken: Counter[Path]) -> Path:
        """The child that UCT selects, given the candidates taken in this round; ties go to the one sampled first."""
        log_parent = math.log(self._visits[parent] + self.candidates_each * taken[parent])

        def uct(path: Path) -> float:
            visits = self._visits[path] + self.candidates_each * taken[path]
            return self._sums[path] / self._visits[path] + self.exploration * math.sqrt(log_parent / visits)

        live = (path for path in self._children[parent] if self._num_open[path] > taken[path])
        return max(live, key=lambda path: (uct(path), -path[-1]))


def open_step_candidates(rules: StepRules) -> OpenStepCandidates:
    """An empty set of open candidates, in the order of the rules."""
    if rules.order == "mcts":
        return StepTreeSearch(exploration=rules.exploration, candidates_each=rules.candidates)
    return BestStepFirst() if rules.order == "best" else OpenStepCandidates()


def _way_to_step_candidate(candidate: StepHypothesis) -> list[Path]:
    """The nodes from the root to a candidate."""
    return [candidate.path[:depth] for depth in range(len(candidate.path) + 1)]
