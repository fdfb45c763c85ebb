"""Which rows of a batch share their first KV blocks, or compute trees: what attention must know of a step's groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.compat.at_rest import Rests
from vllm_trie.search import spans
from vllm_trie.search.devices import numbers, uploaded
from vllm_trie.worker.kv.kv_slots import ByToken

WORD = 64  # bits


class RowTrees(NamedTuple):
    """Rows whose newest tokens are trees: each sees what comes before the tree, its ancestors, and itself.

    A tree's tokens lie in the cache one after the other, parents before their children. A row computes the last ones.
    """

    start: int  # where in the cache the trees begin: as many tokens of each row come before them
    # By row: [tokens that it computes now, tokens of its tree] bool. Where the device alone knows: [rows, words] int64,
    # as `SharedTokens` has it, of rows that compute one token each. In a batch all are of one kind.
    sees: list[np.ndarray] | torch.Tensor


class SharedRows(NamedTuple):
    """Rows of one group, in a batch, whose first tokens lie in the same KV blocks."""

    places: np.ndarray  # [rows] int64
    num_shared: int  # tokens; whole blocks
    trees: RowTrees | None = None  # None: each token sees all that come before it


class Scoring(NamedTuple):
    """How a layer weighs the keys that a token sees."""

    scale: float  # of products of queries and keys
    window: int | None = None  # positions that a token sees, its own included. Blocks that all came before are not read
    soft_cap: float = 0.0  # what scaled scores are bent to stay below; 0 if nothing
    sinks: torch.Tensor | None = None  # [heads], scores that take part in the softmax and have no values


class Layer(NamedTuple):
    """A layer whose attention is computed by kernels of ours."""

    scoring: Scoring
    kv_cache: torch.Tensor
    table: torch.Tensor  # [rows, blocks] int32
    heads: tuple[int, int]  # query heads, and KV heads


class SharesPrefixes(Rests, ABC):
    """A builder of attention metadata for layers that may make use of such rows. It rests while there are none."""

    hooks = ("build",)

    can_share = False  # whether these layers do
    layer_bytes = 0  # of the weights of one of them on this device, once that is known
    hindrance: str | None = None  # why they cannot although that is demanded, if something else than their kind is why
    groups: Sequence[SharedRows] = ()  # of the next batch that it sees; it takes them out

    def announce(self, groups: Sequence[SharedRows]) -> None:
        """The next batch that it sees has these, of such as it takes."""
        self.wake()
        self.groups = groups

    @property
    @abstractmethod
    def takes_trees(self) -> bool:
        """Whether all of these layers can attend to trees, also where they do not share."""

    @abstractmethod
    def takes(self, sharing: Sequence[tuple[int, int]]) -> list[bool]:
        """Which groups of a step it reads shared blocks once for: of each, its rows, and tokens that they share."""

    @abstractmethod
    def by_token(self, kv_cache: torch.Tensor) -> list[ByToken]:
        """The parts of which a KV cache of one layer consists."""


class SharedTokens(NamedTuple):
    """The tokens that such rows compute, one group after the other; N of them in G groups."""

    places: np.ndarray  # [N] int32, of each token in the batch
    rows: np.ndarray  # [N] int32, of each token's row in the batch
    lengths: np.ndarray  # [N] int32, keys that each token sees
    starts: np.ndarray  # [G + 1] int32, where each group's tokens begin
    num_shared: np.ndarray  # [G] int32, keys that all rows of a group share
    tree_starts: np.ndarray  # [N] int32, the first key that belongs to the tree of its row; its length if there is none
    # [N, words] int64; bit i of all words: whether it sees key i of its row's tree. On the device, if it alone knows.
    trees: np.ndarray | torch.Tensor


def row_by_row(groups: Sequence[SharedRows]) -> list[SharedRows]:
    """Each row of groups that compute trees as a group of its own, whose tokens share what comes before the tree."""
    found = []
    for places, _, trees in groups:
        assert trees is not None
        for row, place in enumerate(np.array_split(places, len(places))):
            found.append(SharedRows(place, trees.start, RowTrees(trees.start, trees.sees[row : row + 1])))
    return found


def tokens_of(
    groups: Sequence[SharedRows], query_starts: np.ndarray, lengths: np.ndarray, block_size: int, sees_all: bool = False
) -> SharedTokens:
    """Lay out what the rows of groups compute.

    Args:
        groups: One or more.
        query_starts: [rows + 1] of the batch, where each row's tokens begin.
        lengths: [rows], keys of each row, those of this step included.
        block_size: Of what is read. A token must not see less than is shared, and no part of a tree is.
        sees_all: Keys are not those of the rows' own tokens, and each token sees all of them.
    """
    rows = np.concatenate([group.places for group in groups])
    counts = np.diff(query_starts)[rows]
    row_of_token = np.repeat(rows, counts)
    seen = np.repeat(lengths[rows], counts) if sees_all else spans(lengths[rows] - counts + 1, counts)
    first_rows = np.cumsum([0, *(len(group.places) for group in groups)])
    starts = np.append(0, counts.cumsum())[first_rows]
    tree_starts: np.ndarray = seen
    trees: np.ndarray | torch.Tensor = np.zeros((len(seen), 1), dtype=np.int64)
    of_groups = [group.trees for group in groups if group.trees is not None]
    if of_groups:
        per_group = np.diff(starts)
        in_tree = np.repeat([group.trees is not None for group in groups], per_group)
        start_of_tree = np.repeat([0 if group.trees is None else group.trees.start for group in groups], per_group)
        tree_starts = np.where(in_tree, start_of_tree, seen)
        trees = _words(of_groups, in_tree)
    num_shared = np.minimum([group.num_shared for group in groups], np.minimum.reduceat(tree_starts, starts[:-1]))
    num_shared = num_shared // block_size * block_size
    return SharedTokens(
        *(spans(query_starts[rows], counts).astype(np.int32), row_of_token.astype(np.int32)),
        *(seen.astype(np.int32), starts.astype(np.int32), num_shared.astype(np.int32), tree_starts.astype(np.int32)),
        trees,
    )


def _words(of_groups: Sequence[RowTrees], in_tree: np.ndarray) -> np.ndarray | torch.Tensor:
    """[N, words] int64 what tokens see of trees; `in_tree` [N] bool: which tokens are in any."""
    there = [trees.sees for trees in of_groups if isinstance(trees.sees, torch.Tensor)]
    if there:
        assert len(there) == len(of_groups)
        assert in_tree.all()
        return there[0] if len(there) == 1 else torch.cat(there)
    of_trees = pack([mask for trees in of_groups for mask in trees.sees])
    words = np.zeros((len(in_tree), of_trees.shape[1]), dtype=np.int64)
    words[in_tree] = of_trees
    return words


def pack(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all masks, each [rows, columns] bool, as bits: [all rows, words of the widest] int64."""
    num_words = -(-max(mask.shape[1] for mask in masks) // WORD)
    bits, at = np.zeros((sum(map(len, masks)), num_words * WORD), dtype=bool), 0
    for mask in masks:
        bits[at : at + len(mask), : mask.shape[1]] = mask
        at += len(mask)
    return np.packbits(bits, axis=1, bitorder="little").view(np.int64)


def first_keys(shared: SharedTokens, window: int | None) -> np.ndarray:
    """[N] int32, the first key that each token sees, if it sees so many positions, its own included; None: all.

    In a tree the positions of its ancestors come before a token's own, wherever in the cache they are.
    """
    if window is None:
        return np.zeros(len(shared.lengths), dtype=np.int32)
    assert isinstance(shared.trees, np.ndarray)
    sees = np.unpackbits(shared.trees.view(np.uint8), axis=1, bitorder="little")
    # Tokens of the tree that it sees, from each one on.
    from_here = sees[:, ::-1].cumsum(axis=1, dtype=np.int32)[:, ::-1]
    in_tree, in_window = from_here[:, 0], (sees > 0) & (from_here <= window)
    first = shared.tree_starts + np.where(in_tree > window, in_window.argmax(axis=1), in_tree - window)
    return np.maximum(first, 0).astype(np.int32)


def first_keys_there(shared: SharedTokens, window: int) -> torch.Tensor:
    """The same, [N] int32 on the device, of tokens whose trees it alone knows."""
    assert isinstance(shared.trees, torch.Tensor)
    device = shared.trees.device
    sees = (shared.trees[..., None] >> numbers(WORD, device) & 1).flatten(1)
    from_here = sees.flip(1).cumsum(1).flip(1)
    in_tree, is_first = from_here[:, 0], (sees > 0) & (from_here == window)
    first = (numbers(sees.shape[1], device) * is_first).sum(1).where(in_tree > window, in_tree - window)
    return (uploaded(shared.tree_starts, device) + first).clamp(min=0).int()
