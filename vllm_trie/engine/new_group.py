"""From a request to its search: what ends its hypotheses, and how the worker selects."""

from __future__ import annotations

from secrets import randbits

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import Request

from vllm_trie.compat.versions import own_beams
from vllm_trie.engine.grammar import RowMatchers
from vllm_trie.engine.group import BeamGroup
from vllm_trie.messages import GroupTicket
from vllm_trie.options import BeamParams, parse_options
from vllm_trie.sampling_params import is_controlled, logits_filters, stop_tokens
from vllm_trie.search.constraints.catalog import ItemRules
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.grammar import Grammar
from vllm_trie.search.constraints.ngrams import NoRepeats
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.filters import Pruning
from vllm_trie.search.rules import Best, Drawn, InGroups, SelectRules, Stochastic, Strategy
from vllm_trie.search.stopping import StopRules


def new_group(
    request: Request,
    beam: BeamParams,
    ticket: GroupTicket,
    max_model_len: int,
    has_logits_processors: bool,
    catalog: str | None = None,
    num_items: int = 0,
) -> BeamGroup:
    """The search that a request asks for.

    Args:
        request: The request that stands for the group.
        beam: Its beam options.
        max_model_len: Tokens of the longest hypothesis, its prompt included.
        has_logits_processors: Custom processors act on the logits of the engine's requests.
        catalog: Digest of the catalog along which it goes.
        num_items: Of that catalog.
    """
    params = request.sampling_params
    assert params is not None
    stop_strings, prompt_length = tuple(params.stop or ()), request.num_prompt_tokens
    max_length = min(request.max_tokens, max_model_len - prompt_length)
    stop_rules = StopRules(stop_tokens(params), ticket.eos_token_id, stop_strings, params.min_tokens, max_length)
    num_stops = len(stop_rules.stop_token_ids)
    grammar = request.structured_output_request
    select_rules = SelectRules(
        beam.beam_width if catalog is None else beam.num_beams_along(num_items, num_stops),
        _strategy(beam, stop_rules, ticket.padding),
        Stops(stop_rules.stop_token_ids, stop_rules.stop_strings, params.skip_special_tokens),
        params.logprobs,
        is_controlled(params) or (has_logits_processors and not ticket.is_offline),
        logits_filters(params),
        _pruning(beam, stop_rules),
        None if catalog is None else _item_rules(beam, catalog),
        _constraints(beam, has_grammar=grammar is not None),
    )
    seed = randbits(64) if params.seed is None else params.seed
    counts_prompt = own_beams().counts_prompt
    return BeamGroup(
        request.request_id,
        beam,
        stop_rules,
        prompt_length,
        select_rules,
        ticket.is_offline,
        seed,
        counts_prompt,
        None if grammar is None else RowMatchers(grammar),
        streams=ticket.n == 1
        and params.output_kind is not RequestOutputKind.FINAL_ONLY
        # Of these the answer is not known before the end.
        and not (beam.compact or beam.stochastic or beam.num_beam_groups > 1),
    )


def _pruning(beam: BeamParams, rules: StopRules) -> Pruning:
    """What drops continuations. As in vLLM 0.33, where there may be several EOS tokens, a beam proposes its best 2b."""
    may_stop_otherwise = len(rules.stop_token_ids) > 1 or rules.stop_strings  # by one token only, enough of 2b go on
    if beam.semantics == "vllm" and own_beams().stops_by_generation_config and may_stop_otherwise:
        return Pruning(per_parent=2 * beam.beam_width)
    return Pruning(beam.prune_relative, beam.prune_absolute, beam.prune_relative_local, beam.max_candidates_per_parent)


def _item_rules(beam: BeamParams, catalog: str) -> ItemRules:
    after = beam.catalog_after
    assert not isinstance(after, str), "the front end has not looked up the token of catalog_after"
    return ItemRules(catalog, beam.catalog_items, after, beam.catalog_stop, beam.catalog_renormalize)


def _constraints(beam: BeamParams, has_grammar: bool) -> tuple[Constraint, ...]:
    """What else rows may not take."""
    found: list[Constraint] = [NoRepeats(beam.no_repeat_ngram_size)] if beam.no_repeat_ngram_size else []
    if has_grammar:
        found.append(Grammar(2 * beam.beam_width if beam.semantics == "vllm" else None))
    return tuple(found)


def _strategy(beam: BeamParams, rules: StopRules, padding: int | None) -> Strategy:
    """How beams are chosen. Where a model has no padding token, transformers pads groups that are done with EOS."""
    if beam.do_sample:
        min_width = beam.min_width or (beam.beam_width if beam.threshold is None else 1)
        drawn = Drawn(bool(beam.replacement), min_width, beam.threshold, bool(beam.memory_mode))
        return Stochastic() if beam.stochastic else drawn
    if beam.num_beam_groups == 1:
        return Best(beam.semantics or "hf")
    if padding is None and rules.stop_token_ids:
        padding = rules.eos_token_id if rules.eos_token_id in rules.stop_token_ids else rules.stop_token_ids[0]
    return InGroups(beam.num_beam_groups, float(beam.diversity_penalty), padding)


def is_unchecked(request: Request) -> bool:
    """Whether a request without a ticket asks for beams."""
    params = request.sampling_params
    try:
        return params is not None and parse_options(params.extra_args) is not None
    except ValueError:
        return True
