"""One search as the scheduler sees it: which hypotheses live, which are finished, when it is over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_trie.engine.answer_prefix import AnswerStream, Part
from vllm_trie.engine.grammar import NoMatchers
from vllm_trie.engine.group_forests import forests_of
from vllm_trie.engine.hypothesis import Hypothesis, TokenReport
from vllm_trie.engine.plan import SearchPlan
from vllm_trie.engine.stats import SearchCounts
from vllm_trie.messages import Resumed
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step_result import Step, TokenLogprobs, TopLogprobs
from vllm_trie.search.stopping import Ended, HypothesisPool
from vllm_trie.search.strategies.in_groups import InGroups
from vllm_trie.trie.hypotheses import HypothesisTrie
from vllm_trie.trie.traced import TracedTrie


class BeamGroup:
    """The search of one request.

    Args:
        plan: What is asked for.
        matchers: What its rows have matched of its grammar, if it has one.
        streams: Whether its one answer is sent as far as it is known, by `next_part`.
    """

    def __init__(self, plan: SearchPlan, matchers: NoMatchers, streams: bool) -> None:
        self.plan, self.matchers = plan, matchers
        self.stream = AnswerStream(plan.select_rules.num_logprobs is not None) if streams else None
        self.forests = forests_of(plan.params, plan.width)
        self.counts = SearchCounts()
        self.num_pending = 0  # steps that are scheduled and whose results are not in yet
        self.restart()

    @property
    def num_rows(self) -> int:
        """Rows that the group keeps from one step of the engine to the next."""
        return 1 if self.plan.params.memory_mode else self.plan.width

    @property
    def waits(self) -> bool:
        """Whether results must be in before a step is scheduled.

        A forest makes histories longer by what it holds, and what is done of group beam search the others go by.
        """
        if self.num_pending == 0:
            return False
        if isinstance(self.plan.select_rules.strategy, InGroups):
            stop_rules = self.plan.stop_rules  # without which, and without items, none is done before the end
            return bool(stop_rules.stop_token_ids or stop_rules.stop_strings or self.plan.select_rules.items)
        return self.forests.may_grow(self.planned_length)

    @property
    def planned_length(self) -> int:
        """Tokens that every running beam has generated once all that is scheduled is done, if the search goes on."""
        return self.length + self.num_pending

    @property
    def num_steps_left(self) -> int:
        """Steps until the length is reached."""
        return self.plan.stop_rules.max_length - self.length

    @property
    def num_common(self) -> int:
        """Generated tokens that all rows have in common: one computes them before it fans out again."""
        return self._num_resumed or 0

    def restart(self) -> None:
        """Forget the search; it will find the same again from the prompt."""
        self.length = 0  # tokens every running beam has generated
        self.hypotheses = TracedTrie() if self.plan.params.trace else HypothesisTrie()
        self.pool = self.plan.new_pool()
        self.pool.most_boost = sum(constraint.most_boost for constraint in self.plan.select_rules.constraints)
        self._rank_scores: list[float] | None = None  # what rows compete by, if not by their sums
        self.best_end = 0, 0  # the length and the row from which the best finished hypothesis took its last token
        self._num_resumed: int | None = None  # tokens that rows had in common when they were lost, if ever
        self.forests.restart()
        self.matchers.restart()
        if self.stream is not None:
            self.stream.restart()

    def preempt(self) -> None:
        """The rows' KV is lost, the search is not: it goes on from the tokens that all of them have in common."""
        if self.length > 0:
            columns = zip(*self.hypotheses.paths(), strict=True)
            num_common = next((i for i, nodes in enumerate(columns) if len(set(nodes)) > 1), self.length)
            self._num_resumed = self.forests.drafted_length = min(num_common, self.length - 1)

    def paths_to_fan_out(self) -> list[list[int]]:
        """For each row a key per token to compute after it fans out; where keys are equal, histories are."""
        if self.length == 0:
            return [[row] for row in range(self.num_rows)]
        return [path[self.num_common :] for path in self.hypotheses.paths()]

    def history(self, row: int) -> list[int]:
        """The tokens that a row has generated."""
        return self.hypotheses.tokens(self.hypotheses.rows[row])

    def resumed(self) -> Resumed | None:
        """What the worker must know to fan out a group that was preempted."""
        if self._num_resumed is None:
            return None
        histories = [self.history(row) for row in range(self.num_rows)]
        return Resumed(histories, self.hypotheses.row_scores(), self._rank_scores)

    def next_rules(self, ahead: int = 0) -> SelectRules:
        """How the worker selects in the next step to be scheduled, or `ahead` steps later."""
        return self.plan.rules(self.planned_length + 1 + ahead, self.pool)

    def next_draw(self) -> tuple[int, int] | None:
        """What decides the draws of the next step to be scheduled, if there are any."""
        return self.plan.draw(self.planned_length + 1)

    def advance(self, step: Step) -> bool:
        """Replay what the worker decided in one step. Returns whether the search is over.

        Raises:
            GrammarError: a row took a token that its grammar does not take.
        """
        self.length += 1
        ended, rank_scores = Ended([], [], [], []), step.rank_scores
        if len(step.finished.tokens):
            parents, tokens, scores = (field.tolist() for field in step.finished)
            reports = _reports(step.finished, step.finished_logprobs, step.top_logprobs)
            nodes = self.hypotheses.finish(self._rows(parents), tokens, scores, reports)
            ended = Ended(scores if rank_scores is None else rank_scores.finished.tolist(), tokens, nodes, parents)
        running = step.scores if rank_scores is None else rank_scores.beams
        outdone, is_over = self.pool.advance(ended, running, self.length)
        if self.stream is None:
            for hypothesis in outdone:
                self.hypotheses.drop(hypothesis.node)
        elif ended.nodes:  # all but the best, which only compete, hold nothing back
            self.hypotheses.keep_only(self.pool.best(1)[0].node)
        if ended.nodes and (best_finished := self.pool.best(1)[0]).node in nodes:
            self.best_end = self.length - 1, self._rows(parents)[nodes.index(best_finished.node)]
        if is_over or self.num_steps_left == 0:
            return True
        beams = Candidates(step.parents, step.tokens, step.scores)
        parents, tokens, scores = (field.tolist() for field in beams)
        parents = self._rows(parents)
        self.hypotheses.advance(parents, tokens, scores, _reports(beams, step.beam_logprobs, step.top_logprobs))
        self._rank_scores = None if rank_scores is None else rank_scores.beams.tolist()
        self.matchers.advance(parents, tokens, scores)
        return False

    def next_part(self) -> Part | None:
        """What is new, if anything, of what the answer begins with whatever comes.

        That is what all running beams and the best finished hypothesis have in common; once no beam can beat that
        hypothesis, all of it but its end.

        Raises:
            AnswerChangedError: something else was sent before a preemption.
        """
        stream, trie = self.stream, self.hypotheses
        assert stream is not None
        assert isinstance(self.pool, HypothesisPool)
        if stream.is_decided:
            return None
        scores = trie.row_scores()
        best_running = max(scores if self._rank_scores is None else self._rank_scores)
        stream.is_decided = len(self.pool) > 0 and self.pool.is_decided(best_running, self.length)
        if stream.is_decided:
            return stream.extend(trie, trie.parent(self.pool.best(1)[0].node))
        dead = [row for row, score in enumerate(scores) if score == -np.inf]
        return stream.extend(trie, trie.deepest_common(stream.node, dead))

    def _rows(self, parents: list[int]) -> list[int]:
        """The rows that continuations have as parents: of the prompt there is one, whichever group continues it."""
        return parents if len(self.hypotheses.rows) > 1 else [0] * len(parents)

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` finished hypotheses, best first; fewer if there are fewer."""
        return [self._hypothesis(*finished) for finished in self.pool.best(count)]

    def best_so_far(self, count: int) -> list[Hypothesis]:
        """The best `count` hypotheses if the search ends here, best first, with beams that go on among them."""
        trie, sums = self.hypotheses, self._rank_scores or self.hypotheses.row_scores()
        if self.length == 0 or (self.stream is not None and self.stream.is_decided):
            return self.best(count)
        rows = [*range(len(trie.rows))]
        running = Ended(sums, [trie.token(node) for node in trie.rows], trie.rows, rows)
        beams = set(trie.rows)
        found = self.pool.best_so_far(count, running, self.length)
        return [self._hypothesis(one.score, one.node, one.node in beams) for one in found]

    @property
    def traced(self) -> TracedTrie | None:
        """What remembers the search, if it is traced."""
        return self.hypotheses if isinstance(self.hypotheses, TracedTrie) else None

    def unsent(self, best: list[Hypothesis]) -> list[Hypothesis]:
        """Of these, in a stream, what is not sent yet.

        Raises:
            AnswerChangedError: something else was sent before a preemption.
        """
        return best if self.stream is None else [self.stream.rest(hypothesis) for hypothesis in best]

    def unsent_so_far(self, best: list[Hypothesis]) -> list[Hypothesis]:
        """Of these, which `best_so_far` returned, in a stream what is not sent yet."""
        return best if self.stream is None else [self.stream.rest_so_far(next(iter(best), None))]

    def check_invariants(self) -> None:
        self.hypotheses.check_invariants()
        assert self.length == 0 or len(self.hypotheses.rows) in (1, self.num_rows)

    def _hypothesis(self, score: float, node: int, is_running: bool = False) -> Hypothesis:
        tokens = self.hypotheses.tokens(node)
        stopped_by = tokens[-1] if tokens[-1] in self.plan.stop_rules.stop_token_ids else None
        reports = self.hypotheses.notes(node) if self.plan.select_rules.num_logprobs is not None else None
        is_complete = self.plan.select_rules.items is not None
        if is_running:
            stopped_by, is_complete = None, False
        total = self.hypotheses.score(node)
        return Hypothesis(tokens, total, score, stopped_by, reports, is_complete, is_running, node)


def _reports(
    continuations: Candidates[np.ndarray],
    own: TokenLogprobs[np.ndarray] | None,
    top_logprobs: TopLogprobs[np.ndarray] | None,
) -> Sequence[TokenReport] | None:
    """What is returned of the newest token of each, where log-probabilities are."""
    if own is None or top_logprobs is None:
        return None
    token_ids = np.column_stack([continuations.tokens, top_logprobs.tokens[continuations.parents]])
    logprobs = np.column_stack([own.logprobs, top_logprobs.logprobs[continuations.parents]])
    return [TokenReport(*report) for report in zip(token_ids, logprobs, own.ranks.tolist(), strict=True)]
