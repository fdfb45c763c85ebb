"""One search as the scheduler sees it: which hypotheses live, which are finished, when it is over."""

from __future__ import annotations

from typing import NamedTuple

from vllm_trie.params import BeamParams
from vllm_trie.search.step import Step
from vllm_trie.search.stopping import HypothesisPool, StopRules
from vllm_trie.trie.hypotheses import HypothesisTrie


class Hypothesis(NamedTuple):
    """One hypothesis as it is returned."""

    token_ids: list[int]
    token_logprobs: list[float]
    stopped_by: int | None  # the stop token it ends in; None if it ran out of length


class BeamGroup:
    """The search of one request.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        rules: What ends a hypothesis.
    """

    def __init__(self, request_id: str, params: BeamParams, rules: StopRules) -> None:
        self.request_id = request_id
        self.params = params
        self.rules = rules
        self.restart()

    @property
    def width(self) -> int:
        return self.params.beam_width

    @property
    def masks_stops(self) -> bool:
        """Whether the next token may not be a stop token."""
        return self.length < self.rules.min_length

    def restart(self) -> None:
        """Forget the search; it will find the same again from the prompt."""
        self.length = 0  # tokens every running beam has generated
        self.hypotheses = HypothesisTrie()
        # One beam is greedy search: `generate(num_beams=1)` stops at the first stop token, whatever the options.
        early_stopping = True if self.width == 1 else self.params.early_stopping
        self.pool = HypothesisPool(self.width, self.params.length_penalty, early_stopping, self.rules.max_length)

    def advance(self, step: Step) -> bool:
        """Replay what the worker decided in one step. Returns whether the search is over."""
        self.length += 1
        at_end = self.length == self.rules.max_length
        parents, tokens, scores = (field.tolist() for field in step.candidates)
        for rank in range(self.width) if at_end else step.finished.nonzero()[0]:
            self._finish(parents[rank], tokens[rank], scores[rank])
        if at_end or self.pool.is_settled(float(step.scores.max()), self.length):
            return True
        self.hypotheses.advance(step.parents.tolist(), step.tokens.tolist(), step.scores.tolist())
        return False

    def best(self, count: int) -> list[Hypothesis]:
        """The best `count` finished hypotheses, best first."""
        hypotheses = []
        for finished in self.pool.best(count):
            tokens = self.hypotheses.tokens(finished.node)
            stopped_by = tokens[-1] if tokens[-1] in self.rules.stop_token_ids else None
            hypotheses.append(Hypothesis(tokens, self.hypotheses.token_logprobs(finished.node), stopped_by))
        return hypotheses

    def check_invariants(self) -> None:
        self.hypotheses.check_invariants()
        assert self.length == 0 or len(self.hypotheses.rows) in (1, self.width)

    def _finish(self, parent: int, token: int, score: float) -> None:
        node = self.hypotheses.finish(parent, token, score)
        outdone = self.pool.add(score, self.length, node)
        if outdone is not None:
            self.hypotheses.drop(outdone)
