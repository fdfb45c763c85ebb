"""The rules by which one search step selects: the scheduler sets them, the worker and its strategies apply them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch

from vllm_trie.search import search_part_on_demand
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ItemConstraint
from vllm_trie.search.constraints.constraint import Constraint, ConstraintSource
from vllm_trie.search.constraints.stops import StopConstraints, StopStringConstraint
from vllm_trie.search.devices import NEVER, search_arange
from vllm_trie.search.filters import NO_PRUNING, SearchFilters, SearchPruning
from vllm_trie.search.rank import SearchCandidates, choose_next_search_beams, pick_search_candidates
from vllm_trie.search.step_result import SearchResultLayout, SearchStepResult
from vllm_trie.search.token_tables import CPU

SamplingKey = tuple[int, int]  # seed and step of a group, which decide what is sampled


class SearchInputs(NamedTuple):
    """The inputs of a step besides logits and beams.

    Args:
        sampling_keys: Seed and step of each group, if anything is sampled.
        completes: Finds candidates that complete a stop string.
        select_next: `choose_next_search_beams`, or an equivalent for this device.
        boosts: [G, r or 1, V] float32, added to log-probabilities for ranking; filters do not see them.
        has_pending: Items that end have other boosts than what goes on: those of `SearchBeams.boosts` at an end.
        level: [V] int64, ascending: the tokens that logits are for, if not a whole vocabulary.
    """

    sampling_keys: Sequence[SamplingKey] = ()
    completes: StopStringConstraint | None = None
    select_next: Callable[..., SearchCandidates[torch.Tensor]] = choose_next_search_beams
    boosts: torch.Tensor | None = None
    has_pending: bool = False
    level: torch.Tensor | None = None


class SearchDecision(NamedTuple):
    """A strategy's decision: the step, and log-probabilities to report."""

    step: SearchStepResult[torch.Tensor]
    logprobs: torch.Tensor  # [G, r, V], for reports


class SearchPhase(NamedTuple):
    """What differs between the steps of a search: sent to the worker with each step, unlike `SearchRules`, sent once.

    Args:
        may_stop: `min_tokens` is reached, so that a stop token may follow.
        bars_items: `min_tokens` is not reached: no hypothesis may end with an item, whose last token counts.
        looks_for_stops: Stop tokens end hypotheses, once these may stop.
        is_last: The maximum length is reached: all hypotheses end here.
        num_beams: The most beams that go on; None: one for each slot.
        samples_rows: Each beam samples its next token independently, whatever the strategy.
        done: The groups of beams that are done, in group beam search.
        eos_score_factor: A token, and the factor by which its score is multiplied for comparisons.
    """

    may_stop: bool = True
    bars_items: bool = False
    looks_for_stops: bool = True
    is_last: bool = False
    num_beams: int | None = None
    samples_rows: bool = False
    done: tuple[int, ...] = ()
    eos_score_factor: tuple[int, float] | None = None


class SearchSizes(NamedTuple):
    """The most that a step decides for a group."""

    num_beams: int  # that go on
    num_finished: int
    num_reporting: int  # rows that report their best tokens


class SearchStrategy:
    """How the next beams, and the hypotheses that finish, are chosen among all continuations; see `strategies`."""

    __slots__ = ()
    scales_logits: ClassVar[bool] = True  # the temperature divides logits

    @property
    def has_one_ranking(self) -> bool:
        """Whether a single ranking of all continuations, those that finish included, decides everything."""
        return False

    def in_phase(self, phase: SearchPhase) -> SearchStrategy:
        """This strategy in the steps of one phase."""
        return self

    def sizes(self, rules: SearchRules, num_rows: int) -> SearchSizes:
        """How much is decided for a group: by default, at most as many hypotheses finish as there are slots."""
        return SearchSizes(rules.width, rules.width, num_rows)

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """Chooses the next beams of G groups.

        Args:
            rules: The rules of all groups.
            logprobs: [G, r, V] float32, of what each row may take next.
            beams: What the rows carry.
            inputs: The other inputs of the step.
        """
        raise NotImplementedError


class _SearchRules(NamedTuple):
    width: int
    strategy: SearchStrategy
    stops: StopConstraints = StopConstraints()
    num_logprobs: int | None = None  # best tokens that each row reports; None: nothing is reported
    is_controlled: bool = False  # penalties, biases, custom processors or the like act on the logits
    filters: SearchFilters = SearchFilters()
    pruning: SearchPruning = NO_PRUNING
    constraints: tuple[Constraint, ...] = ()  # on what rows may take
    is_last: bool = False  # the maximum length is reached: all hypotheses end here
    num_beams: int | None = None  # the most beams that go on; None: one for each slot
    num_ending: int | None = None  # the best continuations of a group that may finish; None: as many as go on
    bars_items: bool = False  # no hypothesis may end with an item


class SearchRules(_SearchRules):
    """How the worker selects: as the request asks for any step, or narrowed by `in_phase` for one.

    Groups with equal rules share a step.
    """

    def in_phase(self, phase: SearchPhase) -> SearchRules:
        """These rules in the steps of one phase."""
        stops, strategy = self.stops._replace(are_barred=not phase.may_stop), self.strategy.in_phase(phase)
        if phase.may_stop:
            stops = stops._replace(ignored_token_ids=())
        if not phase.looks_for_stops:
            stops = stops._replace(token_ids=())
        if phase.samples_rows:
            strategy = search_part_on_demand("strategies.sampled:RowSamplingStrategy")()
        bars_items = self.are_sparse and phase.bars_items
        return self._replace(
            strategy=strategy, stops=stops, is_last=phase.is_last, num_beams=phase.num_beams, bars_items=bars_items
        )

    def layout(self, num_rows: int, vocab_size: int) -> SearchResultLayout:
        """How a step is packed, for groups of r rows and a vocabulary of V tokens; the same on every device."""
        num_beams, num_finished, num_reporting = self.strategy.sizes(self, num_rows)
        has_ranks = self.num_ending is not None
        if (num_tops := self.num_logprobs) is None:
            return SearchResultLayout(num_beams, num_finished, has_ranks=has_ranks)
        return SearchResultLayout(num_beams, num_finished, (num_reporting, min(num_tops, vocab_size)), has_ranks)

    @cached_property
    def items(self) -> ItemConstraint | None:
        """How rows follow a catalog, if they do."""
        return next((key for key in self.constraints if isinstance(key, ItemConstraint)), None)

    @cached_property
    def are_sparse(self) -> bool:
        """Whether a constraint lists what rows may take: then finishing and surviving beams are ranked separately."""
        return any(key.is_sparse for key in self.constraints)

    @property
    def bar_ends(self) -> bool:
        """Whether no hypothesis may end in this step."""
        return self.bars_items if self.are_sparse else self.stops.are_barred

    @cached_property
    def contrasts(self) -> bool:
        """Whether scores also depend on the draft model's log-probabilities."""
        return any(key.source is ConstraintSource.AMATEUR for key in self.constraints)

    @cached_property
    def ranks_together(self) -> bool:
        """Whether beams that are worse than everything that lives on have no influence."""
        may_rise = any(constraint.most_boost for constraint in self.constraints)
        is_bounded = self.num_ending is None and not may_rise  # nothing worse than what lives on may finish
        return self.strategy.has_one_ranking and self.pruning == NO_PRUNING and is_bounded


def search_candidates_stopping(
    rules: SearchRules,
    candidates: SearchCandidates[torch.Tensor],
    completes: StopStringConstraint | None,
    vocab_size: int,
) -> torch.Tensor:
    """Which candidates [G, K] end in a stop token or complete a stop string."""
    stops, tokens = rules.stops, candidates.tokens
    if completes is not None and stops.may_complete:
        return completes.end(candidates, stops.classes(vocab_size, CPU).numpy().view(bool))
    if len(stops.ending_token_ids) == 1:
        return tokens == stops.ending_token_ids[0]
    if not stops.ending_token_ids:
        return torch.zeros_like(tokens, dtype=torch.bool)
    return stops.classes(vocab_size, tokens.device).view(torch.bool).take(tokens)


def search_candidates_alive(candidates: SearchCandidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    """Which candidates [G, K] go on, unless there are enough better ones."""
    return (candidates.scores > NEVER) > stops  # that is, alive and not stopping


def search_candidates_going_on(
    rules: SearchRules, candidates: SearchCandidates[torch.Tensor], stops: torch.Tensor
) -> torch.Tensor:
    """Which candidates [G, K] may become beams."""
    lives = search_candidates_alive(candidates, stops)
    return lives if rules.num_beams is None else lives & (lives.cumsum(dim=1) <= rules.num_beams)


def search_candidates_ended(
    rules: SearchRules,
    candidates: SearchCandidates[torch.Tensor],
    stops: torch.Tensor,
    may_end: torch.Tensor | None = None,
) -> SearchCandidates[torch.Tensor]:
    """The candidates that stop, or in the last step all, where `may_end` allows; the others with a score of -inf."""
    ends = torch.ones_like(stops) if rules.is_last else stops
    ends = ends if may_end is None else ends & may_end
    return candidates._replace(scores=candidates.scores.where(ends, NEVER))


def first_search_candidates(
    candidates: SearchCandidates[torch.Tensor], come_first: torch.Tensor, count: int
) -> SearchCandidates[torch.Tensor]:
    """The first `count` candidates [G, K], those with `come_first` before the others, each in their order."""
    return pick_search_candidates(candidates, (~come_first).byte().argsort(dim=1, stable=True)[:, :count])


def search_continuations_by_row(tokens: torch.Tensor, scores: torch.Tensor) -> SearchCandidates[torch.Tensor]:
    """Continuations [G, r, k] of r rows as candidates [G, r * k]."""
    parents = search_arange(tokens.shape[1], tokens.device)[:, None].expand_as(tokens)
    return SearchCandidates(parents.flatten(1), tokens.flatten(1), scores.flatten(1))
