"""The block trie: which KV blocks the rows of one beam group share, and which are their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

import numpy as np

NO_NODE = -1


class BlockCopy(NamedTuple):
    """Copy the content of block `source` into block `destination`."""

    source: int
    destination: int


@dataclass
class BlockCounts:
    """What the trie did, in blocks."""

    shared: int = 0  # full blocks a fork took over by reference
    copied: int = 0  # tail blocks whose content a fork copied
    reclaimed: int = 0  # blocks given back because no row led to them any more
    cached: int = 0  # full blocks beyond the prompt that entered the prefix cache

    def add(self, other: BlockCounts) -> None:
        self.shared += other.shared
        self.copied += other.copied
        self.reclaimed += other.reclaimed
        self.cached += other.cached


def least_blocks_to_start(num_prompt_tokens: int, width: int, block_size: int) -> int:
    """The fewest blocks with which `width` rows that see all of their prompt can take a step beyond it."""
    return num_prompt_tokens // block_size + width


def blocks_to_fan_out(num_tokens: int, paths: Sequence[Sequence[int]], block_size: int) -> int:
    """New blocks that `BlockTrie.fan_out(paths, ...)` takes from a prefix of `num_tokens` tokens."""
    end = num_tokens + len(paths[0])
    count = len(paths) if end % block_size else 0
    for block_end in range((num_tokens // block_size + 1) * block_size, end + 1, block_size):
        count += len({path[block_end - num_tokens - 1] for path in paths})
    return count - (num_tokens % block_size > 0)  # one row goes on in the prefix's own tail


@dataclass(slots=True)
class _Node:
    """One full block, common to every row below it."""

    parent: int
    block: int
    depth: int  # full blocks from the first token to here, this one and those skipped included
    references: int  # child nodes, plus rows whose deepest full block this is


@dataclass(slots=True)
class _Row:
    node: int  # deepest full block that may be shared
    tails: list[int] = field(default_factory=list)  # the row's own blocks behind it, first to last


@dataclass
class BlockTrie:
    """The blocks of a group of rows that all hold the same number of tokens.

    A row is a path of full blocks plus tail blocks of its own: one that is being written, and maybe one
    that has become full since the last fork. A fork adopts the full blocks by reference and copies what is
    partly filled, so no row ever writes into a block that another row reads. Blocks are numbers here; who
    allocates and frees them is the caller's business. A block whose last reference goes becomes garbage
    until `reclaim` hands it back.

    Where attention sees only a window, the first blocks of all rows can be skipped: rows hold what
    comes behind them.

    Args:
        block_size: Tokens per block.
        prefix: Blocks of the common prefix, the first row; the last one may be partly filled.
        num_tokens: Tokens of the common prefix.
        num_skipped: How many of its blocks, the first ones, are not held.
    """

    block_size: int
    prefix: Sequence[int]
    num_tokens: int
    num_skipped: int = 0
    counts: BlockCounts = field(default_factory=BlockCounts)

    def __post_init__(self) -> None:
        full, partial = divmod(self.num_tokens, self.block_size)
        if len(self.prefix) != full + bool(partial):
            raise ValueError(f"{len(self.prefix)} blocks of {self.block_size} do not hold {self.num_tokens} tokens")
        self.num_sealed = full  # blocks of each row, from the first one, that have joined the trie or are skipped
        self._common = 0, 0  # blocks that all rows share, as found when so many were sealed
        self._nodes: dict[int, _Node] = {}
        self._keys = count()
        self._garbage: list[int] = []
        node = NO_NODE
        for index in range(self.num_skipped, full):
            node = self._add_node(node, self.prefix[index], index + 1)
        self.rows = [_Row(NO_NODE, [self.prefix[full]] if partial else [])]
        self._point(self.rows[0], node)
        self.prefix = ()

    @property
    def width(self) -> int:
        return len(self.rows)

    def fan_out(self, paths: Sequence[Sequence[int]], new_blocks: Sequence[int]) -> list[BlockCopy]:
        """Let one row become many that go on from it, and make room for their tokens.

        Args:
            paths: For each row a key per token beyond the prefix, equally many. Where two rows have the
                same key, their histories are the same up to that token, and so are their full blocks.
            new_blocks: As many as `blocks_to_fan_out` says.

        Returns:
            The copies to make before any row writes.
        """
        (first,) = self.rows
        assert len(new_blocks) == blocks_to_fan_out(self.num_tokens, paths, self.block_size)
        self._seal(self.num_tokens // self.block_size)
        self.rows = [_Row(first.node) for _ in paths]
        if first.node != NO_NODE:
            self._nodes[first.node].references += len(paths) - 1
        new, tail, copies = iter(new_blocks), next(iter(first.tails), None), []
        start, end = self.num_tokens, self.num_tokens + len(paths[0])
        for depth in range(start // self.block_size + 1, -(-end // self.block_size) + 1):
            block_end = depth * self.block_size
            sealed: dict[int, int] = {}
            for index, (row, path) in enumerate(zip(self.rows, paths, strict=True)):
                if block_end <= end and path[block_end - start - 1] in sealed:
                    self._point(row, sealed[path[block_end - start - 1]])
                    continue
                block = next(new) if tail is None or index > 0 else tail
                if tail is not None and index > 0:
                    copies.append(BlockCopy(tail, block))
                if block_end > end:
                    row.tails.append(block)
                else:
                    node = sealed[path[block_end - start - 1]] = self._add_node(row.node, block, depth)
                    self._point(row, node)
            tail = None
        self.num_tokens, self.num_sealed = end, end // self.block_size
        self.counts.copied += len(copies)
        return copies

    def blocks_to_grow(self) -> int:
        """New blocks that `grow` takes: one per row at a block boundary, else none."""
        return 0 if self.num_tokens % self.block_size else self.width

    def grow(self, new_blocks: Sequence[int]) -> None:
        """Make room for one more token in every row."""
        assert len(new_blocks) == self.blocks_to_grow()
        for row, block in zip(self.rows, new_blocks, strict=False):  # none between two boundaries
            row.tails.append(block)
        self.num_tokens += 1

    def fork(self, parents: Sequence[int], num_tokens: int | None = None) -> list[BlockCopy]:
        """Let every row d continue the history of row `parents[d]`. Returns the tail copies to make.

        A row that is somebody's parent must be its own (`assign_slots` sees to that), so copies
        read from survivors and write to dead rows only.

        Args:
            parents: By row.
            num_tokens: How many tokens the rows held when they forked, if they have grown since; what
                a row holds beyond stays its own.
        """
        num_full, partial = divmod(self.num_tokens if num_tokens is None else num_tokens, self.block_size)
        self._seal(num_full)
        copies = []
        for (index, row), parent in zip(enumerate(self.rows), parents, strict=True):
            if index == parent:
                continue
            source = self.rows[parent]
            if row.node != source.node:
                self._point(row, source.node)
            self.counts.shared += self.num_sealed - self.num_skipped if row.node != NO_NODE else 0
            if partial:
                copies.append(BlockCopy(source.tails[0], row.tails[0]))
        self.counts.copied += len(copies)
        return copies

    def _seal(self, num_blocks: int) -> None:
        """Let the first `num_blocks` blocks of every row be in the trie."""
        for depth in range(self.num_sealed + 1, num_blocks + 1):
            for row in self.rows:
                self._point(row, self._add_node(row.node, row.tails.pop(0), depth))
            self.num_sealed = depth

    def skip(self, num_blocks: int) -> None:
        """Hold the first `num_blocks` blocks of the rows no longer, as far as they are in the trie."""
        num_blocks = min(num_blocks, self.num_sealed)
        if num_blocks <= self.num_skipped:
            return
        self.num_skipped = num_blocks
        for key in [key for key, node in self._nodes.items() if node.depth <= num_blocks]:
            self._garbage.append(self._nodes.pop(key).block)
        for node in self._nodes.values():
            if node.parent not in self._nodes:
                node.parent = NO_NODE
        for row in self.rows:
            if row.node not in self._nodes:
                row.node = NO_NODE

    def num_common(self) -> int:
        """How many blocks, the first ones, all rows are known to share, those that are skipped included.

        It never decreases. It is looked up anew whenever blocks have joined the trie.
        """
        _, looked_at = self._common
        if looked_at < self.num_sealed:
            nodes, depth = {row.node for row in self.rows}, self.num_sealed
            while len(nodes) > 1:
                nodes, depth = {self._nodes[node].parent if node != NO_NODE else NO_NODE for node in nodes}, depth - 1
            self._common = depth, self.num_sealed
        return self._common[0]

    def reclaim(self) -> list[int]:
        """Hand back the blocks that no row leads to."""
        garbage, self._garbage = self._garbage, []
        self.counts.reclaimed += len(garbage)
        return garbage

    @property
    def num_garbage(self) -> int:
        return len(self._garbage)

    def release(self) -> list[int]:
        """Give up every row. Returns all blocks, deepest first, so that the prompt is evicted last."""
        blocks = self.reclaim()
        blocks += chain.from_iterable(row.tails[::-1] for row in self.rows)
        blocks += [node.block for node in sorted(self._nodes.values(), key=lambda n: -n.depth)]
        self._nodes.clear()
        self.rows = []
        return blocks

    def row_blocks(self, row: int) -> list[int]:
        """The blocks that one row holds, first to last, its tails included."""
        return self._path(self.rows[row].node) + self.rows[row].tails

    def table(self) -> np.ndarray:
        """[rows, blocks] int32: what `row_blocks` returns, of all rows."""
        nodes = [row.node for row in self.rows]
        paths = {node: self._path(node) for node in dict.fromkeys(nodes)}
        number = dict(zip(paths, range(len(paths)), strict=True))
        full = np.array([*paths.values()], np.int32)[[number[node] for node in nodes]]
        return np.hstack([full, np.array([row.tails for row in self.rows], np.int32)])

    def _path(self, node: int) -> list[int]:
        blocks = []
        while node != NO_NODE:
            blocks.append(self._nodes[node].block)
            node = self._nodes[node].parent
        return blocks[::-1]

    @property
    def num_live_blocks(self) -> int:
        """Distinct blocks that some row leads to: the least any sharing scheme could hold."""
        return len(self._nodes) + sum(len(row.tails) for row in self.rows)

    def check_invariants(self) -> None:
        """Raise AssertionError unless the live blocks are exactly the union of the rows' paths and tails."""
        num_blocks = -(-self.num_tokens // self.block_size)
        expected = dict.fromkeys(self._nodes, 0)
        for key, node in self._nodes.items():
            if node.parent != NO_NODE:
                assert node.parent in self._nodes, f"node {key} outlived its parent"
                assert self._nodes[node.parent].depth == node.depth - 1
                expected[node.parent] += 1
            else:
                assert node.depth == self.num_skipped + 1, f"node {key} hangs in the air"
        for index, row in enumerate(self.rows):
            if row.node != NO_NODE:
                expected[row.node] += 1
            num_tails = num_blocks - self.num_sealed
            assert len(row.tails) == num_tails, f"row {index}: tails {row.tails} at {self.num_tokens} tokens"
            assert len(self.row_blocks(index)) == num_blocks - self.num_skipped, f"row {index} has a wrong length"
        for key, node in self._nodes.items():
            assert node.references == expected[key] > 0, f"node {key}: {node.references} held, {expected[key]} found"
        live = [node.block for node in self._nodes.values()]
        live += chain.from_iterable(row.tails for row in self.rows)
        assert len(set(live + self._garbage)) == len(live) + len(self._garbage), "a block is held twice"

    def _add_node(self, parent: int, block: int, depth: int) -> int:
        key = next(self._keys)
        if parent != NO_NODE:
            self._nodes[parent].references += 1
        self._nodes[key] = _Node(parent, block, depth, 0)
        return key

    def _point(self, row: _Row, node: int) -> None:
        if node != NO_NODE:
            self._nodes[node].references += 1
        old, row.node = row.node, node
        while old != NO_NODE:
            dropped = self._nodes[old]
            dropped.references -= 1
            if dropped.references:
                return
            del self._nodes[old]
            self._garbage.append(dropped.block)
            old = dropped.parent
