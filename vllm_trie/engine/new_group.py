"""Builds the search of a request for the scheduler: what ends hypotheses, and how the worker selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from secrets import randbits
from typing import TYPE_CHECKING

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from vllm_trie.compat.versions import own_vllm_beams
from vllm_trie.engine.grammar import group_grammar_of
from vllm_trie.engine.group import BeamGroup, GroupPlan
from vllm_trie.messages import GroupTicketMessage
from vllm_trie.options import BeamParams, parse_options
from vllm_trie.options.contrast import contrast_option_weights
from vllm_trie.sampling_params import (
    sampling_params_control_logits,
    sampling_params_filters,
    sampling_params_ignored_stops,
    sampling_params_stops,
)
from vllm_trie.search import search_part_on_demand
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import SearchPruning
from vllm_trie.search.rules import SearchRules, SearchStrategy
from vllm_trie.search.stopping import (
    HfSearchPool,
    SearchPool,
    StochasticSearchPool,
    TridecodeSearchPool,
    VllmSearchPool,
)
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.token_tables import SearchTokenIds

if TYPE_CHECKING:
    from vllm_trie.engine.catalogs import NoGroupCatalog
    from vllm_trie.search.unique_pools import ItemsOf


def new_group(
    request: Request,
    params: BeamParams,
    ticket: GroupTicketMessage,
    max_model_len: int,
    has_logits_processors: bool,
    catalog: NoGroupCatalog,
) -> BeamGroup:
    """The search that a request asks for.

    Args:
        request: The request that stands for the group.
        params: Its beam options.
        max_model_len: Tokens of the longest hypothesis, its prompt included.
        has_logits_processors: The engine has custom logits processors.
        catalog: The catalog that the search uses.
    """
    sampling = request.sampling_params
    assert sampling is not None
    prompt_length = request.num_prompt_tokens
    max_length = min(request.max_tokens, max_model_len - prompt_length)
    stop_ids, eos_token_id = SearchTokenIds(sampling_params_stops(sampling)), ticket.eos_token_id
    ending = frozenset(stop_ids)
    stops = StopConstraints(
        stop_ids,
        tuple(sampling.stop or ()),
        sampling.skip_special_tokens,
        sampling.spaces_between_special_tokens,
        ignored_token_ids=sampling_params_ignored_stops(sampling),
    )
    matchers = group_grammar_of(request, params)
    grammar = () if matchers is None else (matchers.constraint,)
    others = list[Constraint]()
    if params.no_repeat_ngram_size:
        others.append(search_part_on_demand("constraints.ngrams:NGramConstraint")(params.no_repeat_ngram_size))
    others += _new_group_model_rules(request, ticket)
    if params.phrase_boosts:
        others.append(search_part_on_demand("constraints.phrase_boosts:PhraseBoostConstraint").of(params.phrase_boosts))
    if params.contrast is not None:
        others.append(
            search_part_on_demand("constraints.contrast:ContrastConstraint")(**contrast_option_weights(params.contrast))
        )
    width = catalog.num_beams(len(stop_ids))
    search = SearchRules(
        width,
        _new_group_strategy(params, _new_group_padding(ticket, stop_ids)),
        stops,
        sampling.logprobs,
        sampling_params_control_logits(sampling) or (has_logits_processors and not ticket.is_offline),
        sampling_params_filters(sampling),
        _new_group_pruning(params, stops),
        (*catalog.constraints, *others, *grammar),
        num_ending=catalog.num_ending(width, len(stop_ids)),
    )
    items_end = search.items is not None and not search.items.ends_with_stop
    ended_by = None if items_end else ending
    uncounted = ending if eos_token_id is None else ending | {eos_token_id}
    compares_final_scores = ticket.is_offline and own_vllm_beams().counts_prompt
    plan = GroupPlan(
        request.request_id,
        params,
        ticket.n,
        ticket.caller,
        search,
        ending,
        sampling.eos_token_id,
        sampling.min_tokens,
        max_length,
        catalog,
        partial(new_group_pool, params, max_length, prompt_length, uncounted, ended_by),
        prompt_length,
        uncounted_eos=eos_token_id if compares_final_scores and eos_token_id not in ending else None,
        seed=randbits(64) if sampling.seed is None else sampling.seed,
        num_sampled_steps=max_length if params.do_sample else params.sample_first,
    )
    comes_whole = params.compact or params.beam_results or params.stochastic or params.num_beam_groups > 1
    streams = ticket.n == 1 and sampling.output_kind is not RequestOutputKind.FINAL_ONLY and not comes_whole
    return BeamGroup(plan, matchers, streams)


def new_group_pool(
    params: BeamParams,
    max_length: int,
    prompt_length: int = 0,
    uncounted: frozenset[int] = frozenset(),
    stop_token_ids: frozenset[int] | None = frozenset(),
    items_of: ItemsOf | None = None,
) -> SearchPool:
    """The pool in which finished hypotheses compete, by the search's semantics.

    Args:
        max_length: The most tokens that a hypothesis can generate.
        prompt_length: Tokens of the prompt, for semantics="vllm" if the installed vLLM counts them.
        uncounted: Final tokens that do not count towards the length in that case.
        stop_token_ids: The tokens that end a hypothesis; None if all that ends is a whole item, also in the last step.
        items_of: A function from leaves to items, if each item counts once.
    """
    width, penalty = params.beam_width, params.length_penalty
    if params.semantics == "vllm":
        counted = (prompt_length, uncounted) if own_vllm_beams().counts_prompt else (0, frozenset())
        return VllmSearchPool(width, penalty, max_length, *counted)
    if params.semantics == "tridecode":
        return TridecodeSearchPool(width, penalty, max_length)
    if params.stochastic:
        return StochasticSearchPool(width, penalty, max_length)
    new_pool: Callable[..., HfSearchPool] = HfSearchPool
    if items_of is not None:
        new_pool = partial(search_part_on_demand("unique_pools:UniqueSearchPool"), items_of=items_of)
    if params.num_beam_groups > 1:
        of_group = width // params.num_beam_groups
        pools = [new_pool(of_group, penalty, max_length, params.early_stopping) for _ in range(params.num_beam_groups)]
        pool: SearchPool = search_part_on_demand("group_pools:SearchGroupPools")(pools, stop_token_ids)
        return pool
    # One beam is greedy search: `generate(num_beams=1)` stops at the first stop token, whatever the options.
    return new_pool(width, penalty, max_length, True if width == 1 else params.early_stopping)


def _new_group_model_rules(request: Request, ticket: GroupTicketMessage) -> Iterator[Constraint]:
    """What the model's generation configuration rules, in transformers' order: suppressed tokens, then timestamps."""
    timestamps = None
    if ticket.timestamps is not None:
        rules = search_part_on_demand("constraints.timestamps:TimestampConstraint")
        timestamps = rules.after(request.prompt_token_ids or (), *ticket.timestamps)
    if ticket.suppressed is not None:
        anywhere, at_first = map(tuple, ticket.suppressed)
        has_first = timestamps is not None and timestamps.begins  # in the prompt, after the task
        suppression = search_part_on_demand("constraints.suppression:SuppressionConstraint")
        yield suppression(anywhere, () if has_first else at_first)
    if timestamps is not None:
        yield timestamps


def _new_group_pruning(beam: BeamParams, stops: StopConstraints) -> SearchPruning:
    """Pruning of a search. As in vLLM 0.33, which may have several EOS tokens, each beam proposes its best 2b."""
    may_stop_otherwise = len(stops.token_ids) > 1 or stops.strings  # with one stop token, enough of 2b go on
    if beam.semantics == "vllm" and own_vllm_beams().stops_by_generation_config and may_stop_otherwise:
        return SearchPruning(per_parent=2 * beam.beam_width)
    return SearchPruning(
        beam.prune_relative, beam.prune_absolute, beam.prune_relative_local, beam.max_candidates_per_parent
    )


def _new_group_padding(ticket: GroupTicketMessage, stop_ids: tuple[int, ...]) -> int | None:
    """The token that finished groups of beams append: as in transformers, EOS if the model has no padding token."""
    if ticket.padding is not None or not stop_ids:
        return ticket.padding
    return ticket.eos_token_id if ticket.eos_token_id in stop_ids else stop_ids[0]


def _new_group_strategy(beam: BeamParams, padding: int | None) -> SearchStrategy:
    """The strategy that chooses beams; `padding` comes from `_new_group_padding`."""
    if beam.do_sample:
        min_width = beam.min_width or (beam.beam_width if beam.threshold is None else 1)
        top_k = (beam.accept_top_k or beam.beam_width) if beam.accept == "top_k" else None
        if beam.stochastic:
            return search_part_on_demand("strategies.stochastic:StochasticStrategy")()
        joint_sampling = search_part_on_demand("strategies.joint_sampling:JointSamplingStrategy")
        return joint_sampling(bool(beam.replacement), min_width, beam.threshold, bool(beam.memory_mode), top_k)
    if beam.num_beam_groups == 1:
        return BestStrategy(beam.semantics or "hf")
    return search_part_on_demand("strategies.in_groups:DiverseGroupsStrategy")(
        beam.num_beam_groups, float(beam.diversity_penalty), padding
    )


def is_group_request_unchecked(request: Request) -> bool:
    """Whether a request without a ticket asks for beams, so that no front end of the plugin has checked it."""
    params = request.sampling_params
    try:
        return params is not None and parse_options(params.extra_args) is not None
    except ValueError:
        return True
