"""The hypothesis trie answers what plain lists of tokens answer, and keeps no node that leads nowhere."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.support.walks import NUM_WALKS, OPERATIONS, walks
from vllm_trie.trie import hypotheses
from vllm_trie.trie.hypotheses import ROOT, HypothesisTrie, Node
from vllm_trie.trie.leaves import Notes


class Token(NamedTuple):
    """One token of the model. The serial number tells equal tokens of different steps apart; it is the token's note."""

    serial: int
    token: int
    logprob: float


History = list[Token]


def finished(trie: HypothesisTrie, row: int, token: int, score: float) -> int:
    """Finish one hypothesis."""
    (leaf,) = trie.finish([row], [token], [score])
    return leaf


def advance(trie: HypothesisTrie, parents: list[int], tokens: list[int], notes: Notes = ()) -> None:
    trie.advance(np.array(parents), np.array(tokens), -np.arange(1.0, len(parents) + 1), notes)


class ModelledTrie:
    """A trie beside the naive truth: the whole list of tokens of every row and finished hypothesis.

    Every other one is looked through in every step for what leads nowhere. One carries notes, or does not.
    """

    def __init__(self, choose: random.Random, width: int) -> None:
        self.choose = choose
        self.width = width
        self.trie = HypothesisTrie()
        self.prunes, self.has_notes = choose.random() < 0.5, choose.random() < 0.5
        self.rows: list[History] = [[]]
        self.finished: dict[int, History] = {}
        self.num_tokens = self.num_finished = self.common = 0

    def new_token(self) -> Token:
        self.num_tokens += 1
        return Token(self.num_tokens, self.choose.randrange(5), -self.choose.randrange(512) / 64)

    def notes(self, new: list[Token]) -> Notes:
        serials = np.array([token.serial for token in new])
        return (serials, np.stack([serials, -serials], axis=1)) if self.has_notes else ()

    def live(self) -> set[Token]:
        return {token for history in (*self.rows, *self.finished.values()) for token in history}

    def advance(self) -> None:
        width = self.width if self.choose.random() < 0.9 else self.choose.randint(1, 2 * self.width)
        parents = [self.choose.randrange(len(self.rows)) for _ in range(width)]
        new = [self.new_token() for _ in parents]
        self.rows = [[*self.rows[parent], token] for parent, token in zip(parents, new, strict=True)]
        scores = np.array([total_logprob(row) for row in self.rows])
        self.trie.advance(np.array(parents), np.array([token.token for token in new]), scores, self.notes(new))
        assert not self.prunes or self.trie.num_nodes == len(self.live())

    def finish(self) -> None:
        rows = [self.choose.randrange(len(self.rows)) for _ in range(self.choose.randint(1, 2))]
        histories = [[*self.rows[row], self.new_token()] for row in rows]
        new = [history[-1] for history in histories]
        sums = [total_logprob(history) for history in histories]
        leaves = self.trie.finish(rows, [token.token for token in new], sums, self.notes(new)).tolist()
        assert leaves == [self.num_finished + number for number in range(len(rows))]
        self.num_finished += len(rows)
        self.finished.update(zip(leaves, histories, strict=True))

    def drop(self) -> None:
        if self.finished:
            leaf = self.choose.choice(list(self.finished))
            del self.finished[leaf]
            self.trie.drop([leaf])

    def operate(self, seed: int) -> None:
        self.choose.seed(seed)
        few = len(self.finished) < 2 * self.width
        options = [self.advance, self.advance, self.finish if few else self.drop, self.drop]
        operation = self.choose.choice(options)
        note(operation.__name__)
        operation()

    def held(self) -> list[tuple[int, History]]:
        return [*((~row, history) for row, history in enumerate(self.rows)), *self.finished.items()]

    def check(self) -> None:
        self.trie.check_invariants()
        assert (self.trie.length, self.trie.width) == (len(self.rows[0]), len(self.rows))
        assert self.trie.num_nodes >= len(self.live())
        some = self.choose.choices(self.held(), k=2)
        self.choose.choice([lambda: self.check_reads_back(some), self.check_rows, self.check_common])()

    def check_reads_back(self, some: list[tuple[int, History]]) -> None:
        leaves, histories = zip(*some, strict=True)
        assert self.trie.tokens(leaves) == [[token.token for token in history] for history in histories]
        assert self.trie.scores(leaves).tolist() == [total_logprob(history) for history in histories]
        self.check_notes(self.trie.notes(leaves), [token for history in histories for token in history])

    def check_notes(self, notes: Notes, tokens: History) -> None:
        serials = [token.serial for token in tokens]
        if self.has_notes and tokens:
            assert [field.tolist() for field in notes] == [serials, [[serial, -serial] for serial in serials]]
        else:
            assert not any(map(len, notes))

    def check_rows(self) -> None:
        """Whole tables of all rows: tokens, scores, and keys that are equal where histories are."""
        assert self.trie.histories().tolist() == [[token.token for token in row] for row in self.rows]
        assert self.trie.row_scores().tolist() == [total_logprob(row) for row in self.rows]
        if self.rows[0]:
            assert self.trie.row_tokens().tolist() == [row[-1].token for row in self.rows]
        start = self.choose.randint(0, len(self.rows[0]))
        keys = self.trie.ancestors(start)
        assert keys.shape == (len(self.rows), len(self.rows[0]) - start)
        for of_rows, tokens in zip(keys.T.tolist(), [*zip(*self.rows, strict=True)][start:], strict=True):
            assert len({*of_rows}) == len({*tokens}) == len({*zip(of_rows, tokens, strict=True)})

    def check_common(self) -> None:
        """From what was common before on, the trie finds what histories begin with that some rows and one end have."""
        live = sorted(self.choose.sample(range(len(self.rows)), self.choose.randint(1, len(self.rows))))
        leaf = self.choose.choice([None, *self.finished])
        histories = [self.rows[row] for row in live] + ([] if leaf is None else [self.finished[leaf][:-1]])
        num_common = num_equal(histories)
        known = min(num_equal([*self.rows, *(history[:-1] for history in self.finished.values())]), num_common)
        start = self.choose.choice([min(self.common, known), self.choose.randint(0, known)])
        node = self.trie.deepest_common(start, np.array(live), leaf)
        if num_common == start:
            assert node is None
            return
        assert node is not None
        assert node.length == num_common
        self.common = known
        tokens = histories[0][start:num_common]
        assert self.trie.tokens_between(start, node) == [token.token for token in tokens]
        assert self.trie.score_at(node) == total_logprob(histories[0][:num_common])
        self.check_notes(self.trie.notes_between(start, node), tokens)

    def end(self) -> None:
        self.check_reads_back(self.held())
        self.trie.drop([*self.finished])
        self.trie._prune()
        self.trie.check_invariants()
        assert self.trie.num_nodes == len({token for row in self.rows for token in row})


def total_logprob(history: History) -> float:
    return sum(token.logprob for token in history)  # exact, in float32, too: multiples of 1/64


def num_equal(histories: list[History]) -> int:
    return len([*takewhile(lambda column: len(set(column)) == 1, zip(*histories, strict=False))])


class AlwaysPruned(HypothesisTrie):
    def advance(self, *args: object) -> None:
        super().advance(*args)
        self._prune()


def test_trie_answers_what_plain_lists_answer() -> None:
    operations = 0

    @settings(max_examples=NUM_WALKS, derandomize=True)
    @given(width=st.integers(1, 8), start=st.integers(0, 1 << 16), seeds=walks())
    def walk(width: int, start: int, seeds: list[int]) -> None:
        nonlocal operations
        modelled = ModelledTrie(random.Random(start), width)
        if modelled.prunes:
            modelled.trie = AlwaysPruned()
        for seed in seeds:
            modelled.operate(seed)
            modelled.check()
        modelled.end()
        operations += len(seeds)

    walk()
    assert operations >= OPERATIONS


def test_what_leads_nowhere_is_left_out_where_steps_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypotheses, "SPARE_BYTES", 2_000)
    trie, most = HypothesisTrie(), 0
    trie._most_bytes = 2_000
    leaf = finished(trie, 0, 7, -1.0)
    for step in range(1000):
        advance(trie, [0] * 8, [step + row for row in range(8)])
        most = max(most, trie.num_nodes - step)  # of each step one is needed
        if step == 500:
            leaf = finished(trie, 5, 9, -2.0)
    assert 8 < most < 1200
    assert trie.tokens([leaf, ~3]) == [[*range(500), 505, 9], [*range(999), 1002]]
    trie.check_invariants()


def test_a_common_prefix_is_found_without_a_walk_back_where_none_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, rows = three_rows(), np.arange(3)
    leaf = finished(trie, 1, 9, -4.0)
    assert trie.deepest_common(0, rows, leaf) is None
    for _ in range(100):
        advance(trie, [0, 1, 2], [4, 5, 6])
    assert trie.deepest_common(0, rows, leaf) is None
    monkeypatch.setattr(trie, "_steps", [*[None] * 101, trie._steps[-1]][1:])  # no earlier one is looked at
    advance(trie, [1, 1, 0], [4, 5, 6])
    assert trie.deepest_common(0, rows, leaf) is None


def test_a_finished_hypothesis_holds_back_what_rows_have_in_common() -> None:
    trie, rows = three_rows(), np.arange(3)
    leaf = finished(trie, 1, 9, -4.0)
    advance(trie, [0, 0, 0], [4, 5, 6])
    assert trie.deepest_common(0, rows, leaf) is None
    assert trie.deepest_common(0, rows) == Node(1, 0)
    advance(trie, [2, 2, 2], [7, 8, 9])
    assert trie.deepest_common(1, rows) == Node(2, 2)
    assert trie.deepest_common(2, np.array([1])) == Node(3, 1)


def test_finished_hypothesis_survives_its_row() -> None:
    trie = AlwaysPruned()
    advance(trie, [0, 0, 0], [1, 2, 3])
    leaf = finished(trie, 2, 9, -4.0)
    advance(trie, [0, 0, 1], [4, 5, 6])
    advance(trie, [0, 0, 0], [4, 5, 6])
    assert trie.tokens([leaf]) == [[3, 9]]
    assert trie.num_nodes == 3 + 1 + 2 + 1
    trie.check_invariants()


def test_dropped_hypothesis_leaves_its_prefix_to_the_row() -> None:
    trie = three_rows()
    trie.drop([finished(trie, 1, 9, -4.0)])
    assert trie.histories().tolist() == [[1], [2], [3]]
    assert trie.num_nodes == 3


def test_hypotheses_that_end_with_their_first_token_follow_the_prompt() -> None:
    trie = HypothesisTrie()
    leaves = trie.finish([0, 0], [8, 9], [-1.0, -2.0], (np.array([3, 4]),))
    assert trie.tokens([*leaves, ~0]) == [[8], [9], []]
    assert [trie.parent(leaf) for leaf in leaves] == [ROOT, ROOT]
    assert trie.notes(leaves)[0].tolist() == [3, 4]


class Note:
    """Something that can be seen to go away."""


def test_note_goes_with_the_last_node_that_carries_it() -> None:
    trie = AlwaysPruned()
    of_step, of_end = Note(), Note()
    advance(trie, [0, 0, 0], [1, 2, 3], (np.array([None, of_step, None]),))
    (leaf,) = trie.finish([1], [9], [-7.0], (np.array([of_end]),))
    seen_step, seen_end = weakref.ref(of_step), weakref.ref(of_end)
    del of_step, of_end
    advance(trie, [2, 2, 2], [7, 8, 9], (np.array([None, None, None]),))
    gc.collect()
    assert None not in (seen_step(), seen_end())
    assert trie.notes([leaf])[0].tolist() == [seen_step(), seen_end()]
    trie.drop([leaf])
    advance(trie, [0, 0, 0], [7, 8, 9], (np.array([None, None, None]),))
    gc.collect()
    assert (seen_step(), seen_end()) == (None, None)


def test_a_step_does_not_keep_what_its_arrays_were_cut_out_of() -> None:
    trie, message = HypothesisTrie(), np.zeros((4, 1000), np.int32)
    trie.advance(message[0, :3], message[1, :3], message[2, :3].view(np.float32))
    message[:] = 7
    assert trie.histories().tolist() == [[0], [0], [0]]
    assert all(field.base is None for field in trie._steps[0][:3])


def three_rows() -> HypothesisTrie:
    trie = HypothesisTrie()
    advance(trie, [0, 0, 0], [1, 2, 3])
    return trie


def replace_step(trie: HypothesisTrie, **fields: np.ndarray) -> None:
    trie._steps[-1] = trie._steps[-1]._replace(**fields)


def replace_leaf(trie: HypothesisTrie, parent: Node) -> None:
    trie._finished = trie._finished._replace(parents=np.array([parent]))


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        pytest.param(lambda t: replace_step(t, tokens=t._steps[-1].tokens[:2]), "fields of {2, 3} rows", id="row-lost"),
        pytest.param(lambda t: replace_step(t, parents=np.array([0, 3, 1])), "of which there are 3", id="parent-lost"),
        pytest.param(lambda t: replace_step(t, parents=np.array([0, -1, 1])), "of which there are 3", id="no-parent"),
        pytest.param(lambda t: t._steps.pop(0), "of which there are 1", id="step-lost"),
        pytest.param(lambda t: replace_leaf(t, Node(3, 0)), "longer than the search", id="leaf-too-long"),
        pytest.param(lambda t: replace_leaf(t, Node(1, 3)), "row 3 of 3", id="parent-of-leaf-lost"),
        pytest.param(lambda t: setattr(t, "_num_finished", 0), "hypothesis 0 of 0", id="leaf-unknown"),
        pytest.param(lambda t: setattr(t, "_num_bytes", 0), "counted wrong", id="bytes"),
    ],
)
def test_invariants_see_a_corrupt_trie(corrupt: Callable[[HypothesisTrie], None], complaint: str) -> None:
    trie = three_rows()
    finished(trie, 2, 9, -4.0)
    advance(trie, [0, 0, 1], [4, 5, 6])
    trie.check_invariants()
    corrupt(trie)
    with pytest.raises(AssertionError, match=complaint):
        trie.check_invariants()
