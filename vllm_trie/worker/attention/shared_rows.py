"""Which rows of a batch share their first KV blocks, or compute trees: what attention must know of a step's groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from vllm_trie.compat.at_rest import RestsWithoutBeams
from vllm_trie.search import search_spans
from vllm_trie.search.devices import search_arange, uploaded_for_search
from vllm_trie.worker.kv.kv_caches import ByToken

WORD = 64  # bits
# Takes the place of vLLM's number of tokens per row of a step, to select the full graphs of such steps.
SHARES_BLOCKS = -1


class RowTrees(NamedTuple):
    """Rows whose newest tokens are trees: each sees what comes before the tree, its ancestors, and itself.

    A tree's tokens are consecutive in the cache, parents before their children. A row computes the last ones.
    """

    start: int  # where in the cache the trees begin: the number of tokens of each row before them
    # By row: [tokens that it computes now, tokens of its tree] bool. If only the device knows them: of all tokens that
    # the rows compute, [tokens, words] int64, as in `SharedAttentionTokens`.
    masks: list[np.ndarray] | torch.Tensor
    # If only the device knows these tokens' rows: [tokens] int32, each token's row in the batch, and how many tokens of
    # that row it sees, including those that the tree hides from it. None: each row has its own.
    rows: torch.Tensor | None = None
    ends: torch.Tensor | None = None


class SharedRows(NamedTuple):
    """Rows of one group, in a batch, whose first tokens are in the same KV blocks."""

    places: np.ndarray  # [rows] int64
    num_shared: int  # tokens, in whole blocks
    trees: RowTrees | None = None  # None: each token sees all earlier ones


class Scoring(NamedTuple):
    """How a layer weighs the keys that a token sees."""

    scale: float  # of products of queries and keys
    window: int | None = None  # positions that a token sees, including its own; earlier blocks are not read
    soft_cap: float = 0.0  # bound of the scaled scores (tanh); 0: none
    sinks: torch.Tensor | None = None  # [heads], scores that take part in the softmax without values


class SharesAttentionPrefixes(RestsWithoutBeams, ABC):
    """An attention metadata builder for layers that can share reads. It rests while no rows share anything."""

    hooks = ("build",)

    can_share = False  # whether these layers can share reads
    layer_bytes = 0  # bytes of one layer's weights on this device, once known
    hindrance: str | None = None  # why "on" is not possible for a reason other than the layers' kind
    groups: Sequence[SharedRows] = ()  # of the next batch, which removes them

    def announce(self, groups: Sequence[SharedRows]) -> None:
        """Sets the groups of the next batch, of those that it takes."""
        self.wake()
        self.groups = groups

    @property
    @abstractmethod
    def takes_trees(self) -> bool:
        """Whether all of these layers can attend to trees, also without sharing."""

    @abstractmethod
    def takes(self, sharing: Sequence[tuple[int, int]], num_decoding: int) -> list[bool]:
        """For which groups of a step it reads shared blocks once.

        Args:
            sharing: Each group's rows and shared tokens.
            num_decoding: Rows of the step, those that share nothing among them, if it may replay full CUDA graphs: each
                decodes one token. Otherwise 0.
        """

    def holds_in_graphs(self, num_groups: int) -> bool:
        """Whether full CUDA graphs contain what these layers do in decoding steps of `num_groups` groups."""
        return False

    @abstractmethod
    def by_token(self, kv_cache: torch.Tensor) -> list[ByToken]:
        """The parts of one layer's KV cache."""


class UnseenTokens(NamedTuple):
    """Tokens of trees whose rows only the device knows; n of them."""

    tokens: slice  # among the N of `SharedAttentionTokens`
    rows: torch.Tensor  # [n] int32, as in `SharedAttentionTokens`
    lengths: torch.Tensor  # [n] int32, as in `SharedAttentionTokens`


class SharedAttentionTokens(NamedTuple):
    """The tokens that such rows compute, one group after the other; N of them in G groups."""

    places: np.ndarray  # [N] int32, each token's index in the batch
    rows: np.ndarray  # [N] int32, each token's row in the batch
    lengths: np.ndarray  # [N] int32, keys that each token sees
    starts: np.ndarray  # [G + 1] int32, where each group's tokens begin
    num_shared: np.ndarray  # [G] int32, keys that all rows of a group share
    tree_starts: np.ndarray  # [N] int32, the first key of the tree of its row; its length if there is none
    # [N, words] int64; bit i of all words: whether it sees key i of its row's tree. On the device, if only it knows.
    trees: np.ndarray | torch.Tensor
    unseen: Sequence[UnseenTokens] = ()  # for these, `rows` are those that compute them, and `lengths` is arbitrary

    def on_host(self) -> SharedAttentionTokens:
        """These tokens on the host, where reading the device's memory costs nothing."""
        if not (self.unseen or isinstance(self.trees, torch.Tensor)):
            return self
        rows, lengths = self.rows.copy(), self.lengths.copy()
        for tokens, of_rows, of_lengths in self.unseen:
            rows[tokens], lengths[tokens] = of_rows.numpy(), of_lengths.numpy()
        trees = self.trees.numpy() if isinstance(self.trees, torch.Tensor) else self.trees
        return self._replace(rows=rows, lengths=lengths, trees=trees, unseen=())


def attention_token_by_token(shared: SharedAttentionTokens, block_size: int) -> SharedAttentionTokens:
    """Makes each token of trees a group of its own, which shares what comes before its tree with no other."""
    num_shared = shared.tree_starts // block_size * block_size
    return shared._replace(starts=np.arange(len(shared.rows) + 1, dtype=np.int32), num_shared=num_shared)


def attention_row_by_row(groups: Sequence[SharedRows]) -> list[SharedRows]:
    """Makes each row of groups that compute trees a group of its own, whose tokens share what precedes the tree."""
    found = []
    for places, _, trees in groups:
        assert trees is not None
        for row, place in enumerate(np.array_split(places, len(places))):
            found.append(SharedRows(place, trees.start, RowTrees(trees.start, trees.masks[row : row + 1])))
    return found


def shared_attention_tokens(
    groups: Sequence[SharedRows], query_starts: np.ndarray, lengths: np.ndarray, block_size: int, sees_all: bool = False
) -> SharedAttentionTokens:
    """Lays out what the rows of groups compute.

    Args:
        groups: One or more.
        query_starts: [rows + 1] of the batch, where each row's tokens begin.
        lengths: [rows], keys of each row, including this step's.
        block_size: Shared keys are whole blocks of it, within what every token sees and before any tree.
        sees_all: Keys are not those of the rows' own tokens, and each token sees all of them (cross-attention).
    """
    rows = np.concatenate([group.places for group in groups])
    counts = query_starts[rows + 1] - query_starts[rows]
    starts = np.cumsum([0, *(len(group.places) for group in groups)])
    row_of_token, places, seen = rows, query_starts[rows], lengths[rows]
    if (counts != 1).any():
        row_of_token, places = np.repeat(rows, counts), search_spans(places, counts)
        seen = np.repeat(seen, counts) if sees_all else search_spans(seen - counts + 1, counts)
        starts = np.append(0, counts.cumsum())[starts]
    tree_starts: np.ndarray = seen
    trees: np.ndarray | torch.Tensor = np.zeros((len(seen), 1), dtype=np.int64)
    if any(group.trees is not None for group in groups):
        per_group = np.diff(starts)
        in_tree = np.repeat([group.trees is not None for group in groups], per_group)
        start_of_tree = np.repeat([0 if group.trees is None else group.trees.start for group in groups], per_group)
        tree_starts = np.where(in_tree, start_of_tree, seen)
        trees = _attention_mask_words([group.trees for group in groups], per_group)
    num_shared = np.minimum([group.num_shared for group in groups], np.minimum.reduceat(tree_starts, starts[:-1]))
    num_shared = num_shared // block_size * block_size
    return SharedAttentionTokens(
        *(places.astype(np.int32), row_of_token.astype(np.int32)),
        *(seen.astype(np.int32), starts.astype(np.int32), num_shared.astype(np.int32), tree_starts.astype(np.int32)),
        trees,
        [*_unseen_attention_tokens(groups, starts.tolist())],
    )


def _unseen_attention_tokens(groups: Sequence[SharedRows], starts: Sequence[int]) -> Iterator[UnseenTokens]:
    for (_, _, trees), first, end in zip(groups, starts[:-1], starts[1:], strict=True):
        if trees is not None and trees.rows is not None:
            assert trees.ends is not None
            yield UnseenTokens(slice(first, end), trees.rows, trees.ends)


def _attention_mask_words(of_groups: Sequence[RowTrees | None], per_group: np.ndarray) -> np.ndarray | torch.Tensor:
    """[N, words] int64, what tokens see of trees; `per_group`: tokens of each group. On the device, if any of it is."""
    parts = list[np.ndarray | torch.Tensor]()
    for trees, count in zip(of_groups, per_group.tolist(), strict=True):
        if trees is None:
            parts.append(np.zeros((count, 1), dtype=np.int64))
        else:
            parts.append(trees.masks if isinstance(trees.masks, torch.Tensor) else pack_attention_masks(trees.masks))
    num_words = max(part.shape[1] for part in parts)
    device = next((part.device for part in parts if isinstance(part, torch.Tensor)), None)
    padded = [_padded_attention_masks(part, num_words) for part in parts]
    if device is None:
        return np.concatenate(padded)
    on_device = [part if isinstance(part, torch.Tensor) else uploaded_for_search(part, device) for part in padded]
    return on_device[0] if len(on_device) == 1 else torch.cat(on_device)


def _padded_attention_masks(words: Any, num_words: int) -> Any:
    """Masks [n, words], an array or a tensor, padded with zeros to `num_words`."""
    missing = num_words - words.shape[1]
    if not missing:
        return words
    return pad(words, (0, missing)) if isinstance(words, torch.Tensor) else np.pad(words, ((0, 0), (0, missing)))


def pack_attention_masks(masks: Sequence[np.ndarray]) -> np.ndarray:
    """The rows of all masks, each [rows, columns] bool, as bits: [all rows, words of the widest] int64."""
    num_words = -(-max(mask.shape[1] for mask in masks) // WORD)
    bits, at = np.zeros((sum(map(len, masks)), num_words * WORD), dtype=bool), 0
    for mask in masks:
        bits[at : at + len(mask), : mask.shape[1]] = mask
        at += len(mask)
    return np.packbits(bits, axis=1, bitorder="little").view(np.int64)


def first_attention_keys(shared: SharedAttentionTokens, window: int | None) -> np.ndarray:
    """[N] int32, the first key that each token sees with a window of so many positions, its own included; None: all.

    In a tree a token's position follows its ancestors', wherever in the cache they are.
    """
    if window is None:
        return np.zeros(len(shared.lengths), dtype=np.int32)
    assert isinstance(shared.trees, np.ndarray)
    is_seen = np.unpackbits(shared.trees.view(np.uint8), axis=1, bitorder="little")
    # Tokens of the tree that it sees, counted from each one on.
    from_here = is_seen[:, ::-1].cumsum(axis=1, dtype=np.int32)[:, ::-1]
    in_tree, in_window = from_here[:, 0], (is_seen > 0) & (from_here <= window)
    first = shared.tree_starts + np.where(in_tree > window, in_window.argmax(axis=1), in_tree - window)
    return np.maximum(first, 0).astype(np.int32)


def device_first_attention_keys(trees: torch.Tensor, tree_starts: torch.Tensor, window: int) -> torch.Tensor:
    """`first_attention_keys` [N] int32 on the device, where only it knows the trees.

    Args:
        trees: As in `SharedAttentionTokens`.
        tree_starts: [N] int32, as in `SharedAttentionTokens`, on the device.
        window: Positions that each token sees.
    """
    is_seen = (trees[..., None] >> search_arange(WORD, trees.device) & 1).flatten(1)
    from_here = is_seen.flip(1).cumsum(1).flip(1)
    in_tree, is_first = from_here[:, 0], (is_seen > 0) & (from_here == window)
    first = (search_arange(is_seen.shape[1], trees.device) * is_first).sum(1).where(in_tree > window, in_tree - window)
    return (tree_starts + first).clamp(min=0).int()
