"""The block trie: which KV blocks the rows of a beam group share, and which belong to one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from vllm_trie.trie import num_equal_trie_columns

NO_COPIES = np.empty((0, 2), np.int32)


@dataclass
class TrieBlockCounts:
    """Counts of what tries did with blocks."""

    shared: int = 0  # full blocks that forks took over by reference
    copied: int = 0  # tail blocks that forks copied
    reclaimed: int = 0  # blocks returned because no row used them any more
    cached: int = 0  # full blocks beyond the prompt that entered the prefix cache

    def add(self, other: TrieBlockCounts) -> None:
        self.shared += other.shared
        self.copied += other.copied
        self.reclaimed += other.reclaimed
        self.cached += other.cached


def least_trie_blocks(num_prompt_tokens: int, width: int, block_size: int) -> int:
    """The fewest blocks with which `width` rows that read all of their prompt can take a step after it."""
    return num_prompt_tokens // block_size + width


def trie_fan_out_blocks(num_tokens: int, paths: np.ndarray, block_size: int) -> int:
    """New blocks that `BlockTrie.fan_out(paths, ...)` takes from a prefix of `num_tokens` tokens."""
    width, length = paths.shape
    end = num_tokens + length
    count = width if end % block_size else 0
    for block_end in range((num_tokens // block_size + 1) * block_size, end + 1, block_size):
        count += len(np.unique(paths[:, block_end - num_tokens - 1]))
    return count - (num_tokens % block_size > 0)  # one row continues in the prefix's tail


@dataclass
class BlockTrie:
    """The blocks of a group of rows that all hold the same number of tokens.

    A row is a line of a table: full blocks, which other rows may share, then tail blocks that only it has: one that is
    being written, and perhaps one that has become full since the last fork. Rows with the same block in a column have
    the same blocks before it, so the table is a trie; leading columns that are equal in all rows are stored once. In a
    fork a row takes over the full blocks of another and copies a partly filled one, so no row ever writes into a block
    that another row reads. There are no reference counts: `reclaim` looks up which blocks the table no longer has.
    Blocks are numbers here; the caller allocates and frees them.

    With window attention, the first blocks of all rows can be skipped: rows hold only the blocks after them.

    Args:
        block_size: Tokens per block.
        prefix: Blocks of the common prefix, the first row; the last one may be partly filled.
        num_tokens: Tokens of the common prefix.
        num_skipped: How many leading blocks of it are not held.
    """

    holds_tokens: ClassVar = True  # of the rows, not outputs of an encoder

    block_size: int
    prefix: Sequence[int]
    num_tokens: int
    num_skipped: int = 0
    counts: TrieBlockCounts = field(default_factory=TrieBlockCounts)

    def __post_init__(self) -> None:
        full, partial = divmod(self.num_tokens, self.block_size)
        if len(self.prefix) != full + bool(partial):
            raise ValueError(f"{len(self.prefix)} blocks of {self.block_size} do not hold {self.num_tokens} tokens")
        self.num_sealed = full  # leading blocks of each row that others may share, or that are skipped
        self._num_common = self._num_examined = full  # leading blocks of all rows, when so many were sealed
        self._common = [*self.prefix[self.num_skipped : full]]  # those of them that are held
        self._table = np.array([self.prefix[full:]], np.int32)  # [rows, blocks] the blocks after them
        self._held = self._table[0].copy()  # distinct blocks of the table, and dead ones; shallow first
        self._may_have_dead = False
        self.prefix = ()

    @property
    def width(self) -> int:
        return len(self._table)

    @property
    def _num_full(self) -> int:
        """Leading columns of the table that rows may share."""
        return self.num_sealed - self.num_skipped - len(self._common)

    def fan_out(self, paths: np.ndarray, new_blocks: Sequence[int]) -> np.ndarray:
        """Turn one row into many that continue it, and make room for their tokens.

        Args:
            paths: [rows, n] a key per token after the prefix. If two rows have the same key, their histories are equal
                up to that token, and so are their full blocks.
            new_blocks: As many as `trie_fan_out_blocks` returns.

        Returns:
            [copies, 2] source and destination blocks, to be copied before any row writes.
        """
        assert self.width == 1
        assert len(new_blocks) == trie_fan_out_blocks(self.num_tokens, paths, self.block_size)
        start, size, (width, length) = self.num_tokens, self.block_size, paths.shape
        self.num_sealed = start // size
        tail, new = self._table[0, self._num_full :], np.array(new_blocks, np.int32)
        self._held = np.concatenate([self._held, new])
        columns, unused, copies = [np.repeat(self._table[:, : self._num_full], width, axis=0)], [*tail, *new], NO_COPIES
        for block_end in range((start // size + 1) * size, -(-(start + length) // size) * size + 1, size):
            is_full = block_end <= start + length
            owners = _numbered_trie_keys(paths[:, block_end - start - 1]) if is_full else np.arange(width)
            blocks, unused = np.array(unused[: owners.max() + 1], np.int32), unused[owners.max() + 1 :]
            columns.append(blocks[owners][:, None])
            if len(tail) and len(columns) == 2:  # the first row continues in the tail itself
                copies = np.column_stack([np.repeat(tail, len(blocks) - 1), blocks[1:]])
        self._table = np.hstack(columns)
        self.num_tokens = start + length
        self.num_sealed = self.num_tokens // size
        self.counts.copied += len(copies)
        return copies

    def blocks_to_grow(self) -> int:
        """New blocks that `grow` needs: one per row at a block boundary, otherwise none."""
        return 0 if self.num_tokens % self.block_size else self.width

    def grow(self, new_blocks: Sequence[int]) -> None:
        """Make room for one more token in every row."""
        assert len(new_blocks) == self.blocks_to_grow()
        self.num_tokens += 1
        if len(new_blocks):
            new = np.array(new_blocks, np.int32)
            self._table = np.hstack([self._table, new[:, None]])
            self._held = np.concatenate([self._held, new])

    def fork(self, parents: np.ndarray, num_tokens: int | None = None) -> None:
        """Let every row d continue the history of row `parents[d]`, and count the tails that are copied for it.

        A row that is a parent must be its own parent (`choose_next_search_beams` ensures it), so copies only read from
        surviving rows and write to dead ones.

        Args:
            parents: [rows].
            num_tokens: Tokens of the rows when they forked, if they have grown since; further blocks stay with their
                rows.
        """
        width = len(self._table)
        assert len(parents) == width
        full, partial = divmod(self.num_tokens if num_tokens is None else num_tokens, self.block_size)
        self.num_sealed = max(self.num_sealed, full)
        (moved,), num_full = (parents != np.arange(width)).nonzero(), self._num_full
        self.counts.shared += len(moved) * (self.num_sealed - self.num_skipped)
        self.counts.copied += len(moved) if partial else 0
        if num_full and len(moved):
            self._table[moved, :num_full] = self._table[parents[moved], :num_full]
            self._may_have_dead = True

    def skip(self, num_blocks: int) -> None:
        """Stop holding the first `num_blocks` blocks of the rows, as far as rows may share them."""
        num_blocks = min(num_blocks, self.num_sealed)
        num_gone = num_blocks - self.num_skipped
        if num_gone <= 0:
            return
        gone, self._common = self._common[:num_gone], self._common[num_gone:]
        self._held = np.concatenate([np.array(gone, np.int32), self._held])
        self._table = self._table[:, num_gone - len(gone) :]
        self.num_skipped = num_blocks
        self._may_have_dead = True

    def num_common(self) -> int:
        """How many leading blocks all rows are known to share, including skipped ones.

        It never decreases. It is computed again whenever rows may share more.
        """
        if self._num_examined < self.num_sealed:
            self._num_examined = self.num_sealed
            full = self._table[:, : self._num_full]
            num_new = num_equal_trie_columns(full)
            self._num_common = self.num_sealed - full.shape[1] + num_new
            new = full[0, :num_new]
            self._held = self._held[~np.isin(self._held, new)]
            self._common += new.tolist()
            self._table = self._table[:, num_new:]
        return self._num_common

    def reclaim(self) -> list[int]:
        """Give up and return the blocks that no row uses, deepest first."""
        if not self._may_have_dead:
            return []
        self._may_have_dead = False
        are_live = self._are_live()
        dead, self._held = self._held[~are_live], self._held[are_live]
        self.counts.reclaimed += len(dead)
        return dead[::-1].tolist()

    def _are_live(self) -> np.ndarray:
        """[held] bool, whether a row uses the block."""
        in_table = np.zeros(self._held.max(initial=0) + 1, np.bool_)
        in_table[self._table] = True
        return in_table[self._held]

    def release(self) -> list[int]:
        """Drop all rows. Returns all blocks, deepest first, so that the prompt is evicted last."""
        blocks = self.reclaim() + self._held[::-1].tolist() + self._common[::-1]
        self._common, self._held = [], self._held[:0]
        self._table = np.empty((0, 0), np.int32)
        return blocks

    def row_blocks(self, row: int) -> list[int]:
        """The blocks of one row, first to last, including its tails."""
        return self._common + self._table[row].tolist()

    def table(self) -> np.ndarray:
        """[rows, blocks] int32: `row_blocks` of all rows."""
        common = np.array(self._common, np.int32)
        return np.hstack([np.broadcast_to(common, (self.width, len(common))), self._table])

    @property
    def num_held(self) -> int:
        """Blocks that are held, including those that no row uses."""
        return len(self._common) + len(self._held)

    @property
    def num_live_blocks(self) -> int:
        """Distinct blocks that some row uses: the fewest that any sharing scheme could hold."""
        return len(self._common) + int(np.count_nonzero(self._are_live()))

    def check_invariants(self) -> None:
        """Raise AssertionError unless the table is a trie, no two rows share a tail, and its blocks are held."""
        held = self._common + self._held.tolist()
        if not self.width:  # after `release`
            assert not held, "a block outlived the rows"
            return
        table, num_full = self._table, self._num_full
        num_columns = -(-self.num_tokens // self.block_size) - self.num_skipped - len(self._common)
        assert table.shape[1] == num_columns, f"{table.shape[1]} columns at {self.num_tokens} tokens"
        assert 0 <= num_full <= num_columns, f"{num_full} of {num_columns} columns are full"
        assert self.num_skipped + len(self._common) == max(self._num_common, self.num_skipped), "common blocks differ"
        tails = table[:, num_full:]
        assert len(np.unique(tails)) == tails.size, "two rows write one block"
        for before, column in zip(table.T, table.T[1:], strict=False):
            paths = np.unique(np.stack([before, column]), axis=1)
            assert paths.shape[1] == len(np.unique(column)), "a block follows two others"
        blocks = [block for column in table.T for block in np.unique(column).tolist()]
        assert len(set(blocks)) == len(blocks), "a block lies at two depths"
        assert len(set(held)) == len(held), "a block is held twice"
        assert set(blocks) <= set(self._held.tolist()), "a row leads to a block that is not held"
        assert self._may_have_dead or len(blocks) == len(self._held), "a block is held that no row leads to"


def _numbered_trie_keys(keys: np.ndarray) -> np.ndarray:
    """Number keys from 0, in the order in which they first occur."""
    _, first, which = np.unique(keys, return_index=True, return_inverse=True)
    return first.argsort().argsort()[which]
