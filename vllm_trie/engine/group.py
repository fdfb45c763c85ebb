"""One search as the scheduler sees it: which hypotheses live, which are finished, when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_trie.engine.answer_prefix import AnswerStream, Part
from vllm_trie.engine.grammar import RowMatchers
from vllm_trie.engine.hypothesis import Hypothesis, TokenReport
from vllm_trie.engine.stats import SearchCounts
from vllm_trie.messages import Resumed
from vllm_trie.options import BeamParams
from vllm_trie.search.forest_size import Acceptance
from vllm_trie.search.group_pools import GroupPools
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import Best, InGroups, SampledEach, SelectRules
from vllm_trie.search.step_result import Step, TokenLogprobs, TopLogprobs
from vllm_trie.search.stopping import (
    Ended,
    HfPool,
    HypothesisPool,
    Pool,
    StochasticPool,
    StopRules,
    TridecodePool,
    VllmPool,
)
from vllm_trie.trie.hypotheses import HypothesisTrie

DRAFTS_PER_BEAM = 2  # of a layer, unless a request says otherwise


@dataclass(eq=False)
class BeamGroup:
    """The search of one request.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        rules: What ends a hypothesis.
        prompt_length: Tokens of its prompt.
        select_rules: How the worker selects, in any step.
        is_offline: `LLM.beam_search` asks. Under semantics="vllm" it differs from vLLM's server in one
            point: it compares running beams by their final scores, which leave an ignored EOS uncounted.
        seed: Decides what is drawn, if anything is.
        counts_prompt: Whether hypotheses compete under semantics="vllm" by a length that counts the prompt, and leaves
            a stop token in the end out, as in vLLM 0.32; in 0.33 they do not.
        matchers: What its rows have matched of its grammar, if it has one.
        streams: Whether its one answer is sent as far as it is known, by `next_part`.
    """

    request_id: str
    params: BeamParams
    rules: StopRules
    prompt_length: int
    select_rules: SelectRules
    is_offline: bool = False
    seed: int = 0
    counts_prompt: bool = True
    matchers: RowMatchers | None = None
    streams: bool = False

    def __post_init__(self) -> None:
        self.stream = AnswerStream(self.select_rules.num_logprobs is not None) if self.streams else None
        self.counts = SearchCounts()
        self.acceptance: dict[int, Acceptance] = {}  # by draft width, where it decides how large forests are
        self.num_pending = 0  # steps that are scheduled and whose results are not in yet
        self.restart()

    @property
    def width(self) -> int:
        """Beams side by side: `beam_width`, or where fewer can live as many."""
        return self.select_rules.width

    @property
    def catalog(self) -> str | None:
        """Digest of the catalog along which it goes."""
        return None if self.select_rules.items is None else self.select_rules.items.catalog

    @property
    def num_rows(self) -> int:
        """Rows that the group keeps from one step of the engine to the next."""
        return 1 if self.params.memory_mode else self.width

    @property
    def speculates(self) -> bool:
        """Whether the next step may be more than one."""
        return self.is_speculative and self.length >= self._first_length_of_forests

    @property
    def waits(self) -> bool:
        """Whether results must be in before a step is scheduled.

        A forest makes histories longer by what it holds, and what is done of group beam search the others go by.
        """
        if self.num_pending == 0:
            return False
        if isinstance(self.select_rules.strategy, InGroups):
            return bool(self.rules.stop_token_ids or self.rules.stop_strings)  # else none is done before the end
        return self.is_speculative and self.planned_length >= self._first_length_of_forests

    @property
    def _first_length_of_forests(self) -> int:
        return max(self.params.sample_first, self._rested_at)

    def rest(self, num_steps: int) -> None:
        """Take so many plain steps before the next forest."""
        self._rested_at, self.num_rested = self.length + num_steps, num_steps

    @property
    def is_speculative(self) -> bool:
        """Whether the request asks for speculation."""
        return self.params.speculation not in (None, "off")

    @property
    def draft_width(self) -> int:
        """Drafts of one layer."""
        return self.params.draft_width or DRAFTS_PER_BEAM * self.width

    @property
    def planned_length(self) -> int:
        """Tokens that every running beam has generated once all that is scheduled is done, if the search goes on."""
        return self.length + self.num_pending

    @property
    def num_steps_left(self) -> int:
        """Steps until the length is reached."""
        return self.rules.max_length - self.length

    def restart(self) -> None:
        """Forget the search; it will find the same again from the prompt."""
        self.length = 0  # tokens every running beam has generated
        self._rested_at = self.num_rested = self.num_failed = 0  # forests in a row that led nowhere, where that counts
        self.hypotheses = HypothesisTrie()
        stop_token_ids, max_length = self.rules.stop_token_ids, self.rules.max_length
        self.pool = new_pool(self.params, max_length, *self._uneven_lengths, stop_token_ids=stop_token_ids)
        self.pool.most_boost = sum(constraint.most_boost for constraint in self.select_rules.constraints)
        self._rank_scores: list[float] | None = None  # what rows compete by, if not by their sums
        self.best_end = 0, 0  # the length and the row from which the best finished hypothesis took its last token
        self.drafted_length = 0  # generated tokens of every beam that a draft model, if there is one, has computed
        self.was_preempted = False  # since there have been rows
        if self.matchers is not None:
            self.matchers.restart()
        if self.stream is not None:
            self.stream.restart()
        self.num_common = 0  # generated tokens that all rows have in common: one computes them before it fans out again

    def preempt(self) -> None:
        """The rows' KV is lost, the search is not: it goes on from the tokens that all of them have in common."""
        self.was_preempted = self.length > 0
        if self.was_preempted:
            columns = zip(*self.hypotheses.paths(), strict=True)
            num_common = next((i for i, nodes in enumerate(columns) if len(set(nodes)) > 1), self.length)
            self.num_common = self.drafted_length = min(num_common, self.length - 1)

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
        if not self.was_preempted:
            return None
        histories = [self.history(row) for row in range(self.num_rows)]
        return Resumed(histories, self.hypotheses.row_scores(), self._rank_scores)

    def next_rules(self, ahead: int = 0) -> SelectRules:
        """How the worker selects in the next step to be scheduled, or `ahead` steps later."""
        length = self.planned_length + 1 + ahead
        rules, may_stop = self.select_rules, length > self.rules.min_length
        strategy, stops = rules.strategy, rules.stops
        if self.params.semantics == "tridecode" and length == 1 and may_stop:
            stops = stops._replace(token_ids=())  # the published code does not look for EOS in the first step
        if length <= self.params.sample_first:
            strategy = SampledEach()
        elif isinstance(self.pool, GroupPools) and isinstance(strategy, InGroups):
            strategy = strategy._replace(done=self.pool.done)
        elif isinstance(strategy, Best):
            strategy = strategy._replace(eos_score_factor=self._eos_score_factor(length))
        return rules._replace(
            strategy=strategy,
            stops=stops._replace(are_barred=not may_stop),
            is_last=length == self.rules.max_length,
            num_beams=self._num_beams(length),
        )

    def _num_beams(self, length: int) -> int | None:
        """How many beams of `length` tokens may go on, if not as many as there are rows."""
        widths = self.params.beam_widths or [self.width]
        num_beams = widths[min(length, len(widths)) - 1]
        return num_beams if num_beams < self.width else None

    def next_draw(self) -> tuple[int, int] | None:
        """What decides the draws of the next step to be scheduled, if there are any."""
        length = self.planned_length + 1
        return (self.seed, length) if self.params.do_sample or length <= self.params.sample_first else None

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
        if self.length == self.rules.max_length or is_over:
            return True
        beams = Candidates(step.parents, step.tokens, step.scores)
        parents, tokens, scores = (field.tolist() for field in beams)
        parents = self._rows(parents)
        self.hypotheses.advance(parents, tokens, scores, _reports(beams, step.beam_logprobs, step.top_logprobs))
        self._rank_scores = None if rank_scores is None else rank_scores.beams.tolist()
        if self.matchers is not None:
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

    def unsent(self, best: list[Hypothesis]) -> list[Hypothesis]:
        """Of these, in a stream, what is not sent yet.

        Raises:
            AnswerChangedError: something else was sent before a preemption.
        """
        return best if self.stream is None else [self.stream.rest(hypothesis) for hypothesis in best]

    def best_tokens(self) -> list[int]:
        """The tokens of the best finished hypothesis."""
        (best,) = self.pool.best(1)
        return self.hypotheses.tokens(best.node)

    def check_invariants(self) -> None:
        self.hypotheses.check_invariants()
        assert self.length == 0 or len(self.hypotheses.rows) in (1, self.num_rows)

    def _hypothesis(self, score: float, node: int) -> Hypothesis:
        tokens = self.hypotheses.tokens(node)
        stopped_by = tokens[-1] if tokens[-1] in self.rules.stop_token_ids else None
        reports = self.hypotheses.notes(node) if self.select_rules.num_logprobs is not None else None
        is_complete = self.select_rules.items is not None
        return Hypothesis(tokens, self.hypotheses.score(node), score, stopped_by, reports, is_complete)

    @property
    def _uneven_lengths(self) -> tuple[int, frozenset[int]]:
        """What counts in the length of a hypothesis besides its tokens, and which of them do not count in its end."""
        if not self.counts_prompt:
            return 0, frozenset()
        eos = self.rules.eos_token_id
        return self.prompt_length, frozenset(self.rules.stop_token_ids) | (frozenset() if eos is None else {eos})

    def _eos_score_factor(self, length: int) -> tuple[int, float] | None:
        """By what factor the score of a beam that goes on after an ignored EOS differs."""
        eos = self.rules.eos_token_id
        counts_alike = not self.is_offline or not self.counts_prompt
        if counts_alike or eos is None or eos in self.rules.stop_token_ids:
            return None
        counted = self.prompt_length + length
        factor = (counted / max(counted - 1, 1)) ** self.params.length_penalty
        return (eos, factor) if factor != 1.0 else None


def new_pool(
    params: BeamParams,
    max_length: int,
    prompt_length: int = 0,
    uncounted: frozenset[int] = frozenset(),
    stop_token_ids: tuple[int, ...] = (),
) -> Pool:
    """Where finished hypotheses compete, by a search's semantics.

    Args:
        max_length: The most tokens a hypothesis can generate.
        prompt_length: Tokens of the prompt, where semantics="vllm" counts them.
        uncounted: Tokens that do not count in the end of a hypothesis, likewise.
        stop_token_ids: Which end a hypothesis.
    """
    width, penalty = params.beam_width, params.length_penalty
    if params.semantics == "vllm":
        return VllmPool(width, penalty, max_length, prompt_length, uncounted)
    if params.semantics == "tridecode":
        return TridecodePool(width, penalty, max_length)
    if params.stochastic:
        return StochasticPool(width, penalty, max_length)
    if params.num_beam_groups > 1:
        of_group = width // params.num_beam_groups
        pools = [HfPool(of_group, penalty, max_length, params.early_stopping) for _ in range(params.num_beam_groups)]
        return GroupPools(pools, of_group, stop_token_ids)
    # One beam is greedy search: `generate(num_beams=1)` stops at the first stop token, whatever the options.
    return HfPool(width, penalty, max_length, True if width == 1 else params.early_stopping)


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
