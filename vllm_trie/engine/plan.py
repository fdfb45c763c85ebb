"""What a request asks of its search, whatever is found: what ends hypotheses, and how steps select."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

from vllm_trie.engine.catalogs import NoGroupCatalog
from vllm_trie.messages import Caller
from vllm_trie.options import BeamParams
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.stopping import SearchPool


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """What one request asks for.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        num_outputs: For which it asks.
        caller: What its user calls beam search.
        search: How the worker selects, in any step.
        stop_token_ids: That end a hypothesis, EOS among them, unless it is ignored.
        eos_token_id: The one of them that is no stop reason; None if EOS is ignored.
        min_length: Generated tokens that a hypothesis must have before it may stop.
        max_length: Generated tokens at which it ends in any case.
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
    search: SearchRules
    stop_token_ids: frozenset[int]
    eos_token_id: int | None
    min_length: int
    max_length: int
    catalog: NoGroupCatalog
    new_pool: Callable[[], SearchPool]
    prompt_length: int
    uncounted_eos: int | None
    seed: int
    num_draws: int

    @property
    def width(self) -> int:
        """Beams side by side: `beam_width`, or where fewer can live as many."""
        return self.search.width

    @property
    def num_hypotheses(self) -> int:
        """How many are returned, if there are as many."""
        return self.width if self.params.compact else self.num_outputs

    @cached_property
    def brings(self) -> Mapping[Hashable, int]:
        """What came with the request, and lies on each device while it runs: bytes by what equal things have equal."""
        sizes = {key: key.num_bytes for key in self.search.constraints}
        return {**self.catalog.brings, **{key: size for key, size in sizes.items() if size}}

    def phase(self, length: int, pool: SearchPool) -> SearchPhase:
        """What is particular about the step that makes beams this long."""
        may_stop = length > self.min_length
        return SearchPhase(
            may_stop,
            # The published code does not look for EOS in the first step.
            looks_for_stops=not (self.params.semantics == "tridecode" and length == 1 and may_stop),
            is_last=length == self.max_length,
            num_beams=self._num_beams(length),
            samples_rows=length <= self.params.sample_first,
            done=pool.done,
            eos_score_factor=None if self.uncounted_eos is None else self._eos_score_factor(length),
        )

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
