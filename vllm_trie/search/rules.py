"""How one step of a search selects: what the scheduler decides, the worker follows, and each strategy does its way."""

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
from vllm_trie.search.devices import NEVER, search_numbers
from vllm_trie.search.filters import NO_PRUNING, SearchFilters, SearchPruning
from vllm_trie.search.rank import SearchCandidates, choose_next_search_beams, pick_search_candidates
from vllm_trie.search.step_result import SearchResultLayout, SearchStepResult
from vllm_trie.search.token_tables import CPU

Draw = tuple[int, int]  # seed and step of a group, which decide what is drawn


class SearchInputs(NamedTuple):
    """What a step is taken with, besides logits and beams.

    Args:
        draws: Of each group, where something is drawn.
        completes: Finds candidates that complete a stop string.
        select_next: That of `slots`, or what does the same on this device.
        boosts: [G, r or 1, V] float32, what ranks continuations besides log-probabilities, which filters see alone.
        has_pending: Items that end are ranked by other boosts than what goes on: by `SearchBeams.boosts` at an end.
        level: [V] int64, ascending: the tokens that logits are of, if not of a whole vocabulary.
    """

    draws: Sequence[Draw] = ()
    completes: StopStringConstraint | None = None
    select_next: Callable[..., SearchCandidates[torch.Tensor]] = choose_next_search_beams
    boosts: torch.Tensor | None = None
    has_pending: bool = False
    level: torch.Tensor | None = None


class SearchDecision(NamedTuple):
    """What a strategy has chosen."""

    step: SearchStepResult[torch.Tensor]
    logprobs: torch.Tensor  # [G, r, V]; some are reported


class SearchPhase(NamedTuple):
    """What is particular about some steps of a search: it crosses to the worker in each, where `SearchRules` do once.

    Args:
        may_stop: `min_tokens` is reached.
        looks_for_stops: Where a hypothesis may stop, stop tokens end it.
        is_last: The length is reached: all hypotheses end here.
        num_beams: That go on at most; None: one for each slot.
        samples_rows: Each beam draws its next token for itself, whatever the strategy is.
        done: Which groups of beams are, where beams are in groups.
        eos_score_factor: A token, and the factor of the score by which it is compared.
    """

    may_stop: bool = True
    looks_for_stops: bool = True
    is_last: bool = False
    num_beams: int | None = None
    samples_rows: bool = False
    done: tuple[int, ...] = ()
    eos_score_factor: tuple[int, float] | None = None


class SearchSizes(NamedTuple):
    """How much a step of a group decides at most."""

    num_beams: int  # that go on
    num_finished: int
    num_reporting: int  # rows that report their best tokens


class SearchStrategy:
    """How the next beams are chosen among all continuations, and which of these finish: a file each in `strategies`."""

    __slots__ = ()
    scales_logits: ClassVar[bool] = True  # the temperature divides logits

    @property
    def has_one_ranking(self) -> bool:
        """Whether one ranking of all beams' continuations, those that finish among them, decides alone."""
        return False

    def in_phase(self, phase: SearchPhase) -> SearchStrategy:
        """The same in steps of one phase."""
        return self

    def sizes(self, rules: SearchRules, num_rows: int) -> SearchSizes:
        """How much is decided of a group: no more finishes than there are slots, unless a strategy says so."""
        return SearchSizes(rules.width, rules.width, num_rows)

    def choose(
        self, rules: SearchRules, logprobs: torch.Tensor, beams: SearchBeams, inputs: SearchInputs
    ) -> SearchDecision:
        """Choose the next beams of G groups.

        Args:
            rules: Theirs.
            logprobs: [G, r, V] float32, of what each row may take next.
            beams: What their rows carry.
            inputs: What else it takes.
        """
        raise NotImplementedError


class _SearchRules(NamedTuple):
    width: int
    strategy: SearchStrategy
    stops: StopConstraints = StopConstraints()
    num_logprobs: int | None = None  # what each row must report; None: nothing
    is_controlled: bool = False  # penalties, biases, custom processors or the like act on the logits
    filters: SearchFilters = SearchFilters()
    pruning: SearchPruning = NO_PRUNING
    constraints: tuple[Constraint, ...] = ()  # on what rows take
    is_last: bool = False  # the length is reached: all hypotheses end here
    num_beams: int | None = None  # that go on at most; None: one for each slot
    num_ending: int | None = None  # continuations of a group among which some finish; None: as many as go on


class SearchRules(_SearchRules):
    """How the worker selects: in any step as a request asks for it, and `in_phase` in one.

    Groups with equal rules are selected together.
    """

    def in_phase(self, phase: SearchPhase) -> SearchRules:
        """The same in steps of one phase."""
        stops, strategy = self.stops._replace(are_barred=not phase.may_stop), self.strategy.in_phase(phase)
        if phase.may_stop:
            stops = stops._replace(ignored_token_ids=())
        if not phase.looks_for_stops:
            stops = stops._replace(token_ids=())
        if phase.samples_rows:
            strategy = search_part_on_demand("strategies.sampled:RowSamplingStrategy")()
        return self._replace(strategy=strategy, stops=stops, is_last=phase.is_last, num_beams=phase.num_beams)

    def layout(self, num_rows: int, vocab_size: int) -> SearchResultLayout:
        """How a step is packed, whatever takes it: of groups with r rows, from a vocabulary of V tokens."""
        num_beams, num_finished, num_reporting = self.strategy.sizes(self, num_rows)
        has_ranks = self.num_ending is not None
        if (num_tops := self.num_logprobs) is None:
            return SearchResultLayout(num_beams, num_finished, has_ranks=has_ranks)
        num_tops = vocab_size if num_tops < 0 else min(num_tops, vocab_size)
        return SearchResultLayout(num_beams, num_finished, (num_reporting, num_tops), has_ranks)

    @cached_property
    def items(self) -> ItemConstraint | None:
        """How rows go along a catalog, if they do."""
        return next((key for key in self.constraints if isinstance(key, ItemConstraint)), None)

    @cached_property
    def are_sparse(self) -> bool:
        """Whether a constraint lists what rows may take: then what finishes and what goes on are ranked apart."""
        return any(key.is_sparse for key in self.constraints)

    @cached_property
    def contrasts(self) -> bool:
        """Whether hypotheses also compete by what the draft model says."""
        return any(key.source is ConstraintSource.AMATEUR for key in self.constraints)

    @cached_property
    def leave_out(self) -> bool:
        """Whether filters or pruning may leave out some of what rows could take."""
        return self.pruning != NO_PRUNING or self.filters != SearchFilters(self.filters.temperature)

    @cached_property
    def may_rise(self) -> bool:
        """Whether constraints may add to what hypotheses compete by."""
        return any(constraint.most_boost for constraint in self.constraints)

    @cached_property
    def ranks_together(self) -> bool:
        """Whether beams that are worse than whatever lives on have no say."""
        is_bounded = self.num_ending is None and not self.may_rise  # nothing worse than what lives on may finish
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
    """Which candidates [G, K] go on, unless there are better ones."""
    return (candidates.scores > NEVER) > stops  # that is, and not


def search_candidates_going_on(
    rules: SearchRules, candidates: SearchCandidates[torch.Tensor], stops: torch.Tensor
) -> torch.Tensor:
    """The candidates that may become beams."""
    lives = search_candidates_alive(candidates, stops)
    return lives if rules.num_beams is None else lives & (lives.cumsum(dim=1) <= rules.num_beams)


def search_candidates_ended(
    rules: SearchRules,
    candidates: SearchCandidates[torch.Tensor],
    stops: torch.Tensor,
    may_end: torch.Tensor | None = None,
) -> SearchCandidates[torch.Tensor]:
    """The candidates that stop, or in the last step all, where they may; the others with a score of -inf."""
    ends = torch.ones_like(stops) if rules.is_last else stops
    ends = ends if may_end is None else ends & may_end
    return candidates._replace(scores=candidates.scores.where(ends, NEVER))


def first_search_candidates(
    candidates: SearchCandidates[torch.Tensor], come_first: torch.Tensor, count: int
) -> SearchCandidates[torch.Tensor]:
    """The first `count` candidates [G, K] once those come first that `come_first` says; else in their order."""
    return pick_search_candidates(candidates, (~come_first).byte().argsort(dim=1, stable=True)[:, :count])


def search_continuations_by_row(tokens: torch.Tensor, scores: torch.Tensor) -> SearchCandidates[torch.Tensor]:
    """Continuations [G, r, k] of r rows."""
    parents = search_numbers(tokens.shape[1], tokens.device)[:, None].expand_as(tokens)
    return SearchCandidates(parents.flatten(1), tokens.flatten(1), scores.flatten(1))
