"""What a request asks of its search, whatever is found: what ends hypotheses, and how steps select."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from vllm_trie.engine.catalogs import NoGroupCatalog
from vllm_trie.messages import Caller
from vllm_trie.options import BeamParams
from vllm_trie.search import search_part_on_demand
from vllm_trie.search.rules import SearchRules, SearchStrategy
from vllm_trie.search.stopping import SearchPool, SearchStopRules
from vllm_trie.search.strategies.best import BestStrategy


class Phase(NamedTuple):
    """What is particular about some steps of a search."""

    strategy: SearchStrategy
    may_stop: bool  # `min_tokens` is reached
    looks_for_stops: bool  # where a hypothesis may stop, stop tokens end it
    is_last: bool
    num_beams: int | None  # that go on at most, if not one for each row


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What one request asks for.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        num_outputs: For which it asks.
        caller: What its user calls beam search.
        stop_rules: What ends a hypothesis.
        select_rules: How the worker selects, in any step.
        catalog: Along which beams go, if there is one.
        new_pool: Makes the place where finished hypotheses compete.
        prompt_length: Tokens of its prompt.
        uncounted_eos: An ignored EOS, where running beams are compared by the scores that they would have in the end,
            which leave it uncounted: so does `LLM.beam_search` of vLLM 0.32, and not its server.
        seed: Decides what is drawn, if anything is.
        num_draws: Steps, the first ones, in which something is.
    """

    request_id: str
    params: BeamParams
    num_outputs: int
    caller: Caller
    stop_rules: SearchStopRules
    select_rules: SearchRules
    catalog: NoGroupCatalog
    new_pool: Callable[[], SearchPool]
    prompt_length: int
    uncounted_eos: int | None
    seed: int
    num_draws: int

    @property
    def width(self) -> int:
        """Beams side by side: `beam_width`, or where fewer can live as many."""
        return self.select_rules.width

    @property
    def num_hypotheses(self) -> int:
        """How many are returned, if there are as many."""
        return self.width if self.params.compact else self.num_outputs

    @cached_property
    def brings(self) -> Mapping[Hashable, int]:
        """What came with the request, and lies on each device while it runs: bytes by what equal things have equal."""
        sizes = {key: key.num_bytes for key in self.select_rules.constraints}
        return {**self.catalog.brings, **{key: size for key, size in sizes.items() if size}}

    def rules(self, length: int, pool: SearchPool) -> SearchRules:
        """How the worker selects in the step that makes beams this long: the same object for the same rules."""
        phase = self._phase(length, pool)
        if (rules := self._known.get(phase)) is None:
            self._known.clear()
            rules = self._known[phase] = self._rules_in(phase)
        return rules

    @cached_property
    def _known(self) -> dict[Phase, SearchRules]:
        """The rules that were asked for last."""
        return {}

    def _phase(self, length: int, pool: SearchPool) -> Phase:
        may_stop, strategy = length > self.stop_rules.min_length, self.select_rules.strategy
        if length <= self.params.sample_first:
            strategy = search_part_on_demand("strategies.sampled:RowSamplingStrategy")()
        elif not isinstance(strategy, BestStrategy):
            strategy = strategy.with_done(pool.done)
        elif self.uncounted_eos is not None:
            strategy = strategy._replace(eos_score_factor=self._eos_score_factor(length))
        # The published code does not look for EOS in the first step.
        looks_for_stops = not (self.params.semantics == "tridecode" and length == 1 and may_stop)
        is_last = length == self.stop_rules.max_length
        return Phase(strategy, may_stop, looks_for_stops, is_last, self._num_beams(length))

    def _rules_in(self, phase: Phase) -> SearchRules:
        stops = self.select_rules.stops
        if phase.may_stop:
            stops = stops._replace(ignored_token_ids=())
        if not phase.looks_for_stops:
            stops = stops._replace(token_ids=())
        return self.select_rules._replace(
            strategy=phase.strategy,
            stops=stops._replace(are_barred=not phase.may_stop),
            is_last=phase.is_last,
            num_beams=phase.num_beams,
        )

    def draw(self, length: int) -> tuple[int, int] | None:
        """What decides the draws of that step, if there are any."""
        return (self.seed, length) if length <= self.num_draws else None

    def _num_beams(self, length: int) -> int | None:
        """How many beams of `length` tokens may go on, if not as many as there are rows."""
        if not (widths := self.params.beam_widths):
            return None
        num_beams = widths[min(length, len(widths)) - 1]
        return num_beams if num_beams < self.width else None

    def _eos_score_factor(self, length: int) -> tuple[int, float] | None:
        """By what factor the score of a beam that goes on after an ignored EOS differs."""
        assert self.uncounted_eos is not None
        counted = self.prompt_length + length
        factor = (counted / max(counted - 1, 1)) ** self.params.length_penalty
        return (self.uncounted_eos, factor) if factor != 1.0 else None
