"""What phrases add to a hypothesis, token by token, is what one counts in the whole of it."""

from __future__ import annotations

import pickle
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.phrases import boost_of
from vllm_trie.search.constraints import phrase_boosts
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint, _known, most_constraint_bytes
from vllm_trie.search.devices import SearchCache

CPU = torch.device("cpu")
VOCAB = 4
LOGPROBS = torch.zeros(1, 1, VOCAB)  # which phrases do not look at
token = st.integers(0, VOCAB - 1)
way = st.lists(token, min_size=1, max_size=4)
phrase = st.tuples(st.lists(way, min_size=1, max_size=2), st.sampled_from([1.0, 2.5, 0.25, -1.0, -3.0]))


@given(st.lists(phrase, min_size=1, max_size=6), st.lists(token, max_size=10))
@settings(max_examples=100)
def test_boosts_are_what_one_counts_in_the_whole_hypothesis(
    phrases: list[tuple[list[list[int]], float]], text: list[int]
) -> None:
    constraint = PhraseBoostConstraint.of(phrases)
    states, total = constraint.begin(1, CPU), 0.0
    for at in range(len(text) + 1):
        running, at_end = (constraint.boosts(states, LOGPROBS, is_end)[0, 0] for is_end in (False, True))
        for newest in range(VOCAB):
            hypothesis = [*text[:at], newest]
            assert total + running[newest].item() == pytest.approx(boost_of(phrases, hypothesis), abs=1e-4)
            assert total + at_end[newest].item() == pytest.approx(boost_of(phrases, hypothesis, is_over=True), abs=1e-4)
        assert max(running.max(), at_end.max()) <= constraint.most_boost + 1e-5
        after = torch.arange(VOCAB)[None]
        pending = constraint.pending(states, torch.zeros_like(after), after)[0]
        torch.testing.assert_close(running - pending, at_end, rtol=0, atol=1e-5)
        if at < len(text):
            total += running[text[at]].item()
            states = constraint.advance(states, torch.tensor([[text[at]]]))


def test_rows_of_several_groups_have_each_their_own_boosts() -> None:
    constraint = PhraseBoostConstraint.of([([0, 1], 2.0)])
    states = constraint.advance(constraint.begin(4, CPU).view(2, 2), torch.tensor([[0, 1], [2, 0]]))
    boosts = constraint.boosts(states, LOGPROBS, is_end=False)
    assert boosts[..., 1].tolist() == [[1.0, 0.0], [0.0, 1.0]]  # the second half of the phrase
    assert boosts[..., 0].tolist() == [[0.0, 1.0], [1.0, 0.0]]  # it begins anew, or begins
    assert boosts[..., 2].tolist() == [[-1.0, 0.0], [0.0, -1.0]]  # it does not go on
    parents, tokens = torch.tensor([[1, 0, 1], [0, 1, 1]]), torch.tensor([[0, 1, 2], [0, 0, 1]])
    assert constraint.pending(states, parents, tokens).tolist() == [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]


def test_boosts_of_equal_phrases_are_one_batch() -> None:
    one, other = (PhraseBoostConstraint.of([([1, 2], 2.0), ([[3], [4]], -1)]) for _ in range(2))
    for equal in (other, PhraseBoostConstraint(one.phrases), pickle.loads(pickle.dumps(one))):
        assert one == equal
        assert hash(one) == hash(equal)
    assert one != PhraseBoostConstraint.of([([1, 2], 2.5), ([[3], [4]], -1)])


@given(st.lists(phrase, min_size=1, max_size=6))
def test_tables_take_no_more_than_is_said_before_they_are_made(phrases: list[tuple[list[list[int]], float]]) -> None:
    constraint = PhraseBoostConstraint.of(phrases)
    tables = constraint.on({}, ())._tables(CPU)
    on_device = sum(table.nbytes for table in tables)
    assert on_device <= constraint.num_bytes <= most_constraint_bytes(way for ways, _ in phrases for way in ways)


def test_tables_lie_on_a_device_as_long_as_rows_carry_states_under_them() -> None:
    """Whoever says which phrases there are, once more in each step, holds none."""
    said = PhraseBoostConstraint.of([([1, 2], 2.0)])
    carried = said.on({}, ())
    states = {carried: carried.begin(2, CPU)}
    assert carried.boosts(states[carried], LOGPROBS, is_end=False).max() > 0
    table = ref(carried._tables(CPU).suffixes)
    assert all(said.on({}, ()) is carried for said in (said, carried, pickle.loads(pickle.dumps(said))))
    assert not said._on_devices
    del carried, states
    assert table() is None
    size = len(_known)
    del said
    assert len(_known) == size - 1


def test_automata_stay_on_the_host_as_far_as_their_bytes_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal phrases come with request after request, and nobody holds them in between."""
    one, other, long = [([1, 2], 2.0)], [([3, 1], 2.0)], [(list(range(100)), 1.0)]

    def automaton(phrases: list[tuple[list[int], float]]) -> Any:
        return PhraseBoostConstraint.of(phrases).automaton

    monkeypatch.setattr(phrase_boosts, "_automata", SearchCache(3000))
    of_one, of_other = automaton(one), automaton(other)
    assert automaton(one) is of_one
    assert automaton(other) is of_other
    automaton(long)
    assert automaton(one) is not of_one


class Watched(tuple):  # type: ignore[type-arg]
    """Phrases that count how often they are looked through."""

    num_looks = 0

    def __hash__(self) -> int:
        Watched.num_looks += 1
        return super().__hash__()


def test_steps_look_phrases_up_without_a_look_through_them() -> None:
    constraint = PhraseBoostConstraint(Watched(PhraseBoostConstraint.of([([0, 1], 2.0), ([3], 1.0)]).phrases))
    states, looks = {constraint: constraint.begin(2, CPU)}, []
    for _ in range(3):
        assert constraint.boosts(states[constraint], LOGPROBS, is_end=False).max() <= constraint.most_boost
        states = {constraint: constraint.advance(states[constraint], torch.tensor([[0, 1]]))}
        looks.append(Watched.num_looks)
    assert looks[-1] == looks[0]
