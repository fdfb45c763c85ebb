"""Ways along a catalog are those of a trie of dictionaries, and steps along it those of a plain loop over it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.items import along_of, first_states_of
from tests.support.phrases import Phrases, boost_of
from tests.support.steps import rules_of, shortcuts
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ItemConstraint
from vllm_trie.search.constraints.ngrams import NGramConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.search.step import take_search_step
from vllm_trie.search.step_result import next_search_beams

VOCAB = 12
STOP, OTHER_STOP = 10, 11
AFTER = 3
CPU = torch.device("cpu")
Sequence = tuple[int, ...]


class Plain:
    """What a hypothesis may be, from the definition: no trie."""

    def __init__(self, sequences: list[Sequence], rules: ItemConstraint, stops: tuple[int, ...]) -> None:
        self.items, self.rules, self.stops = set(sequences), rules, stops

    def parts(self, tokens: Sequence) -> Iterator[tuple[int, Sequence]]:
        """Each way to read these tokens: how many items are complete, and what has come of the next one."""
        if self.rules.after is not None:
            if self.rules.after not in tokens:
                return
            tokens = tokens[tokens.index(self.rules.after) + 1 :]
        yield from self._split(tokens, 0)

    def _split(self, tokens: Sequence, done: int) -> Iterator[tuple[int, Sequence]]:
        yield done, tokens
        for end in range(1, len(tokens) + 1):
            if tokens[:end] in self.items:
                yield from self._split(tokens[end:], done + 1)

    def is_complete(self, tokens: Sequence) -> bool:
        return any(done == self.rules.num_items and not rest for done, rest in self.parts(tokens))

    def begins(self, tokens: Sequence) -> bool:
        """Whether a hypothesis, but for a stop token, begins so."""
        if self.rules.after is not None and self.rules.after not in tokens:
            return not {*tokens} & {*self.stops}
        return any(
            (done < self.rules.num_items and any(item[: len(rest)] == rest for item in self.items))
            or (done == self.rules.num_items and not rest)
            for done, rest in self.parts(tokens)
        )

    def ways(self, tokens: Sequence) -> set[int]:
        ways = {token for token in range(VOCAB) if self.begins((*tokens, token))}
        if self.rules.ends_with_stop and self.is_complete(tokens):
            ways |= {*self.stops}
        return ways


tokens_of_items = st.integers(0, 6)
item_sets = st.lists(st.lists(tokens_of_items, min_size=1, max_size=4).map(tuple), min_size=1, max_size=12)


def prefix_free(items: list[Sequence]) -> list[Sequence]:
    return [item for item in items if not any(item != other and other == item[: len(other)] for other in items)]


class Search(NamedTuple):
    items: list[Sequence]
    rules: ItemConstraint
    excluded: list[Sequence]

    def along(self, stops: tuple[int, ...]) -> ConstraintAlongItems:
        return along_of(self.items, self.rules, stops, excluded=self.excluded)

    def plain(self, stops: tuple[int, ...]) -> Plain:
        return Plain([item for item in self.items if item not in self.excluded], self.rules, stops)


@st.composite
def searches(draw: Any) -> Search:
    num_items, items = draw(st.integers(1, 3)), draw(item_sets)
    after, excluded = draw(st.sampled_from([None, AFTER])), list[Sequence]()
    rules = ItemConstraint("", num_items, after, *(draw(st.booleans()) for _ in range(3)))
    items = prefix_free(items) if num_items > 1 else items
    if rules.excludes:
        excluded = draw(st.lists(st.sampled_from(items), unique=True))
        if after is not None:
            excluded = [item for item in excluded if item != items[0]]
    return Search(items, rules, excluded)


@settings(max_examples=60)
@given(searches(), st.lists(st.integers(0, VOCAB - 3), max_size=9), st.booleans())
def test_ways_and_states_are_those_of_the_definition(search: Search, choices: list[int], looks: bool) -> None:
    rules, stops = search.rules, (STOP, OTHER_STOP)
    along, plain, path = search.along(stops), search.plain(stops), ()
    state = first_states_of(along)
    for choice in choices:
        with shortcuts(looks):
            ways = along.continuations(state, along.most_continuations(state, VOCAB))
        outcomes = along.outcomes(ways.targets)
        exist = ways.exist[0, 0].nonzero()[:, 0].tolist()
        tokens = [int(ways.tokens[0, 0, place]) for place in exist]
        assert len(set(tokens)) == len(tokens)
        assert set(tokens) == plain.ways(path), path
        for place, token in zip(exist, tokens, strict=True):
            complete = token in stops if rules.ends_with_stop and token in stops else plain.is_complete((*path, token))
            assert bool(outcomes.is_complete[0, 0, place]) == complete
            assert bool(outcomes.ends[0, 0, place]) == (complete and (token in stops or not rules.ends_with_stop))
            assert bool(outcomes.goes_on[0, 0, place]) == (token not in stops and bool(plain.ways((*path, token))))
        every = torch.arange(VOCAB)
        leads_on = along.leads_on(state.expand(1, VOCAB), every[None])[0]
        assert leads_on.tolist() == [
            t not in stops and t in tokens and bool(plain.ways((*path, t))) for t in range(VOCAB)
        ]
        on = [place for place in exist if outcomes.goes_on[0, 0, place]]
        if not on:
            return
        place = on[choice % len(on)]
        path = (*path, int(ways.tokens[0, 0, place]))
        advanced, state = along.advance(state, ways.tokens[..., place]), outcomes.states[..., place]
        assert state.tolist() == advanced.tolist(), path


@settings(max_examples=60)
@given(searches(), st.integers(0, 1000))
def test_masked_log_probabilities_are_those_of_ways_that_go_on(search: Search, seed: int) -> None:
    stops = STOP, OTHER_STOP
    along, plain = search.along(stops), search.plain(stops)
    logprobs = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    masked = along.narrow(logprobs, first_states_of(along))
    may = [token not in stops and plain.begins((token,)) and bool(plain.ways((token,))) for token in range(VOCAB)]
    expected = logprobs.where(torch.tensor([[may]]), -math.inf)
    assert torch.equal(masked, expected)


class Beam(NamedTuple):
    tokens: Sequence
    score: float


def repeats(tokens: Sequence, size: int) -> bool:
    """Whether the last n-gram of a hypothesis has stood in it before."""
    ngrams = [tokens[at : at + size] for at in range(len(tokens) - size + 1)]
    return size > 0 and len(ngrams) > 0 and ngrams[-1] in ngrams[:-1]


class Besides(NamedTuple):
    """What hypotheses along a catalog are judged by besides."""

    ngram_size: int  # none occurs twice; 0: whichever may
    phrases: Phrases
    margin: float  # by which what goes on may be worse than the best


Ranked = list[tuple[tuple[float, int, bool, int], Beam, bool]]  # a key, lower for the better, and whether it counts


def unpruned(found: Ranked, margin: float) -> Ranked:
    """Those that are not worse than the best by more than this, in order."""
    ranked = sorted(found)
    return [each for each in ranked if each[0][0] <= ranked[0][0][0] + margin]


def plain_step(
    plain: Plain, rules: SearchRules, beams: list[Beam], logprobs: list[torch.Tensor], besides: Besides
) -> tuple[list[Beam], list[Beam]]:
    """The next beams, and the hypotheses that finish, from sorted lists."""
    assert rules.items is not None
    over, live = Ranked(), Ranked()
    for parent, (beam, of_row) in enumerate(zip(beams, logprobs, strict=True)):
        possible = plain.ways(beam.tokens) - {*rules.stops.barred_token_ids}
        allowed = [token for token in possible if not repeats((*beam.tokens, token), besides.ngram_size)]
        ways = sorted(allowed, key=lambda token: (token in rules.stops.token_ids, token))
        if rules.items.renormalizes:
            of_row = of_row - of_row[ways].logsumexp(0)
        for token in ways:
            path = (*beam.tokens, token)
            stops = token in rules.stops.token_ids
            score = float(of_row[token] + torch.tensor(beam.score))
            complete = stops or plain.is_complete(path)
            ends = complete and (rules.is_last or stops or not rules.items.ends_with_stop) and not rules.bars_items
            at_end, running = (score + boost_of(besides.phrases, [*path], is_over) for is_over in (True, rules.is_last))
            goes_on = not stops and bool(plain.ways(path))
            of_over = at_end if ends else running
            of_live = running if goes_on else of_over
            over.append(((-of_over, parent, stops, token), Beam(path, score), ends))
            live.append(((-of_live, parent, stops, token), Beam(path, score), goes_on))
    over, live = unpruned(over, besides.margin)[: rules.width], unpruned(live, besides.margin)
    return [beam for _, beam, goes_on in live if goes_on][: rules.width], [beam for _, beam, ends in over if ends]


ways_to_write = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=3), min_size=1, max_size=2)
weighted = st.tuples(ways_to_write, st.sampled_from([1.0, 4.0, 0.25, -1.5, -6.0]))
all_besides = st.builds(
    Besides, st.integers(0, 3), st.lists(weighted, max_size=5), st.sampled_from([1.5, 4.0, math.inf])
)


@settings(max_examples=60)
@given(
    searches(), st.integers(1, 6), st.sampled_from([0, 0, 1, 2, 3]), st.integers(0, 1000), st.booleans(), all_besides
)
def test_steps_are_those_of_a_plain_loop(
    search: Search, width: int, min_tokens: int, seed: int, looks: bool, besides: Besides
) -> None:
    ngram_size, phrases, margin = besides
    if phrases:
        search = search._replace(rules=replace(search.rules, renormalizes=False))
    item_rules, stops, random = search.rules, (STOP, OTHER_STOP), torch.Generator().manual_seed(seed)
    along, plain = search.along(stops), search.plain(stops)
    boosts = [PhraseBoostConstraint.of(phrases)] if phrases else []
    pruning = SearchPruning() if margin == math.inf else SearchPruning(absolute=margin)
    of_search = rules_of(width, stops=stops, constraints=(item_rules, *boosts), pruning=pruning)
    slots: list[Beam | None] = [Beam((), 0.0)]
    begun = {along: first_states_of(along), **{key: key.begin(1, CPU) for key in boosts}}
    state = SearchBeams(torch.zeros(1, 1), states=begun)
    for number in range(8):
        length = number + 1
        phase = SearchPhase(length > min_tokens, bars_items=length < min_tokens, is_last=number == 7)
        rules = of_search.in_phase(phase)
        logits = torch.randn(1, len(slots), VOCAB, generator=random)
        by_beam = {beam: row for row, beam in enumerate(slots) if beam is not None}
        in_slots = sorted(by_beam, key=by_beam.__getitem__)
        logprobs = [logits[0, by_beam[beam]].log_softmax(-1) for beam in in_slots]
        expected, ended = plain_step(plain, rules, in_slots, logprobs, besides)
        histories = torch.tensor([[beam.tokens if beam else [-1] * number for beam in slots]]).view(
            1, len(slots), number
        )
        bans = {NGramConstraint(ngram_size): histories} if ngram_size else {}
        with shortcuts(looks):
            before = state._replace(states=state.states | bans, length=number)
            step = take_search_step(rules, logits, before)
        finished = zip(*(field[0].tolist() for field in step.finished), strict=True)
        paths = [(slots[parent], token, score) for parent, token, score in finished if score > -math.inf]
        assert [(*(beam.tokens if beam else ()), token) for beam, token, _ in paths] == [b.tokens for b in ended]
        assert [score for *_, score in paths] == pytest.approx([b.score for b in ended], abs=1e-5)
        if step.rank_scores is not None:
            by_rank = [score for score in step.rank_scores.finished[0].tolist() if score > -math.inf]
            totals = [beam.score + boost_of(phrases, [*beam.tokens], is_over=True) for beam in ended]
            assert by_rank == pytest.approx(totals, abs=1e-4)
        fields = zip(step.parents[0].tolist(), step.tokens[0].tolist(), step.scores[0].tolist(), strict=True)
        grown = [
            None if score == -math.inf else Beam((*slots[parent].tokens, token), score)  # type: ignore[union-attr]
            for parent, token, score in fields
        ]
        found = sorted((beam for beam in grown if beam is not None), key=lambda beam: -beam.score)
        assert {beam.tokens for beam in found} == {beam.tokens for beam in expected}
        assert [b.score for b in found] == pytest.approx(sorted((b.score for b in expected), reverse=True), abs=1e-5)
        if not found:
            return
        slots, state = grown, before.after(next_search_beams(step))


@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_what_goes_on_within_the_nucleus_is_kept_after_many_items_that_only_end(top_p: float) -> None:
    rules = rules_of(2, constraints=(ItemConstraint(""),), filters=SearchFilters(top_p=top_p))
    along = along_of([(1,), (2,), (3,), (4,), (5, 6), (5, 7)], ItemConstraint(""))
    logits = torch.tensor([1e-9, 0.21, 0.205, 0.2, 0.195, 0.19]).log()[None, None]
    step = take_search_step(rules, logits, SearchBeams(torch.zeros(1, 1), states={along: along.begin(1, CPU)}))
    assert step.tokens[step.scores > -math.inf].tolist() == [5]
    assert step.finished.tokens[step.finished.scores > -math.inf].tolist() == [1, 2]


def test_a_bound_by_depth_is_enough_where_the_device_is_not_looked_at() -> None:
    items = [(1, 2, 3), (1, 4, 5), (1, 4, 6), (1, 4, 7), (2, 2, 2)]
    along = along_of(items, ItemConstraint(""))
    with shortcuts(False):
        for length, path in enumerate([(), (1,), (1, 4)]):
            state = along.begin(1, CPU)
            for token in path:
                state = along.advance(state, torch.tensor([[token]]))
            ways = along.continuations(state, along.most_continuations(state, VOCAB, length))
            assert ways.tokens.shape[-1] == along.trie.most_children[length]
            exist = ways.tokens[0, 0][ways.exist[0, 0]].tolist()
            assert exist == sorted({item[length] for item in items if item[:length] == path})


@pytest.mark.parametrize("ends_with_stop", [False, True])
def test_behind_the_last_token_of_an_item_there_is_a_stop_token_or_nothing(ends_with_stop: bool) -> None:
    """A step is scheduled before the host knows that the one before it ended the search."""
    along = along_of([(1, 2, 3)], ItemConstraint("", ends_with_stop=ends_with_stop), (STOP,))
    states = along.begin(1, CPU)
    for token in (1, 2, 3):
        states = along.advance(states, torch.tensor([[token]]))
    for looks in (False, True):
        for length in (3, 4):
            with shortcuts(looks):
                ways = along.continuations(states, along.most_continuations(states, VOCAB, length))
            assert ways.tokens[ways.exist].tolist() == [STOP] * ends_with_stop
