"""One search as the scheduler sees it: which hypotheses live, which are finished, when it is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_trie.engine.stats import SearchCounts
from vllm_trie.messages import Resumed
from vllm_trie.options import BeamParams
from vllm_trie.search.rank import Candidates
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.step import Step, TokenLogprobs, TopLogprobs
from vllm_trie.search.stopping import HfPool, HypothesisPool, StopRules, TridecodePool, VllmPool
from vllm_trie.trie.hypotheses import HypothesisTrie

DRAFTS_PER_BEAM = 2  # of a layer, unless a request says otherwise


class TokenReport(NamedTuple):
    """What is returned of one token of a hypothesis."""

    token_ids: np.ndarray  # [1 + N] its own, then the best at its place
    logprobs: np.ndarray  # [1 + N] float32, theirs
    rank: int  # its own at its place, from 1


class Hypothesis(NamedTuple):
    """One hypothesis as it is returned."""

    token_ids: list[int]
    token_logprobs: list[float]
    stopped_by: int | None  # the stop token it ends in; None if it ran out of length or into a stop string
    reports: list[TokenReport] | None  # by token, if log-probabilities are returned


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
    """

    request_id: str
    params: BeamParams
    rules: StopRules
    prompt_length: int
    select_rules: SelectRules
    is_offline: bool = False
    seed: int = 0
    counts_prompt: bool = True

    def __post_init__(self) -> None:
        self.counts = SearchCounts()
        self.num_pending = 0  # steps that are scheduled and whose results are not in yet
        self.restart()

    @property
    def width(self) -> int:
        return self.params.beam_width

    @property
    def num_rows(self) -> int:
        """Rows that the group keeps from one step of the engine to the next."""
        return 1 if self.params.memory_mode else self.width

    @property
    def speculates(self) -> bool:
        """Whether the next step may be more than one."""
        return self.is_speculative and self.length >= self.params.sample_first

    @property
    def waits(self) -> bool:
        """Whether results must be in before a step is scheduled: a forest makes histories longer by what it holds."""
        return self.num_pending > 0 and self.is_speculative and self.planned_length >= self.params.sample_first

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
        self.hypotheses = HypothesisTrie()
        self.pool = new_pool(self.params, self.rules.max_length, *self._uneven_lengths)
        self.was_preempted = False  # since there have been rows
        self.num_common = 0  # generated tokens that all rows have in common: one computes them before it fans out again

    def preempt(self) -> None:
        """The rows' KV is lost, the search is not: it goes on from the tokens that all of them have in common."""
        self.was_preempted = self.length > 0
        if self.was_preempted:
            columns = zip(*self.hypotheses.paths(), strict=True)
            num_common = next((i for i, nodes in enumerate(columns) if len(set(nodes)) > 1), self.length)
            self.num_common = min(num_common, self.length - 1)

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
        return Resumed([self.history(row) for row in range(self.num_rows)], self.hypotheses.row_scores())

    def next_rules(self, ahead: int = 0) -> SelectRules:
        """How the worker selects in the next step to be scheduled, or `ahead` steps later."""
        length = self.planned_length + 1 + ahead
        masks_stops = length <= self.rules.min_length
        rules = self.select_rules
        if self.params.semantics == "tridecode" and length == 1 and not masks_stops:
            rules = rules._replace(stop_token_ids=())  # the published code does not look for EOS in the first step
        return rules._replace(
            masks_stops=masks_stops,
            is_last=length == self.rules.max_length,
            samples=length <= self.params.sample_first,
            eos_score_factor=self._eos_score_factor(length),
        )

    def next_draw(self) -> tuple[int, int] | None:
        """What decides the draws of the next step to be scheduled, if there are any."""
        length = self.planned_length + 1
        return (self.seed, length) if self.params.do_sample or length <= self.params.sample_first else None

    def advance(self, step: Step) -> bool:
        """Replay what the worker decided in one step. Returns whether the search is over."""
        self.length += 1
        of_finished = _reports(step.finished, step.finished_logprobs, step.top_logprobs)
        for parent, token, score, report in zip(*(f.tolist() for f in step.finished), of_finished, strict=True):
            node = self.hypotheses.finish(parent, token, score, report)
            outdone = self.pool.add(score, self.length, token, node)
            if outdone is not None:
                self.hypotheses.drop(outdone)
        best = float(step.scores.max())
        if self.length == self.rules.max_length or best == -np.inf or self.pool.is_done(best, self.length):
            return True
        beams = Candidates(step.parents, step.tokens, step.scores)
        parents, tokens, scores = (field.tolist() for field in beams)
        self.hypotheses.advance(parents, tokens, scores, _reports(beams, step.beam_logprobs, step.top_logprobs))
        return False

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` finished hypotheses, best first; fewer if there are fewer."""
        return [self._hypothesis(finished.node) for finished in self.pool.best(count)]

    def check_invariants(self) -> None:
        self.hypotheses.check_invariants()
        assert self.length == 0 or len(self.hypotheses.rows) in (1, self.num_rows)

    def _hypothesis(self, node: int) -> Hypothesis:
        tokens = self.hypotheses.tokens(node)
        stopped_by = tokens[-1] if tokens[-1] in self.rules.stop_token_ids else None
        reports = self.hypotheses.notes(node) if self.select_rules.num_logprobs is not None else None
        return Hypothesis(tokens, self.hypotheses.token_logprobs(node), stopped_by, reports)

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
    params: BeamParams, max_length: int, prompt_length: int = 0, uncounted: frozenset[int] = frozenset()
) -> HypothesisPool:
    """Where finished hypotheses compete, by a search's semantics.

    Args:
        max_length: The most tokens a hypothesis can generate.
        prompt_length: Tokens of the prompt, where semantics="vllm" counts them.
        uncounted: Tokens that do not count in the end of a hypothesis, likewise.
    """
    width, penalty = params.beam_width, params.length_penalty
    if params.semantics == "vllm":
        return VllmPool(width, penalty, max_length, prompt_length, uncounted)
    if params.semantics == "tridecode":
        return TridecodePool(width, penalty, max_length)
    # One beam is greedy search: `generate(num_beams=1)` stops at the first stop token, whatever the options.
    return HfPool(width, penalty, max_length, True if width == 1 else params.early_stopping)


def _reports(
    continuations: Candidates[np.ndarray],
    own: TokenLogprobs[np.ndarray] | None,
    top_logprobs: TopLogprobs[np.ndarray] | None,
) -> Sequence[TokenReport | None]:
    """What is returned of the newest token of each, where log-probabilities are."""
    if own is None or top_logprobs is None:
        return [None] * len(continuations.tokens)
    token_ids = np.column_stack([continuations.tokens, top_logprobs.tokens[continuations.parents]])
    logprobs = np.column_stack([own.logprobs, top_logprobs.logprobs[continuations.parents]])
    return [TokenReport(*report) for report in zip(token_ids, logprobs, own.ranks.tolist(), strict=True)]
