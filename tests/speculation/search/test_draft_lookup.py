"""What beams are drafted without a draft model: how their newest tokens went on before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_trie.speculation.search import draft_lookup as lookup
from vllm_trie.speculation.search.draft_lookup import (
    DraftPaths,
    DraftPromptIndex,
    NGrams,
    add_drafts_to_forest,
    look_up_drafts,
)
from vllm_trie.speculation.search.forest import Forest

MANY = 1000
Found = list[tuple[int, ...]]


def found(
    prompt: Sequence[int], generated: Sequence[Sequence[int]], ngrams: NGrams, num_tokens: int = 3, most: int = MANY
) -> list[Found]:
    """By beam, the best first."""
    every = look_up_drafts(DraftPromptIndex([*prompt]), np.array(generated, np.int32), ngrams, num_tokens, most)
    ranks = [0] * len(generated)
    of_beams: list[Found] = [[] for _ in generated]
    for beam, tokens in zip(every.beams.tolist(), every.tokens.tolist(), strict=True):
        of_beams[beam].append(tuple(tokens))
        ranks[beam] += 1
        assert ranks[beam] == max(ranks), "the second best of a beam comes before the best of another"
    return of_beams


def by_loop(
    prompt: Sequence[int], generated: Sequence[Sequence[int]], ngrams: NGrams, num_tokens: int
) -> list[dict[tuple[int, ...], tuple[int, int]]]:
    """The same, place by place: by continuation how long its best match is, and where that ends, both negative."""
    texts = [[*prompt, *own] for own in generated]
    matches: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in texts]
    for is_replaced in (False, True) if len(generated[0]) > 1 else (False,):
        if is_replaced and all(min(own, default=(0,))[0] == -ngrams.longest for own in matches):
            break
        for beam, text in enumerate(texts):
            for row, other in enumerate(texts):
                for end in range(is_replaced if row == beam else len(prompt) + is_replaced, len(text) - 1):
                    ahead = [end + 1 + number % (len(text) - 1 - end) for number in range(num_tokens)]
                    length = common_end(other[: end + 1 - is_replaced], text[: len(text) - is_replaced]) - is_replaced
                    if length >= ngrams.shortest:
                        matches[beam].append((-min(length, ngrams.longest), -end, tuple(other[at] for at in ahead)))
    best = [dict[tuple[int, ...], tuple[int, int]]() for _ in texts]
    for beam, own in enumerate(matches):
        for length, end, following in sorted(own, reverse=True):
            best[beam][following] = length, end
    return best


def common_end(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of their last tokens are the same."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


tokens_of = st.integers(0, 3)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """A prompt, and beams of equal length that share beginnings."""
    prompt, length = draw(st.lists(tokens_of, min_size=1, max_size=12)), draw(st.integers(1, 8))
    beams = [draw(st.lists(tokens_of, min_size=length, max_size=length))]
    for _ in range(draw(st.integers(0, 3))):
        common = draw(st.integers(0, length))
        rest = draw(st.lists(tokens_of, min_size=length - common, max_size=length - common))
        beams.append(draw(st.sampled_from(beams))[:common] + rest)
    return prompt, beams


some_ngrams = st.integers(1, 3).flatmap(lambda n: st.builds(NGrams, st.just(n), st.integers(n, 5)))


@settings(max_examples=100)
@given(groups(), some_ngrams, st.integers(1, 4))
def test_every_way_on_that_a_loop_finds_is_found_in_its_order(
    group: tuple[list[int], list[list[int]]], ngrams: NGrams, num_tokens: int
) -> None:
    ours, expected = found(*group, ngrams, num_tokens), by_loop(*group, ngrams, num_tokens)
    for of_beam, of_loop in zip(ours, expected, strict=True):
        assert sorted(of_beam) == sorted(of_loop)
        assert sorted(of_beam, key=of_loop.__getitem__) == of_beam


@settings(max_examples=60)
@given(groups(), some_ngrams, st.integers(1, 3))
def test_of_many_ways_on_as_many_come_as_were_asked_for(
    group: tuple[list[int], list[list[int]]], ngrams: NGrams, most: int
) -> None:
    assert [of_beam[:most] for of_beam in found(*group, ngrams)] == found(*group, ngrams, most=most)


def test_of_too_many_places_each_beam_takes_those_of_its_own_history(monkeypatch: pytest.MonkeyPatch) -> None:
    generated, ngrams = [[1, 5, 1], [2, 6, 2], [1, 7, 2]], NGrams(1, 2)
    assert found([9], generated, ngrams, 1) == [[(5,), (7,)], [(6,)], [(6,)]]
    monkeypatch.setattr(lookup, "MOST_PAIRS", 1)
    assert found([9], generated, ngrams, 1) == [[(5,)], [(6,)], []]


COPY = [11, 12, 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("generated", "shortest", "expected"),
    [
        ([COPY[:2]], 2, [[(13, 14, 15)]]),
        ([COPY[:2]], 3, [[]]),
        ([[99, 13]], 1, [[(14, 15, 16)]]),
        ([[99, 13]], 2, [[]]),
        ([[8, 9, 8, 9]], 2, [[(8, 9, 8)]]),  # what repeats itself goes on repeating itself
        ([[8, 8]], 1, [[(8, 8, 8)]]),
        ([[7]], 1, [[]]),
        ([[21, 22, 23], [24, 21, 22]], 2, [[], [(23, 23, 23)]]),  # what another beam has generated
        ([[*COPY[:3], 99]], 2, [[(15, 16, 2)]]),  # a token that stands for another
        ([[*COPY[:3], 99]], 3, [[]]),
        ([[99]], 1, [[]]),
    ],
)
def test_a_beam_goes_on_as_its_newest_tokens_did(generated: list, shortest: int, expected: list) -> None:
    assert found([1, *COPY, 2], generated, NGrams(shortest, 4)) == expected


def test_the_longest_match_comes_first_then_the_latest() -> None:
    prompt = [1, 2, 3, 50, 0, 2, 3, 60, 0, 9, 3, 70, 0, 8, 3, 80]
    assert found(prompt, [[1, 2, 3]], NGrams(1, 3), 1) == [[(50,), (60,), (80,), (70,)]]


# What becomes of them.


def planted(of_beams: list[Found], draft_width: int = MANY, max_drafts: int = MANY) -> Forest:
    ranked = sorted((rank, beam) for beam, every in enumerate(of_beams) for rank in range(len(every)))
    tokens = np.array([of_beams[beam][rank] for rank, beam in ranked], np.int32)
    forest = Forest([100 + beam for beam in range(len(of_beams))], max_drafts)
    layers = add_drafts_to_forest(forest, DraftPaths(np.array([beam for _, beam in ranked]), tokens), draft_width)
    assert [node for layer in layers for node in layer] == [*range(len(of_beams), forest.num_nodes)]
    assert all(layers)
    assert all(len(layer) <= draft_width for layer in layers)
    depths = [[len(forest.path(node)) - 1 for node in layer] for layer in layers]
    assert depths == [[number] * len(layer) for number, layer in enumerate(layers, start=1)]
    assert forest.num_drafts <= max_drafts
    return forest


def paths(forest: Forest) -> list[list[int]]:
    return [[forest.tokens[node] for node in forest.path(leaf)] for leaf in forest.leaves()]


def test_continuations_share_what_they_have_in_common() -> None:
    forest = planted([[(1, 2, 3), (1, 2, 4), (5, 6, 7)], [(1, 2, 3)]])
    assert paths(forest) == [[100, 1, 2, 3], [101, 1, 2, 3], [100, 1, 2, 4], [100, 5, 6, 7]]


def test_every_beam_is_drafted_for_before_any_is_for_a_second_time() -> None:
    of_beams: list[Found] = [[(1, 2), (3, 4)], [(5, 6), (7, 8)]]
    assert paths(planted(of_beams, draft_width=2)) == [[100, 1, 2], [101, 5, 6]]
    assert paths(planted(of_beams, max_drafts=3)) == [[100, 1], [101, 5], [100, 3]]
    assert paths(planted(of_beams, max_drafts=2)) == [[100, 1], [101, 5]]


def test_a_continuation_ends_before_what_cannot_come() -> None:
    assert paths(planted([[(1, -1, 3), (-1, 1, 1)], [(4, 5, -1)]])) == [[100, 1], [101, 4, 5]]
    assert paths(planted([[], [(-1, 5, 6)]])) == [[100], [101]]


@given(
    st.lists(st.lists(st.tuples(tokens_of, tokens_of, tokens_of), max_size=4, unique=True), min_size=1, max_size=4),
    *[st.integers(0, 12)] * 2,
)
def test_forests_keep_to_their_limits(of_beams: list[Found], draft_width: int, max_drafts: int) -> None:
    if any(of_beams):
        planted(of_beams, 1 + draft_width, max_drafts)


def test_of_a_token_that_is_everywhere_the_latest_places_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MOST_PLACES", 6)
    of_beams, places = DraftPromptIndex([5, 7, 5, 5, 7, 5, 5]).find(np.array([5, 7, 9]))
    assert of_beams.tolist() == [0, 0, 1, 1]
    assert places.tolist() == [5, 6, 1, 4]
