"""What a request asks of its search, whatever is found: what ends hypotheses, and how steps select."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_trie.engine.catalogs import NoCatalog
from vllm_trie.options import BeamParams
from vllm_trie.search.group_pools import GroupPools
from vllm_trie.search.rules import SelectRules
from vllm_trie.search.stopping import HfPool, Pool, StochasticPool, StopRules, TridecodePool, VllmPool
from vllm_trie.search.strategies.best import Best
from vllm_trie.search.strategies.in_groups import InGroups
from vllm_trie.search.strategies.sampled import SampledEach


@dataclass(frozen=True, eq=False)
class SearchPlan:
    """What one request asks for.

    Args:
        request_id: The request that stands for the group in vLLM's scheduler.
        params: Its beam options.
        stop_rules: What ends a hypothesis.
        select_rules: How the worker selects, in any step.
        catalog: Along which beams go, if there is one.
        prompt_length: Tokens of its prompt.
        counts_prompt: Whether hypotheses compete under semantics="vllm" by a length that counts the prompt, and leaves
            a stop token in the end out, as in vLLM 0.32; in 0.33 they do not.
        is_offline: `LLM.beam_search` asks. Under semantics="vllm" it differs from vLLM's server in one
            point: it compares running beams by their final scores, which leave an ignored EOS uncounted.
        seed: Decides what is drawn, if anything is.
        num_draws: Steps, the first ones, in which something is.
    """

    request_id: str
    params: BeamParams
    stop_rules: StopRules
    select_rules: SelectRules
    catalog: NoCatalog
    prompt_length: int
    counts_prompt: bool
    is_offline: bool
    seed: int
    num_draws: int

    @property
    def width(self) -> int:
        """Beams side by side: `beam_width`, or where fewer can live as many."""
        return self.select_rules.width

    def rules(self, length: int, pool: Pool) -> SelectRules:
        """How the worker selects in the step that makes beams this long."""
        may_stop = length > self.stop_rules.min_length
        strategy, stops = self.select_rules.strategy, self.select_rules.stops
        if self.params.semantics == "tridecode" and length == 1 and may_stop:
            stops = stops._replace(token_ids=())  # the published code does not look for EOS in the first step
        if length <= self.params.sample_first:
            strategy = SampledEach()
        elif isinstance(pool, GroupPools) and isinstance(strategy, InGroups):
            strategy = strategy._replace(done=pool.done)
        elif isinstance(strategy, Best):
            strategy = strategy._replace(eos_score_factor=self._eos_score_factor(length))
        return self.select_rules._replace(
            strategy=strategy,
            stops=stops._replace(are_barred=not may_stop),
            is_last=length == self.stop_rules.max_length,
            num_beams=self._num_beams(length),
        )

    def draw(self, length: int) -> tuple[int, int] | None:
        """What decides the draws of that step, if there are any."""
        return (self.seed, length) if length <= self.num_draws else None

    def new_pool(self) -> Pool:
        """Where finished hypotheses compete."""
        stop_token_ids, max_length = self.stop_rules.stop_token_ids, self.stop_rules.max_length
        if not self.counts_prompt:
            return new_pool(self.params, max_length, stop_token_ids=stop_token_ids)
        eos = self.stop_rules.eos_token_id
        uncounted = frozenset(stop_token_ids) | (frozenset() if eos is None else {eos})
        return new_pool(self.params, max_length, self.prompt_length, uncounted, stop_token_ids)

    def _num_beams(self, length: int) -> int | None:
        """How many beams of `length` tokens may go on, if not as many as there are rows."""
        widths = self.params.beam_widths or [self.width]
        num_beams = widths[min(length, len(widths)) - 1]
        return num_beams if num_beams < self.width else None

    def _eos_score_factor(self, length: int) -> tuple[int, float] | None:
        """By what factor the score of a beam that goes on after an ignored EOS differs."""
        eos = self.stop_rules.eos_token_id
        counts_alike = not self.is_offline or not self.counts_prompt
        if counts_alike or eos is None or eos in self.stop_rules.stop_token_ids:
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
