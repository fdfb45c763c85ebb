"""A catalog: a set of items, each a sequence of tokens, as a trie for lookups on hosts and devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Self

import numpy as np

from vllm_trie.catalog.arrays import build_catalog_arrays
from vllm_trie.catalog.file_format import AGAIN, CatalogHeader, pack_catalog, unpack_catalog
from vllm_trie.catalog.items import CatalogItems

NO_NODE = NO_ITEM = -1
MANY = 64  # a level is long if it has more nodes than one for so many tokens


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalog(CatalogHeader):
    """Token sequences as an immutable trie in CSR form.

    Node 0 is the root. Nodes are numbered level by level, and the children of a node consecutively, ascending by token:
    those of node s are `first_child[s]` to `first_child[s + 1] - 1`.
    """

    name: str  # its path, for errors
    digest: str  # of the whole content, in hex
    item_ids: np.ndarray  # [items] int64, in the order of their nodes: an item's id, else the index of its line
    first_child: np.ndarray  # [nodes + 1] int32
    tokens: np.ndarray  # [nodes] int32, the token by which a node is entered; -1 at the root
    is_item: np.ndarray  # [nodes] bool, whether an item ends here
    data: memoryview  # the whole content, of which all arrays are views

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map a file into memory. The file may be replaced later, but must not be written to.

        Raises:
            ValueError: it cannot be read, is not a catalog, or is damaged.
        """
        try:
            with open(path, "rb") as file:
                is_empty = not os.fstat(file.fileno()).st_size
                data = b"" if is_empty else mmap(file.fileno(), 0, access=ACCESS_READ)  # an empty file cannot be mapped
        except OSError as error:
            raise ValueError(f"catalog {path} cannot be read: {error.strerror}; pass a file written by build") from None
        return cls._of(memoryview(data), str(path))

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "(in memory)", checks: bool = True) -> Self:
        """A catalog from the result of `to_bytes`. Raises as `open` does.

        Args:
            checks: Whether to verify the checksum. False for data from the engine's own processes, to save time.
        """
        return cls._of(memoryview(data), name, checks)

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Sequence[int]],
        ids: Sequence[int] | None = None,
        vocab_size: int | None = None,
        tokenizer: str | None = None,
    ) -> Self:
        """A catalog of sequences. Of equal ones the first is kept; one may be a prefix of another.

        Args:
            ids: The id of each sequence, not negative. By default its index.
            vocab_size: Token ids must be below this.
            tokenizer: `tokenizer_digest` of the tokenizer that the token ids come from.

        Raises:
            ValueError: there are no sequences, one is empty, or a token id is not valid.
        """
        rows = list(sequences)
        numbers = np.arange(len(rows)) if ids is None else ids
        return cls.from_items(CatalogItems.of(rows, numbers, vocab_size, "sequence {}".format), vocab_size, tokenizer)

    @classmethod
    def from_items(
        cls,
        items: CatalogItems,
        vocab_size: int | None,
        tokenizer: str | None,
        progress: Callable[[range], Iterable[int]] = iter,
    ) -> Self:
        """A catalog of items that have been checked; `progress` as in `build_catalog_arrays`."""
        arrays = build_catalog_arrays(items, progress)
        return cls.from_bytes(pack_catalog(CatalogHeader.of(arrays, vocab_size, tokenizer), arrays), checks=False)

    @classmethod
    def _of(cls, data: memoryview, name: str, checks: bool = True) -> Self:
        digest, header, arrays = unpack_catalog(data, name, checks)
        return cls(**vars(header), **arrays._asdict(), name=name, digest=digest, data=data)

    @cached_property
    def most_with_one_id(self) -> int:
        """The most items with the same id."""
        ids = self.item_ids
        counts = np.bincount(ids) if ids.max() < 4 * len(ids) else np.unique(ids, return_counts=True)[1]
        return int(counts.max())

    @property
    def num_bytes_on_device(self) -> int:
        """Bytes of `first_child`, `tokens` and `is_item`."""
        return self.first_child.nbytes + self.tokens.nbytes + self.is_item.nbytes

    def tokens_by_depth(self) -> list[np.ndarray]:
        """For each depth, from the root's on, the tokens of all items at that depth: [K] int64, ascending."""
        levels, (first, end) = list[np.ndarray](), (1, int(self.first_child[1]))
        while first < end:
            tokens = self.tokens[first:end]
            if MANY * len(tokens) < self.max_token:
                levels.append(np.unique(tokens).astype(np.int64))
            else:  # faster for many nodes
                comes = np.zeros(self.max_token + 1, dtype=bool)
                comes[tokens] = True
                levels.append(comes.nonzero()[0])
            first, end = end, int(self.first_child[end])
        return levels

    def to_bytes(self) -> bytes:
        """The whole content, without a copy if it came as bytes."""
        return self.data.obj if isinstance(self.data.obj, bytes) else bytes(self.data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write or replace a file atomically: readers see either the old or the new content."""
        target = Path(path)
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(self.data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def find(self, token_ids: np.ndarray) -> np.ndarray:
        """The items that sequences are.

        Args:
            token_ids: [n, longest] int, each row padded with -1.

        Returns:
            [n] int64 ids, -1 if a sequence is not an item.
        """
        nodes = np.zeros(len(token_ids), np.int64)
        for tokens in token_ids.T:
            nodes = np.where(tokens < 0, nodes, self._children(nodes, tokens))
        is_item = (nodes >= 0) & self.is_item[nodes]
        return np.where(is_item, self.item_ids[self._item_indices[nodes]], NO_ITEM)

    def find_in_a_row(self, token_ids: np.ndarray, count: int) -> np.ndarray:
        """The items that sequences consist of, in a catalog where no item is a prefix of another.

        Args:
            token_ids: [n, longest] int, each row padded with -1.
            count: Items per sequence.

        Returns:
            [n, count] int64 ids, -1 for missing items.
        """
        found = np.full((len(token_ids), count), NO_ITEM, np.int64)
        nodes, num_found = np.zeros(len(token_ids), np.int64), np.zeros(len(token_ids), np.int64)
        for tokens in token_ids.T:
            nodes = np.where(tokens < 0, NO_NODE, self._children(nodes, tokens))
            (ended,) = ((nodes >= 0) & self.is_item[nodes] & (num_found < count)).nonzero()
            found[ended, num_found[ended]] = self.item_ids[self._item_indices[nodes[ended]]]
            num_found[ended] += 1
            nodes[ended] = 0
        return found

    def sequence(self, index: int) -> list[int]:
        """The token ids of an item, by its index in `item_ids`."""
        node, tokens = np.searchsorted(self._item_indices, np.int32(index)), list[int]()
        while node:
            tokens.append(int(self.tokens[node]))
            node = np.searchsorted(self.first_child, np.int32(node), side="right") - 1  # int64 would copy first_child
        return tokens[::-1]

    def check_fits(self, vocab_size: int, tokenizer: str | None) -> None:
        """Raise ValueError if this was built for another vocabulary.

        Args:
            vocab_size: Of the model.
            tokenizer: `tokenizer_digest` of the model's tokenizer; None if unknown.
        """
        if self.max_token >= vocab_size:
            reason = f"it has token {self.max_token}, and the model has {vocab_size} tokens"
        elif tokenizer is not None and self.tokenizer not in (None, tokenizer):
            reason = f"its tokenizer has digest {self.tokenizer}, and the model's {tokenizer}"
        elif self.tokenizer is None and self.vocab_size is not None and self.vocab_size > vocab_size:
            reason = f"it has {self.vocab_size} tokens, and the model has {vocab_size}"
        else:
            return
        raise ValueError(f"catalog {self.name} was built for another vocabulary: {reason}; {AGAIN} --tokenizer MODEL")

    def nodes_of_items(self, item_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each sequence of some items, the first node that leads to this sequence only, or else the one of its end.

        Args:
            item_ids: [n] int64, ascending, each once.

        Returns:
            Nodes [m] int32, ascending; and the ids that no item has.
        """
        ids, nodes = self._nodes_by_id
        # Ids are usually line numbers.
        first = item_ids if self._are_ids_numbers else ids.searchsorted(item_ids)
        is_known = ids.take(first, mode="clip") == item_ids
        unknown = item_ids.compress(~is_known)
        first = first.compress(is_known) if len(unknown) else first
        if not self._has_one_sequence_each:
            counts = ids.searchsorted(ids[first], side="right") - first
            first = np.repeat(first, counts) + np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        return np.sort(nodes.take(first)), unknown

    def index_ids(self) -> None:
        """Build the index of `nodes_of_items` and the parents now, not on first use."""
        _ = self._are_ids_numbers, self.parents

    @cached_property
    def parents(self) -> np.ndarray:
        """[nodes] int32, the parent of each node; the root's is -1."""
        return np.append(np.int32(-1), np.repeat(np.arange(self.num_nodes, dtype=np.int32), np.diff(self.first_child)))

    @cached_property
    def _nodes_by_id(self) -> tuple[np.ndarray, np.ndarray]:
        """Item ids, ascending, and the node of each as in `nodes_of_items`: [items] int64 and int32."""
        order, nodes = np.argsort(self.item_ids, kind="stable"), np.flatnonzero(self.is_item).astype(np.int32)
        num_children = np.diff(self.first_child)
        leads_to_one = (num_children == 1) & ~self.is_item
        leads_to_one[0] = False
        rising = np.flatnonzero(num_children.take(nodes) == 0)
        while len(rising):
            above = self.parents.take(nodes.take(rising))
            is_alone = leads_to_one.take(above)
            rising, above = rising.compress(is_alone), above.compress(is_alone)
            nodes[rising] = above
        return self.item_ids[order], nodes[order]

    @cached_property
    def _are_ids_numbers(self) -> bool:
        """Whether the ids are exactly 0 to n - 1."""
        ids, _ = self._nodes_by_id
        return self._has_one_sequence_each and int(ids[0]) == 0 and int(ids[-1]) == len(ids) - 1

    @cached_property
    def _has_one_sequence_each(self) -> bool:
        """Whether no two items have the same id."""
        ids, _ = self._nodes_by_id
        return bool((ids[1:] > ids[:-1]).all())

    @cached_property
    def _item_indices(self) -> np.ndarray:
        """[nodes] int32, indices into `item_ids`, valid at nodes where an item ends."""
        return np.cumsum(self.is_item, dtype=np.int32) - np.int32(1)

    def _children(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """[n] the child of each node by a token, -1 if there is none; -1 has no children."""
        low, end = self.first_child[nodes].astype(np.int64), self.first_child[nodes + 1]
        high = end.astype(np.int64)  # for node -1 this is below `low`
        for _ in range(int((high - low).max(initial=0)).bit_length()):
            middle = (low + high) >> 1
            is_right = (low < high) & (self.tokens[np.minimum(middle, self.num_nodes - 1)] < tokens)
            low, high = np.where(is_right, middle + 1, low), np.where(is_right, high, middle)
        is_child = (low < end) & (self.tokens[np.minimum(low, self.num_nodes - 1)] == tokens)
        return np.where(is_child, low, NO_NODE)
