"""Rows of the block trie always read back what they wrote, and every block is free or held once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.support.walks import NUM_WALKS, OPERATIONS, walks
from vllm_trie.search.rank import choose_search_slots as choose_children
from vllm_trie.trie.blocks import BlockTrie, TrieBlockCounts, trie_fan_out_blocks

MOST_TOKENS = 60  # per row; then the group ends and another begins with its blocks
POISON = -1


class Memory:
    """An allocator and the content of its blocks, which is poisoned as soon as a block is given back."""

    def __init__(self, block_size: int, choose: random.Random) -> None:
        self.block_size = block_size
        self.choose = choose
        self.content: list[list[int]] = []
        self.free: set[int] = set()
        self.held: set[int] = set()

    def allocate(self, count: int) -> list[int]:
        while len(self.free) < count:
            self.free.add(len(self.content))
            self.content.append([POISON] * self.block_size)
        blocks = self.choose.sample(sorted(self.free), count)
        self.free.difference_update(blocks)
        self.held.update(blocks)
        return blocks

    def give_back(self, blocks: list[int]) -> None:
        assert len(set(blocks)) == len(blocks), "given back twice"
        assert self.held.issuperset(blocks), "given back what was not held"
        self.held.difference_update(blocks)
        self.free.update(blocks)
        for block in blocks:
            self.content[block] = [POISON] * self.block_size

    def write(self, blocks: list[int], position: int, token: int) -> None:
        self.content[blocks[position // self.block_size]][position % self.block_size] = token

    def read(self, blocks: list[int]) -> list[int]:
        return [token for block in blocks for token in self.content[block]]

    def copy(self, copies: np.ndarray) -> None:
        assert copies.shape == (len(copies), 2)
        sources, destinations = ({*column} for column in copies.T.tolist())
        assert sources.isdisjoint(destinations), "the order of the copies matters"
        assert len(destinations) == len(copies)
        for source, destination in self.choose.sample(copies.tolist(), len(copies)):
            self.content[destination] = self.content[source].copy()


class ModelledGroup:
    """A block trie beside the naive truth: every row's whole history, and the memory it lives in."""

    def __init__(self, choose: random.Random, block_size: int, width: int) -> None:
        self.choose = choose
        self.width = width
        self.memory = Memory(block_size, choose)
        self.num_written = 0
        self.seen: tuple[BlockTrie | None, int, int] = None, 0, 0
        self.begin()

    def begin(self) -> None:
        num_tokens = self.choose.randrange(4 * self.memory.block_size)
        skipped = self.choose.randint(0, num_tokens // self.memory.block_size) if self.choose.random() < 0.2 else 0
        held = self.memory.allocate(-(-num_tokens // self.memory.block_size) - skipped)
        self.trie = BlockTrie(self.memory.block_size, [POISON] * skipped + held, num_tokens, skipped)
        self.histories: list[list[int]] = [[]]
        self.counts = TrieBlockCounts()
        for _ in range(num_tokens):
            self.write_one_token()

    def write_one_token(self) -> None:
        for row, history in enumerate(self.histories):
            self.write(row, len(history), self.num_written)
            history.append(self.num_written)
            self.num_written += 1

    def partly_filled(self) -> bool:
        return len(self.histories[0]) % self.memory.block_size > 0

    def live(self) -> set[int]:
        return {block for row in range(self.trie.width) for block in self.trie.row_blocks(row)}

    def fan_out(self) -> None:
        """Into rows some of which go on together for a while: a key is the history that ends there."""
        (prefix,) = self.histories
        paths: list[list[int]] = [[] for _ in range(self.width)]
        tokens: dict[tuple[int, ...], int] = {}
        together = self.choose.randrange(2 * self.memory.block_size + 1)
        for place in range(together + 1):
            for row, path in enumerate(paths):
                branch = self.choose.randrange(2) if place < together else row
                path.append(tokens.setdefault((*path, branch), self.num_written + len(tokens)))
        self.num_written += len(tokens)
        needed = trie_fan_out_blocks(len(prefix), np.array(paths), self.memory.block_size)
        copies = self.trie.fan_out(np.array(paths), self.memory.allocate(needed))
        self.memory.copy(copies)
        self.counts.copied += len(copies)
        self.histories = [prefix + path for path in paths]
        for row, history in enumerate(self.histories):
            for position in range(len(prefix), len(history)):
                self.write(row, position, history[position])
        assert self.trie.num_live_blocks == len(self.distinct_blocks())

    def distinct_blocks(self) -> set[tuple[int, ...]]:
        """What the least number of blocks has to hold after it fans out: full ones by their history, tails by row."""
        size, length = self.memory.block_size, len(self.histories[0])
        ends = range((self.trie.num_skipped + 1) * size, length + 1, size)
        full = {tuple(history[:end]) for history in self.histories for end in ends}
        return full | {(-1, row) for row in range(self.trie.width) if length % size}

    def write(self, row: int, position: int, token: int) -> None:
        in_window = position - self.trie.num_skipped * self.memory.block_size
        if in_window >= 0:
            self.memory.write(self.trie.row_blocks(row), in_window, token)

    def skip(self) -> None:
        num_full = len(self.histories[0]) // self.memory.block_size
        self.trie.skip(self.choose.randint(0, num_full))

    def grow(self) -> None:
        assert self.trie.blocks_to_grow() == (0 if self.partly_filled() else self.trie.width)
        self.trie.grow(self.memory.allocate(self.trie.blocks_to_grow()))
        self.write_one_token()

    def fork(self) -> None:
        parents = random_parents(self.choose, self.trie.width)
        self.copy_tails(parents)
        self.trie.fork(parents)

    def fork_late(self) -> None:
        """As where a step is on its way before the last one's result is known: grow, fork, write, and then be told."""
        num_tokens = len(self.histories[0])
        parents = random_parents(self.choose, self.trie.width)
        self.trie.grow(self.memory.allocate(self.trie.blocks_to_grow()))
        self.copy_tails(parents)
        self.write_one_token()
        self.trie.fork(parents, num_tokens)

    def copy_tails(self, parents: np.ndarray) -> None:
        """As the worker does in a fork of rows; and the rows' histories fork."""
        at = len(self.histories[0]) // self.memory.block_size - self.trie.num_skipped
        forks = [(parent, slot) for slot, parent in enumerate(parents.tolist()) if slot != parent]
        copies = [[self.trie.row_blocks(row)[at] for row in fork] for fork in forks if self.partly_filled()]
        self.memory.copy(np.array(copies, np.int32).reshape(-1, 2))
        self.counts.copied += len(copies)
        self.counts.shared += len(forks) * at
        self.histories = [self.histories[parent].copy() for parent in parents]

    def reclaim(self) -> None:
        blocks = self.trie.reclaim()
        assert set(blocks) == self.memory.held - self.live()
        self.counts.reclaimed += len(blocks)
        self.memory.give_back(blocks)

    def end(self) -> None:
        self.memory.give_back(self.trie.release())
        assert not self.memory.held
        assert self.trie.num_live_blocks == self.trie.num_held == 0
        self.trie.check_invariants()

    def start_anew(self) -> None:
        self.end()
        self.begin()

    def operate(self, seed: int) -> None:
        self.choose.seed(seed)
        if len(self.histories[0]) >= MOST_TOKENS or self.choose.random() < 0.01:
            operation = self.start_anew
        elif self.trie.width == 1 and self.choose.random() < 0.5:
            operation = self.fan_out
        else:
            operation = self.choose.choices(
                [self.grow, self.fork, self.fork_late, self.reclaim, self.skip], [50, 50, 50, 10, 1]
            )[0]
        note(operation.__name__)
        operation()

    def check(self) -> None:
        self.trie.check_invariants()
        self.check_common()
        for row, history in enumerate(self.histories):
            in_window = history[self.trie.num_skipped * self.memory.block_size :]
            assert self.memory.read(self.trie.row_blocks(row))[: len(in_window)] == in_window
        assert self.trie.num_live_blocks == len(self.live())
        assert self.trie.num_held == len(self.memory.held)
        table = [self.trie.row_blocks(row) for row in range(self.trie.width)]
        assert self.trie.table().tolist() == table
        assert self.trie.counts == self.counts

    def check_common(self) -> None:
        """What is known to be shared is; where blocks have just joined the trie, all that is shared is known."""
        rows = [self.trie.row_blocks(row) for row in range(self.trie.width)]
        num_common, (trie, num_sealed, known) = self.trie.num_common(), self.seen
        num_skipped = self.trie.num_skipped
        held = max(num_common - num_skipped, 0)
        assert all(row[:held] == rows[0][:held] for row in rows)
        self.seen = self.trie, self.trie.num_sealed, num_common
        if trie is not self.trie or num_sealed < self.trie.num_sealed:
            full = zip(*(row[: self.trie.num_sealed - num_skipped] for row in rows), strict=True)
            assert held == sum(len(set(blocks)) == 1 for blocks in full)
        else:
            assert num_common == known


def random_parents(choose: random.Random, width: int) -> np.ndarray:
    """By slot, as the search assigns them."""
    children = torch.tensor([[choose.randrange(width) for _ in range(width)]])
    chosen = choose_children(children, torch.ones_like(children, dtype=torch.bool), width)
    return children.gather(1, chosen)[0].numpy()


def test_every_row_reads_back_its_own_history() -> None:
    operations = 0

    @settings(max_examples=NUM_WALKS, derandomize=True)
    @given(block_size=st.integers(1, 6), width=st.integers(1, 8), start=st.integers(0, 1 << 16), seeds=walks())
    def walk(block_size: int, width: int, start: int, seeds: list[int]) -> None:
        nonlocal operations
        group = ModelledGroup(random.Random(start), block_size, width)
        for seed in seeds:
            group.operate(seed)
            group.check()
        group.end()
        operations += len(seeds)

    walk()
    assert operations >= OPERATIONS


def test_forked_row_never_writes_its_parents_block() -> None:
    trie = three_rows()
    trie.fork(np.array([0, 0, 2]))
    trie.grow([])
    assert len({trie.row_blocks(row)[-1] for row in range(3)}) == 3


def test_fork_takes_no_block_and_copies_only_the_tail() -> None:
    trie = three_rows()
    before, child_tail = trie.row_blocks(0), trie.row_blocks(1)[-1]
    trie.fork(np.array([0, 0, 2]))
    assert trie.counts == TrieBlockCounts(shared=2, copied=1)
    assert trie.row_blocks(1) == [*before[:-1], child_tail]
    assert trie.num_held == 7


def test_block_no_row_leads_to_is_reclaimed_once() -> None:
    trie = three_rows()
    lost = trie.row_blocks(1)[1]
    trie.fork(np.array([0, 0, 2]))
    assert trie.reclaim() == [lost]
    assert trie.reclaim() == []


def test_release_gives_the_prompt_back_last() -> None:
    assert three_rows().release()[-1] == 10


def test_rows_that_fan_out_share_the_blocks_of_their_common_history() -> None:
    trie = BlockTrie(2, [10, 11], 3)
    paths = np.array([[3, 4, 5, 6], [3, 4, 5, 7], [3, 8, 9, 10]])
    assert trie_fan_out_blocks(3, paths, 2) == 5
    assert trie.fan_out(paths, [12, 13, 14, 15, 16]).tolist() == []
    assert [trie.row_blocks(row) for row in range(3)] == [[10, 11, 12, 14], [10, 11, 12, 15], [10, 11, 13, 16]]


def test_blocks_that_left_the_window_are_reclaimed_and_the_rest_stays() -> None:
    trie = three_rows()
    before = [trie.row_blocks(row) for row in range(3)]
    trie.skip(1)
    assert trie.reclaim() == [10]
    assert [trie.row_blocks(row) for row in range(3)] == [blocks[1:] for blocks in before]
    trie.skip(2)
    assert sorted(trie.reclaim()) == [11, 12, 13]
    trie.check_invariants()


def test_prefix_must_fit_its_tokens() -> None:
    with pytest.raises(ValueError, match="1 blocks of 2 do not hold 3 tokens"):
        BlockTrie(2, [10], 3)


def three_rows() -> BlockTrie:
    """Prompt block 10, then one full block and a half-full tail per row."""
    trie = BlockTrie(2, [10], 2)
    trie.fan_out(np.arange(3)[:, None], [11, 12, 13])
    trie.grow([])
    trie.fork(np.arange(3))
    trie.grow([14, 15, 16])
    return trie


@pytest.mark.parametrize(
    ("corrupt", "complaint"),
    [
        pytest.param(lambda trie: trie._table.__setitem__((1, 1), 14), "two rows write", id="shared-tail"),
        pytest.param(lambda trie: trie._table.__setitem__((1, 0), 14), "two depths", id="full-block-is-a-tail"),
        pytest.param(lambda trie: trie._table.__setitem__((0, 1), 99), "not held", id="tail-not-held"),
        pytest.param(lambda trie: trie._table.__setitem__((0, 0), 12), "no row leads to", id="block-lost"),
        pytest.param(lambda trie: setattr(trie, "_held", trie._held[1:]), "not held", id="live-block-reclaimed"),
        pytest.param(lambda trie: setattr(trie, "_held", np.append(trie._held, 10)), "held twice", id="prompt-twice"),
        pytest.param(lambda trie: setattr(trie, "_held", np.append(trie._held, 99)), "no row leads to", id="leaked"),
        pytest.param(lambda trie: setattr(trie, "_table", trie._table[:, :1]), "1 columns at 5", id="tails-lost"),
        pytest.param(lambda trie: setattr(trie, "_table", trie._table[:2]), "no row leads to", id="row-lost"),
        pytest.param(lambda trie: setattr(trie, "num_sealed", 4), "3 of 2 columns are full", id="beyond-the-end"),
        pytest.param(lambda trie: setattr(trie, "num_sealed", 0), "-1 of 2 columns are full", id="prompt-not-full"),
        pytest.param(lambda trie: trie._common.clear(), "columns at 5 tokens", id="prompt-released"),
    ],
)
def test_invariants_see_a_corrupt_trie(corrupt: Callable[[BlockTrie], None], complaint: str) -> None:
    trie = three_rows()
    trie.check_invariants()
    corrupt(trie)
    with pytest.raises(AssertionError, match=complaint):
        trie.check_invariants()


def test_invariants_see_a_block_that_follows_two_others() -> None:
    trie = three_rows()
    trie.grow([])
    trie.fork(np.array([0, 0, 2]))
    trie.reclaim()
    trie.check_invariants()
    trie._table[0, 0] = trie._table[2, 0]
    with pytest.raises(AssertionError, match="follows two others"):
        trie.check_invariants()


def test_a_fork_is_searched_for_dead_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = three_rows()
    trie.fork(np.arange(3))
    monkeypatch.setattr(trie, "_are_live", None)
    assert trie.reclaim() == []
