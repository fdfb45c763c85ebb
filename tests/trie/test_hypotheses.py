"""The hypothesis trie answers what plain lists of tokens answer, and leaks no node."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.support.walks import NUM_WALKS, OPERATIONS, walks
from vllm_trie.trie.hypotheses import ROOT, HypothesisTrie


class Token(NamedTuple):
    """One token of the model. The serial number tells equal tokens of different steps apart."""

    serial: int
    token: int
    logprob: float
    note: object


def finished(trie: HypothesisTrie, row: int, token: int, score: float, note: Any = None) -> int:
    """Keep one hypothesis."""
    (node,) = trie.finish([row], [token], [score], [note])
    return node


class ModelledTrie:
    """A trie beside the naive truth: the whole list of tokens of every row and kept hypothesis."""

    def __init__(self, choose: random.Random, width: int) -> None:
        self.choose = choose
        self.width = width
        self.trie = HypothesisTrie()
        self.rows: list[list[Token]] = [[]]
        self.kept: dict[int, list[Token]] = {}
        self.num_tokens = 0
        self.most_nodes = 0

    def new_token(self, note: object) -> Token:
        self.num_tokens += 1
        return Token(self.num_tokens, self.choose.randrange(5), -self.choose.randrange(512) / 64, note)

    def live(self) -> set[Token]:
        return {token for history in (*self.rows, *self.kept.values()) for token in history}

    def advance(self) -> None:
        width = self.width if self.choose.random() < 0.9 else self.choose.randint(1, 2 * self.width)
        parents = [self.choose.randrange(len(self.rows)) for _ in range(width)]
        notes = [f"step {self.num_tokens}, row {row}" for row in range(len(parents))]
        notes = self.choose.choice([notes, None])
        new = [self.new_token(notes and notes[row]) for row in range(len(parents))]
        before = self.live()
        self.rows = [[*self.rows[parent], token] for parent, token in zip(parents, new, strict=True)]
        self.most_nodes = max(self.most_nodes, len(before) + width)
        self.trie.advance(parents, [token.token for token in new], [total_logprob(row) for row in self.rows], notes)

    def finish(self) -> None:
        row = self.choose.randrange(len(self.rows))
        history = [*self.rows[row], self.new_token(self.choose.choice([None, "finished"]))]
        node = finished(self.trie, row, history[-1].token, total_logprob(history), history[-1].note)
        assert node not in self.kept
        self.kept[node] = history
        self.most_nodes = max(self.most_nodes, len(self.live()))
        assert node <= self.most_nodes, "an unused node was not reused"

    def drop(self) -> None:
        if self.kept:
            node = self.choose.choice(list(self.kept))
            del self.kept[node]
            self.trie.drop(node)

    def operate(self, seed: int) -> None:
        self.choose.seed(seed)
        few_kept = len(self.kept) < 2 * self.width
        options = [self.advance, self.advance, self.finish if few_kept else self.drop, self.drop]
        operation = self.choose.choice(options)
        note(operation.__name__)
        operation()

    def check(self) -> None:
        self.trie.check_invariants()
        assert self.trie.num_nodes == len(self.live())
        held = [*zip(self.trie.rows, self.rows, strict=True), *self.kept.items()]
        node, history = self.choose.choice(held)
        self.check_reads_back(node, history)
        self.check_common(held)

    def check_common(self, held: list[tuple[int, list[Token]]]) -> None:
        """From the root, and from anywhere on the way, the trie finds what all histories begin with."""
        columns = zip(*(history for _, history in held), strict=False)
        num_common = len([*takewhile(lambda column: len(set(column)) == 1, columns)])
        common, history = self.trie.deepest_common(ROOT), self.rows[0]
        assert self.trie.tokens(common) == [token.token for token in history[:num_common]]
        start = common
        for _ in range(self.choose.randint(0, num_common)):
            start = self.trie.parent(start)
        assert self.trie.deepest_common(start) == common
        dead = self.choose.sample(range(len(self.rows)), self.choose.randrange(len(self.rows)))
        live = [[*row] for number, row in enumerate(self.rows) if number not in dead] + [*self.kept.values()]
        columns = zip(*live, strict=False)
        num_of_live = len([*takewhile(lambda column: len(set(column)) == 1, columns)])
        assert self.trie.tokens(self.trie.deepest_common(start, dead)) == [t.token for t in live[0][:num_of_live]]
        num_before = len(self.trie.tokens(start))
        assert self.trie.tokens(self.trie.rows[0], start) == [token.token for token in history[num_before:]]
        assert self.trie.notes(self.trie.rows[0], start) == [token.note for token in history[num_before:]]

    def check_reads_back(self, node: int, history: list[Token]) -> None:
        assert self.trie.tokens(node) == [token.token for token in history]
        assert self.trie.score(node) == total_logprob(history)
        assert self.trie.notes(node) == [token.note for token in history]

    def end(self) -> None:
        for node, history in [*zip(self.trie.rows, self.rows, strict=True), *self.kept.items()]:
            self.check_reads_back(node, history)
        for node in self.kept:
            self.trie.drop(node)
        self.trie.advance([], [], [])
        self.trie.check_invariants()
        assert self.trie.num_nodes == 0


def total_logprob(history: list[Token]) -> float:
    return sum(token.logprob for token in history)  # exact: multiples of 1/64


def test_trie_answers_what_plain_lists_answer() -> None:
    operations = 0

    @settings(max_examples=NUM_WALKS, derandomize=True)
    @given(width=st.integers(1, 8), seeds=walks())
    def walk(width: int, seeds: list[int]) -> None:
        nonlocal operations
        modelled = ModelledTrie(random.Random(0), width)
        for seed in seeds:
            modelled.operate(seed)
            modelled.check()
        modelled.end()
        operations += len(seeds)

    walk()
    assert operations >= OPERATIONS


def test_common_prefix_is_held_once() -> None:
    trie = three_rows()
    for token in range(100):
        trie.advance([0, 0, 0], [token, 7, 8], [-1.0, -2.0, -3.0])
    assert trie.num_nodes == 1 + 99 + 3


def test_finished_hypothesis_survives_its_row() -> None:
    trie = three_rows()
    node = finished(trie, 2, 9, -4.0)
    trie.advance([0, 0, 1], [4, 5, 6], [-5.0, -6.0, -7.0])
    assert trie.tokens(node) == [3, 9]
    trie.check_invariants()


def test_dropped_hypothesis_leaves_its_prefix_to_the_row() -> None:
    trie = three_rows()
    trie.drop(finished(trie, 1, 9, -4.0))
    assert [trie.tokens(row) for row in trie.rows] == [[1], [2], [3]]
    assert trie.num_nodes == 3


def test_only_what_is_asked_for_stays_kept() -> None:
    trie = three_rows()
    nodes = [finished(trie, row, 9, -4.0) for row in range(3)]
    trie.keep_only(nodes[1])
    assert trie.num_nodes == 3 + 1
    assert trie.tokens(nodes[1]) == [2, 9]
    trie.check_invariants()


def test_dropped_node_is_the_next_one_used() -> None:
    trie = three_rows()
    node = finished(trie, 0, 9, -4.0)
    trie.drop(node)
    assert finished(trie, 1, 8, -5.0) == node


def test_notes_go_to_the_new_rows_and_are_none_without() -> None:
    trie = three_rows()
    trie.advance([2, 2, 0], [4, 5, 6], [-4.0, -5.0, -6.0], ["first", "second", "third"])
    assert [trie.notes(row) for row in trie.rows] == [[None, "first"], [None, "second"], [None, "third"]]
    assert trie.notes(finished(trie, 1, 9, -7.0, "end")) == [None, "second", "end"]
    assert trie.notes(finished(trie, 1, 9, -7.0)) == [None, "second", None]


def test_reused_node_does_not_carry_the_note_of_the_one_before() -> None:
    trie = three_rows()
    node = finished(trie, 0, 9, -4.0, "old")
    trie.drop(node)
    assert finished(trie, 1, 8, -5.0) == node
    assert trie.notes(node) == [None, None]


class Note:
    """Something that can be seen to go away."""


def test_note_goes_with_the_last_node_that_carries_it() -> None:
    trie = three_rows()
    of_step, of_end = Note(), Note()
    trie.advance([0, 0, 1], [4, 5, 6], [-4.0, -5.0, -6.0], [None, of_step, None])
    node = finished(trie, 1, 9, -7.0, of_end)
    seen_step, seen_end = weakref.ref(of_step), weakref.ref(of_end)
    del of_step, of_end
    trie.advance([2, 2, 2], [7, 8, 9], [-7.0, -8.0, -9.0])
    gc.collect()
    assert None not in (seen_step(), seen_end())
    assert trie.notes(node) == [None, seen_step(), seen_end()]
    trie.drop(node)
    gc.collect()
    assert (seen_step(), seen_end()) == (None, None)


def three_rows() -> HypothesisTrie:
    trie = HypothesisTrie()
    trie.advance([0, 0, 0], [1, 2, 3], [-1.0, -2.0, -3.0])
    return trie


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        pytest.param(lambda trie: trie._references.__setitem__(trie.rows[0], 2), "2 references held, 1", id="leaked"),
        pytest.param(lambda trie: trie._references.__setitem__(trie.rows[0], 0), "0 references held, 1", id="lost"),
        pytest.param(lambda trie: trie._kept.add(trie.rows[0]), "1 references held, 2", id="kept-unreferenced"),
        pytest.param(lambda trie: trie._unused.append(trie.rows[0]), "was released", id="row-released"),
        pytest.param(lambda trie: trie._unused.append(trie._unused[0]), "released twice", id="released-twice"),
        pytest.param(lambda trie: trie._unused.append(trie._parents[trie.rows[0]]), "outlived", id="parent-released"),
    ],
)
def test_invariants_see_a_corrupt_trie(corrupt: Callable[[HypothesisTrie], None], complaint: str) -> None:
    trie = three_rows()
    trie.advance([0, 0, 1], [4, 5, 6], [-4.0, -5.0, -6.0])
    trie.check_invariants()
    corrupt(trie)
    with pytest.raises(AssertionError, match=complaint):
        trie.check_invariants()


def test_invariants_see_a_node_that_nothing_references() -> None:
    trie = three_rows()
    trie._references[trie.rows.pop()] -= 1
    with pytest.raises(AssertionError, match="leaks"):
        trie.check_invariants()
