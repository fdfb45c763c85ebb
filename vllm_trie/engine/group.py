"""One search as the scheduler sees it: its plan, its running and finished hypotheses, and when it is over."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vllm_trie.engine.answer_prefix import EngineAnswerPart, EngineAnswerStream
from vllm_trie.engine.catalogs import NoGroupCatalog
from vllm_trie.engine.grammar import GroupGrammar
from vllm_trie.engine.hypothesis import NO_HYPOTHESES, GroupHypotheses, GroupTokenReports
from vllm_trie.engine.stats import GroupCounts
from vllm_trie.messages import Caller, DecidedMessage, Resumed
from vllm_trie.options import BeamParams
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.step_result import SearchStepResult, SearchTokenLogprobs, SearchTopLogprobs
from vllm_trie.search.stopping import (
    NO_ENDED,
    NO_TOKEN,
    EndedSearchHypotheses,
    FinishedSearchHypotheses,
    SearchHypothesisPool,
    SearchPool,
    are_search_tokens_among,
)
from vllm_trie.trie import num_equal_trie_columns
from vllm_trie.trie.hypotheses import ROOT, HypothesisTrie
from vllm_trie.trie.leaves import Notes

if TYPE_CHECKING:
    from vllm_trie.search.unique_pools import ItemsOf
    from vllm_trie.trie.traced import TracedTrie


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """The fixed parameters of one search: what ends hypotheses, and how steps select.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        num_outputs: Outputs that the request asks for.
        caller: The user's name for beam search.
        search: How the worker selects, in all steps.
        stop_token_ids: The tokens that end a hypothesis, including EOS unless it is ignored.
        eos_token_id: The stop token that is not reported as a stop reason; None if EOS is ignored.
        min_length: Generated tokens that a hypothesis must have before it may stop.
        max_length: Generated tokens at which it ends in any case.
        catalog: The catalog that beams follow, if any.
        new_pool: Makes the pool in which finished hypotheses compete; takes their items if each item counts once.
        prompt_length: Tokens of the prompt.
        uncounted_eos: An ignored EOS that final scores do not count, where running beams compete by final scores: in
            `LLM.beam_search` of vLLM 0.32, but not in its server.
        seed: Of sampling, if the search samples.
        num_sampled_steps: The number of first steps that sample.
    """

    request_id: str
    params: BeamParams
    num_outputs: int
    caller: Caller
    search: SearchRules
    stop_token_ids: frozenset[int]
    eos_token_id: int | None
    min_length: int
    max_length: int
    catalog: NoGroupCatalog
    new_pool: Callable[[ItemsOf | None], SearchPool]
    prompt_length: int
    uncounted_eos: int | None
    seed: int
    num_sampled_steps: int

    @property
    def width(self) -> int:
        """Beams of the search: `beam_width`, or fewer if a catalog does not allow as many."""
        return self.search.width

    @property
    def num_hypotheses(self) -> int:
        """The most hypotheses that are returned."""
        return self.width if self.params.compact else self.num_outputs

    @cached_property
    def brings(self) -> Mapping[Hashable, int]:
        """The tables of the request on each device while it runs: bytes by key, where equal tables have equal keys."""
        sizes = {key: key.num_bytes for key in self.search.constraints}
        return {**self.catalog.brings, **{key: size for key, size in sizes.items() if size}}

    def phase(self, length: int, pool: SearchPool) -> SearchPhase:
        """The parameters of the step after which beams have `length` tokens."""
        may_stop, widths, width = length > self.min_length, self.params.beam_widths, self.search.width
        num_beams = widths[min(length, len(widths)) - 1] if widths else width
        return SearchPhase(
            may_stop,
            bars_items=length < self.min_length,
            # The published code does not look for EOS in the first step.
            looks_for_stops=not (self.params.semantics == "tridecode" and length == 1 and may_stop),
            is_last=length == self.max_length,
            num_beams=num_beams if num_beams < width else None,  # else one per row
            samples_rows=length <= self.params.sample_first,
            done=pool.done,
            eos_score_factor=None if self.uncounted_eos is None else self._eos_score_factor(length),
        )

    def _eos_score_factor(self, length: int) -> tuple[int, float] | None:
        """The ignored EOS, and the factor by which it changes the score of a beam that goes on after it."""
        assert self.uncounted_eos is not None
        counted = self.prompt_length + length
        factor = (counted / max(counted - 1, 1)) ** self.params.length_penalty
        return (self.uncounted_eos, factor) if factor != 1.0 else None


class BeamGroupForests:
    """When a search may take several steps at once; this base class, for searches that do not speculate, says never."""

    def __init__(self) -> None:
        self.drafted_length = 0  # generated tokens of every beam that the draft model, if any, has computed
        self.first_length = math.inf  # generated tokens from which on the next step may be several

    def restart(self) -> None:
        """Begin again, as the search does."""
        self.drafted_length = 0

    def report(self, counts: GroupCounts) -> dict[str, Any]:
        """What the answer reports about speculation."""
        return {}


class BeamGroup:
    """The search of one request.

    Args:
        plan: Its parameters.
        matchers: The state of its rows in its grammar, if it has one.
        streams: Whether its only answer is streamed, by `next_part`.
    """

    def __init__(self, plan: GroupPlan, matchers: GroupGrammar | None, streams: bool) -> None:
        self.plan, self.matchers = plan, matchers
        self.stream = EngineAnswerStream(plan.search.num_logprobs is not None) if streams else None
        self.forests = BeamGroupForests()  # replaced if it speculates
        self.counts = GroupCounts()
        self.num_pending = 0  # scheduled steps without results yet
        is_one_row = plan.params.memory_mode or plan.max_length == 1  # one that ends in the step of its prompt
        self.num_rows = 1 if is_one_row else plan.width  # rows that it keeps between engine steps
        self.restart()

    @property
    def waits(self) -> bool:
        """Whether the next step cannot be scheduled before pending results are in.

        A forest adds a varying number of tokens, and in group beam search other groups depend on which are done.
        """
        if self.num_pending == 0:
            return False
        if self.plan.params.num_beam_groups > 1:
            search = self.plan.search  # without stops and items no group is done before the end
            return bool(search.stops.token_ids or search.stops.strings or search.items)
        return self.planned_length >= self.forests.first_length

    @property
    def planned_length(self) -> int:
        """Generated tokens of every running beam after all scheduled steps, if the search goes on."""
        return self.length + self.num_pending

    @property
    def num_steps_left(self) -> int:
        """Steps until `max_length` is reached."""
        return self.plan.max_length - self.length

    def restart(self) -> None:
        """Begin again from the prompt; the search will find the same again."""
        self.length = 0  # tokens every running beam has generated
        self.hypotheses = trie = _new_group_trie(self.plan.params.trace)
        self.traced = cast("TracedTrie", trie) if self.plan.params.trace else None  # records the search
        self.pool = self.plan.new_pool(self.plan.catalog.items_of(trie, self.plan.stop_token_ids))
        self.pool.most_boost = sum(constraint.most_boost for constraint in self.plan.search.constraints)
        self._rank_scores: np.ndarray | None = None  # by which rows compete, if not by their sums of log-probabilities
        self.best_end = ROOT  # the length and the row from which the best finished hypothesis took its last token
        self.num_common = 0  # generated tokens common to all rows, computed as one row before the group fans out again
        self._are_rows_lost = False  # stays True after a preemption
        self.forests.restart()
        for part in (self.matchers, self.stream):
            if part is not None:
                part.restart()

    def preempt(self) -> None:
        """Keep the search although the rows' KV is lost: it resumes from the tokens that all rows have in common."""
        if self.length > 0:
            num_common = num_equal_trie_columns(self.hypotheses.ancestors())
            self.num_common = self.forests.drafted_length = min(num_common, self.length - 1)
            self._are_rows_lost = True

    def paths_to_fan_out(self) -> np.ndarray:
        """[rows, n] per row, a key per token to compute after the group fans out; equal keys mean equal histories."""
        if self.length == 0:
            return np.arange(self.num_rows)[:, None]
        return self.hypotheses.ancestors(self.num_common)

    def history(self, row: int) -> list[int]:
        """The generated tokens of a row."""
        (tokens,) = self.hypotheses.tokens([~row])
        return tokens

    def resumed(self) -> Resumed | None:
        """The state that the worker needs to fan out a group that was preempted; None if it was not."""
        if not self._are_rows_lost:
            return None
        return Resumed(self.hypotheses.histories(), self.hypotheses.row_scores(), self._rank_scores)

    def next_phase(self, ahead: int = 0) -> SearchPhase:
        """The parameters of the next step to be scheduled, or of the one `ahead` steps later."""
        return self.plan.phase(self.planned_length + 1 + ahead, self.pool)

    def next_sampling_key(self) -> tuple[int, int] | None:
        """Seed and step for the next step to be scheduled, if it samples."""
        length = self.planned_length + 1
        return (self.plan.seed, length) if length <= self.plan.num_sampled_steps else None

    def advance(self, step: SearchStepResult) -> bool:
        """Replay what the worker decided in one step. Returns whether the search is over.

        Raises:
            GrammarError: the grammar refuses a row's token.
        """
        self.length += 1
        trie, rank_scores = self.hypotheses, step.rank_scores
        ended = self._finish(step) if len(step.finished.tokens) else NO_ENDED
        running = step.scores if rank_scores is None else rank_scores.beams
        outdone, is_over = self.pool.advance(ended, running, self.length)
        if len(outdone):
            trie.drop(outdone)
        if len(ended.leaves) and (best := int(self.pool.best(1).leaves[0])) in ended.leaves:
            self.best_end = trie.parent(best)
        if is_over or self.length == self.plan.max_length:
            return True
        beams = SearchCandidates(self._rows(step.parents), step.tokens, step.scores)
        trie.advance(*beams, _group_token_reports(step.parents, step.tokens, step.beam_logprobs, step.top_logprobs))
        self._rank_scores = None if rank_scores is None else rank_scores.beams.copy()
        if self.matchers is not None:
            self.matchers.advance(*beams)
        return False

    def count_forward(self, decided: DecidedMessage, num_steps: int, is_prompt: bool, of_all: GroupCounts) -> None:
        """Count one forward pass of the target model.

        Args:
            decided: What was decided in it.
            num_steps: How many of its steps, from the first on, were replayed.
            is_prompt: It led to the first beams.
            of_all: The counts of all groups, to which it is added as well.
        """
        num_beams, num_accepted = 0, sum(decided.drafted.num_accepted[:num_steps])
        for step in decided.steps[:num_steps]:
            num_beams += step.num_beams
        for counts in (self.counts, of_all):
            counts.steps += num_steps
            counts.target_forwards += 1
            counts.prefill_forwards += is_prompt
            counts.drafted += decided.drafted.num_drafts
            counts.accepted += num_accepted
            counts.beams += num_beams

    def _finish(self, step: SearchStepResult) -> EndedSearchHypotheses:
        """Add the hypotheses that end in one step to the trie."""
        finished, rank_scores = step.finished, step.rank_scores
        reports = _group_token_reports(finished.parents, finished.tokens, step.finished_logprobs, step.top_logprobs)
        leaves = self.hypotheses.finish(self._rows(finished.parents), finished.tokens, finished.scores, reports)
        sums = finished.scores if rank_scores is None else rank_scores.finished
        ended = EndedSearchHypotheses(sums.astype(np.float64), finished.tokens, leaves, finished.parents)
        if (ranks := step.finished_ranks) is None:
            return ended
        plan = self.plan
        most = plan.phase(self.length, self.pool).num_beams or plan.width // plan.params.num_beam_groups
        finishes = self.pool.finishing(leaves, ranks, plan.search.num_ending or most, most)
        self.hypotheses.drop(leaves[~finishes])
        return ended.some(finishes)

    def next_part(self) -> EngineAnswerPart | None:
        """The next tokens of the answer that are certain, if any.

        Certain is what all running beams and the best finished hypothesis have in common; once no beam can beat that
        hypothesis, all of it except its last token.

        Raises:
            AnswerChangedError: other tokens were sent before a preemption.
        """
        stream, trie = self.stream, self.hypotheses
        assert stream is not None
        assert isinstance(self.pool, SearchHypothesisPool)
        if stream.is_decided:
            return None
        scores = trie.row_scores()
        best_running = float((scores if self._rank_scores is None else self._rank_scores).max())
        best = next(iter(self.pool.best(1).leaves.tolist()), None)
        stream.is_decided = best is not None and self.pool.is_decided(best_running, self.length)
        if best is not None and stream.is_decided:
            return stream.extend(trie, trie.parent(best))
        return stream.extend(trie, trie.deepest_common(stream.length, np.flatnonzero(scores > -np.inf), best))

    def _rows(self, parents: np.ndarray) -> np.ndarray:
        """The parent rows of continuations; in the first step the prompt's only row, for all groups of beams."""
        return parents if self.length > 1 else np.zeros_like(parents)

    def best(self, count: int) -> GroupHypotheses:
        """The best `count` finished hypotheses, best first, or all if there are fewer."""
        return self._found(self.pool.best(count))

    def best_so_far(self, count: int) -> GroupHypotheses:
        """The best `count` hypotheses if the search ends now, best first, including running beams."""
        trie = self.hypotheses
        if self.length == 0 or (self.stream is not None and self.stream.is_decided):
            return self.best(count)
        sums = trie.row_scores() if self._rank_scores is None else self._rank_scores
        rows = np.arange(trie.width)
        running = EndedSearchHypotheses(sums.astype(np.float64), trie.row_tokens(), ~rows, rows)
        return self._found(self.pool.best_so_far(count, running, self.length))

    def unsent(self, best: GroupHypotheses) -> GroupHypotheses:
        """The unsent rest of these hypotheses in a stream, otherwise all of them.

        Raises:
            AnswerChangedError: other tokens were sent before a preemption.
        """
        return best if self.stream is None else self.stream.rest(best)

    def unsent_so_far(self, best: GroupHypotheses) -> GroupHypotheses:
        """The unsent rest of what `best_so_far` returned in a stream, otherwise all of it."""
        return best if self.stream is None else self.stream.rest_so_far(best)

    def check_invariants(self) -> None:
        self.hypotheses.check_invariants()
        assert self.length == 0 or self.hypotheses.width in (1, self.num_rows)

    def _found(self, best: FinishedSearchHypotheses) -> GroupHypotheses:
        (scores, leaves), trie, search = best, self.hypotheses, self.plan.search
        if not len(leaves):
            return NO_HYPOTHESES
        token_ids = trie.tokens(leaves)
        is_finished, last_tokens = leaves >= 0, np.array([tokens[-1] for tokens in token_ids], np.int64)
        stops = is_finished & are_search_tokens_among(last_tokens, self.plan.stop_token_ids)
        return GroupHypotheses(
            leaves,
            token_ids,
            trie.scores(leaves).astype(np.float64),
            scores,
            np.where(stops, last_tokens, NO_TOKEN),
            is_finished if search.items is not None else stops,
            GroupTokenReports(*trie.notes(leaves)) if search.num_logprobs is not None else None,
        )


def _group_token_reports(
    parents: np.ndarray,
    tokens: np.ndarray,
    own: SearchTokenLogprobs[np.ndarray] | None,
    top_logprobs: SearchTopLogprobs[np.ndarray] | None,
) -> Notes:
    """`GroupTokenReports` of the newest tokens; empty if log-probabilities are not returned."""
    if own is None or top_logprobs is None:
        return ()
    token_ids = np.column_stack([tokens, top_logprobs.tokens[parents]])
    return GroupTokenReports(
        token_ids, np.column_stack([own.logprobs, top_logprobs.logprobs[parents]]), own.ranks.copy()
    )


def _new_group_trie(is_traced: bool) -> HypothesisTrie:
    """The empty trie of a new search."""
    if not is_traced:
        return HypothesisTrie()
    from vllm_trie.trie.traced import TracedTrie  # here: few searches need it

    return TracedTrie()
