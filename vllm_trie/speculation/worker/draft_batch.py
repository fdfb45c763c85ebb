"""The batch of one forward pass of a draft model over chosen rows: as the host lays it out, and on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search import search_spans
from vllm_trie.search.devices import uploaded_for_search, uploaded_together_for_search
from vllm_trie.speculation.worker.forest_step import ForestStep
from vllm_trie.speculation.worker.table_entries import draft_tables_side_by_side
from vllm_trie.worker.attention.shared_rows import SharedRows


class DraftInputs(NamedTuple):
    """T tokens of R rows, on the device."""

    tokens: torch.Tensor  # [T] int32, row after row
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [KV cache groups, T] int64, their slots in the cache
    starts: torch.Tensor  # [R + 1] int32, where the tokens of each row begin
    ends: torch.Tensor  # [R] int32, tokens of each row in the cache, including these
    tables: Sequence[torch.Tensor]  # by KV cache group: [R, columns] int32
    starts_on_host: np.ndarray  # [R + 1] int32, `starts` on the host
    most_ends: np.ndarray  # [R] int32, upper bounds of `ends`, on the host
    wanted: torch.Tensor | None  # [wanted] int64, the tokens after which logits are wanted; None: all
    slots_before: Callable[[int], torch.Tensor]  # by KV cache group: [T] int64, of the token before each; -1: none
    sharing: Sequence[Sequence[SharedRows]]  # by group that drafts into trees, by KV cache group


@dataclass
class DraftBatch:
    """What the host lays out for the rows of some groups; T tokens."""

    tokens: list[list[int]] = field(default_factory=list)  # of each row, at least one
    starts: list[int] = field(default_factory=list)  # of each row: the place of its first token in its cache
    positions: list[int] = field(default_factory=list)  # [T]
    parents: list[int] = field(default_factory=list)  # [T], the place in its row's cache of the token before each
    wanted: list[int] = field(default_factory=list)  # those of the T tokens after which logits are wanted
    blocks: list[list[np.ndarray]] = field(default_factory=list)  # by group, by KV cache group: [rows, columns] int32
    sharing: list[list[SharedRows]] = field(default_factory=list)  # by group that drafts into trees, by KV cache group

    def add_pending(self, forest_step: ForestStep, most: int | None = None) -> None:
        """Adds the tokens up to the roots, with logits after these; or only the first `most` tokens of each row."""
        for tokens in forest_step.pending:
            self.add_sequence(tokens[:most], forest_step.start + 1 - len(tokens))
            if most is None:
                self.wanted.append(len(self.positions) - 1)
        self.blocks.append(forest_step.blocks)

    def add_layer(self, forest_step: ForestStep) -> None:
        """Adds the newest layer of a forest, each node at the end of its tree."""
        forest, start, places = forest_step.forest, forest_step.start, dict[int, int]()
        nodes = sorted(set(forest_step.layer.nodes))
        counts = Counter(forest.row_of[node] for node in nodes)
        firsts = {row: len(forest.rows[row]) - count for row, count in sorted(counts.items())}
        rows = [*firsts]
        at = np.arange(len(self.tokens), len(self.tokens) + len(rows))
        for row, first in firsts.items():
            newest = forest.rows[row][first:]
            places |= {node: len(self.positions) + place for place, node in enumerate(newest)}
            depths = [start + forest.depths[node] for node in newest]
            parents = [start + forest.places[forest.parents[node]] for node in newest]
            self._add_row([forest.tokens[node] for node in newest], start + first, depths, parents)
        self.wanted += [places[node] for node in forest_step.layer.nodes]
        self.blocks.append([table[rows] for table in forest_step.blocks])
        num_shared, trees = forest_step.step.num_shared, forest_step.trees_from(firsts)
        assert num_shared is not None
        self.sharing.append([SharedRows(at, count, trees) for count in num_shared])

    def add_sequence(self, tokens: Sequence[int], start: int) -> None:
        """Adds tokens of one row, from place `start` of its cache on. The caller adds its `blocks`."""
        end = start + len(tokens)
        self._add_row(tokens, start, range(start, end), range(start - 1, end - 1))

    def _add_row(self, tokens: Sequence[int], start: int, positions: Sequence[int], parents: Sequence[int]) -> None:
        self.tokens.append([*tokens])
        self.starts.append(start)
        self.positions += positions
        self.parents += parents

    @cached_property
    def lengths(self) -> np.ndarray:
        """[rows] int32, tokens of each row."""
        return np.array([len(row) for row in self.tokens], dtype=np.int32)

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """By KV cache group: [rows, columns] int32."""
        return [draft_tables_side_by_side(of_table) for of_table in zip(*self.blocks, strict=True)]

    def inputs(self, block_sizes: Sequence[int], device: torch.device) -> DraftInputs:
        """The batch on the device, by one copy; `block_sizes`: by KV cache group."""
        lengths, starts = self.lengths, np.array(self.starts)
        ends = (starts + lengths).astype(np.int32)
        query_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        tokens = np.fromiter((token for row in self.tokens for token in row), dtype=np.int32)
        slots, positions = self._slots(search_spans(starts, lengths), block_sizes), np.array(self.positions)
        of_batch = [tokens, positions, slots, query_starts, ends, np.array(self.wanted, np.int64)]
        uploaded = uploaded_together_for_search([*of_batch, *self.tables], device)
        token_ids, of_tokens, slot_mappings, starts_on_device, ends_on_device, wanted = uploaded[: len(of_batch)]

        def slots_before(number: int) -> torch.Tensor:
            parents = np.array(self.parents)
            before = self._slots(np.maximum(parents, 0), block_sizes)[number]
            return uploaded_for_search(np.where(parents < 0, -1, before), device)

        of_rows = starts_on_device, ends_on_device, uploaded[len(of_batch) :]
        on_host = query_starts, ends
        return DraftInputs(token_ids, of_tokens, slot_mappings, *of_rows, *on_host, wanted, slots_before, self.sharing)

    def _slots(self, places: np.ndarray, block_sizes: Sequence[int]) -> np.ndarray:
        """[KV cache groups, T] int64, the slots of `places` [T], one for each token of the rows."""
        row, tables = np.repeat(np.arange(len(self.lengths)), self.lengths), zip(self.tables, block_sizes, strict=True)
        return np.stack([table[row, places // size].astype(np.int64) * size + places % size for table, size in tables])
