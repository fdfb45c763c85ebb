"""One step of a search: from logits to the next beams and the hypotheses that finish.

Everything here processes G groups with equal rules at once, in the order of the device's stream. No shape depends on
values on the device, so the host never waits, except to find stop strings.
"""

from __future__ import annotations

import torch

from vllm_trie.search import search_part_on_demand
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER, is_searched_on_host, search_arange
from vllm_trie.search.filters import NO_PRUNING, SearchFilters
from vllm_trie.search.parts import CELLS_NEAR, in_search_parts, search_rows_near_at_hand
from vllm_trie.search.rank import search_topk
from vllm_trie.search.rules import SearchDecision, SearchInputs, SearchRules
from vllm_trie.search.step_result import (
    PackedSearchStep,
    SearchResultLayout,
    SearchStepResult,
    SearchTokenLogprobs,
    SearchTopLogprobs,
    pack_search_step,
)
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.token_tables import search_token_columns

PLAIN = SearchInputs()


def take_search_step(
    rules: SearchRules, logits: torch.Tensor, beams: SearchBeams, inputs: SearchInputs = PLAIN
) -> SearchStepResult[torch.Tensor]:
    """Takes one step of G groups.

    Args:
        rules: The rules of all groups.
        logits: [G, r, V] of any floating point type; processed ones if `rules.is_controlled`.
        beams: What the rows carry.
        inputs: The other inputs of the step.
    """
    logprobs, beams = _search_row_logprobs(rules, logits, beams)
    if not beams.states or (boosts := beams.boosts(logprobs, rules.is_last)) is None:
        choice = rules.strategy.choose(rules, logprobs, beams, inputs)
    else:
        choose_by_boosted_strategy = search_part_on_demand("strategies.boosted:choose_by_boosted_strategy")
        choice = choose_by_boosted_strategy(rules, logprobs, beams, inputs, boosts)
    return choice.step if rules.num_logprobs is None else reported_search_step(rules, choice)


def take_packed_search_step(
    rules: SearchRules,
    logits: torch.Tensor,
    beams: SearchBeams,
    inputs: SearchInputs = PLAIN,
    layout: SearchResultLayout | None = None,
) -> PackedSearchStep:
    """Takes one step, see `take_search_step`, and packs it for the host; `layout`: the rules' layout, if known."""
    step = take_search_step(rules, logits, beams, inputs)
    return pack_search_step(step, layout or rules.layout(*logits.shape[1:]))


def is_light_search_step(rules: SearchRules) -> bool:
    """Whether a step needs little memory besides its logits: it samples, sorts and masks nothing, and has no boosts."""
    strategy, has_no_filters = rules.strategy, (rules.filters, rules.pruning) == (SearchFilters(), NO_PRUNING)
    if rules.items is not None and not (rules.items.is_plain and rules.num_logprobs is None):
        return False  # a catalog's root, and items that are not plain, may have as many children as there are tokens
    boosts = any(type(key).boosts is not Constraint.boosts for key in rules.constraints)
    return isinstance(strategy, BestStrategy) and strategy.semantics != "vllm" and has_no_filters and not boosts


def is_narrow_search_step(rules: SearchRules) -> bool:
    """Whether a step needs only the logits of a catalog's level: nothing ranks, reports or masks other tokens."""
    items, stops = rules.items, rules.stops
    return (
        items is not None
        and items.needs_level_alone
        and rules.constraints == (items,)
        and isinstance(rules.strategy, BestStrategy)
        and not (rules.is_controlled or stops.barred_token_ids)
        and rules.num_logprobs is None
    )


def joint_search_distribution(
    rules: SearchRules, logits: torch.Tensor, beams: SearchBeams
) -> tuple[torch.Tensor, torch.Tensor]:
    """The distribution from which beam sampling samples the next beams of a group.

    Args:
        rules, logits, beams: As for `take_search_step`.

    Returns:
        Probabilities [G, r, V] float64, over all continuations of a group together, and log-probabilities [G, r, V]
        float32 of each row by itself, at temperature 1.
    """
    logprobs, beams = _search_row_logprobs(rules, logits, beams)
    joint_search_probabilities = search_part_on_demand("sampling:joint_search_probabilities")
    return joint_search_probabilities(beams.scores, beams.narrow(logprobs), rules.filters), logprobs


def search_logprobs_of_draft(rules: SearchRules, logits: torch.Tensor, beams: SearchBeams) -> torch.Tensor:
    """The scores that drafts compete by: log-probabilities [G, r, V] of a draft model plus boosts.

    -inf for tokens after which no beam continues.
    """
    logprobs = search_log_probabilities(logits, rules.stops.last_token_ids, rules.filters.temperature)
    logprobs = beams.narrow(beams.restrict(logprobs))
    boosts = beams.boosts(logprobs, is_end=False)
    return logprobs if boosts is None else logprobs + boosts


def _search_row_logprobs(
    rules: SearchRules, logits: torch.Tensor, beams: SearchBeams
) -> tuple[torch.Tensor, SearchBeams]:
    """Log-probabilities [G, r, V], and the rows with their scores.

    A row that may take no token at all dies here; only controls and grammars can bring this about.
    """
    masked = beams.mask(logits) if beams.states else logits
    if rules.is_controlled or masked is not logits:
        is_barred = masked.amax(dim=-1) == NEVER
        if not is_searched_on_host(logits.device) or is_barred.any():
            masked = masked.clone() if masked is logits else masked
            masked.masked_fill_(is_barred[..., None], 0.0)
            beams = beams._replace(scores=beams.scores.masked_fill(is_barred, NEVER))
    temperature = rules.filters.temperature if rules.strategy.scales_logits else 1.0
    logprobs = search_log_probabilities(masked, rules.stops.barred_token_ids, temperature)
    del masked  # frees memory: it may be as large as the logits
    return beams.restrict(logprobs) if beams.states else logprobs, beams


def search_log_probabilities(
    logits: torch.Tensor, masked_token_ids: tuple[int, ...] = (), temperature: float = 1.0
) -> torch.Tensor:
    """Log-softmax of logits [..., V] in float32, then the mask, which does not renormalise, as in transformers."""
    if temperature != 1.0:
        logits = logits.float() / temperature
    if logits.numel() <= CELLS_NEAR or not is_searched_on_host(logits.device):
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    else:
        logprobs = _search_log_softmax(logits)
    if masked_token_ids:
        logprobs.index_fill_(-1, search_token_columns(masked_token_ids, logprobs.shape[-1], logprobs.device), NEVER)
    return logprobs


def _search_log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax in float32, on a host: it converts few rows at a time, which then stay in the caches."""
    logprobs = logits.new_empty(logits.shape, dtype=torch.float32)
    for some, of_some in zip(
        search_rows_near_at_hand(logits.reshape(-1, logits.shape[-1])),
        search_rows_near_at_hand(logprobs.flatten(0, -2)),
        strict=True,
    ):
        torch.log_softmax(some, dim=-1, dtype=torch.float32, out=of_some)
    return logprobs


def reported_search_step(rules: SearchRules, choice: SearchDecision) -> SearchStepResult[torch.Tensor]:
    """The chosen step, with the log-probabilities that the rules ask for."""
    step, logprobs = choice
    if rules.num_logprobs is None:
        return step
    best, tokens = search_topk(logprobs, min(rules.num_logprobs, logprobs.shape[-1]))
    return step._replace(
        top_logprobs=SearchTopLogprobs(tokens, best),
        beam_logprobs=_search_token_logprobs(logprobs, step.parents, step.tokens),
        finished_logprobs=_search_token_logprobs(logprobs, step.finished.parents, step.finished.tokens),
    )


def _search_token_logprobs(
    logprobs: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor
) -> SearchTokenLogprobs[torch.Tensor]:
    num_rows, vocab_size = logprobs.shape[1:]
    own = logprobs.flatten(1).gather(1, parents * vocab_size + tokens)
    # As many at a time as there are rows, to save memory.
    some_of_each = zip(torch.split(parents, num_rows, 1), torch.split(own, num_rows, 1), strict=True)
    return SearchTokenLogprobs(own, torch.cat([_search_token_ranks(logprobs, *some) for some in some_of_each], dim=1))


def _search_token_ranks(logprobs: torch.Tensor, parents: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[G, k], how many tokens of rows `parents` [G, k] are at least as probable as `own` [G, k]."""
    groups = search_arange(len(parents), own.device)[:, None]

    def of_some(parents: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor]:
        return ((logprobs[groups, parents] >= own[..., None]).sum(dim=-1),)

    (ranks,) = in_search_parts((*parents.shape, logprobs.shape[-1]), of_some, parents, own)
    return ranks
