"""Forwards of vLLM's draft model over rows of our choosing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_trie.search.devices import uploaded_together
from vllm_trie.search.spans import spans
from vllm_trie.worker.attention.shared_rows import SharedRows, SharesPrefixes
from vllm_trie.worker.forest_step import ForestStep


@dataclass
class DraftBatch:
    """What a draft model computes in one forward, of the rows of some groups; T tokens."""

    tokens: list[list[int]] = field(default_factory=list)  # of each row, at least one
    starts: list[int] = field(default_factory=list)  # of each row: the place of the first of them in its cache
    positions: list[int] = field(default_factory=list)  # [T]
    parents: list[int] = field(default_factory=list)  # [T], of each the place of the token before it in its cache
    wanted: list[int] = field(default_factory=list)  # of the T tokens those after which logits are wanted
    blocks: list[list[np.ndarray]] = field(default_factory=list)  # by group, by KV cache group: [rows, columns] int32
    sharing: list[list[SharedRows]] = field(default_factory=list)  # by group that drafts into trees, by KV cache group

    def add_pending(self, forest_step: ForestStep, most: int | None = None) -> None:
        """Compute the tokens that lead up to the roots, with logits after these; or only the first `most` of them."""
        for tokens in forest_step.pending:
            self.add_sequence(tokens[:most], forest_step.start + 1 - len(tokens))
            if most is None:
                self.wanted.append(len(self.positions) - 1)
        self.blocks.append(forest_step.blocks)

    def add_layer(self, forest_step: ForestStep) -> None:
        """Compute the newest layer of a forest, each node at the end of its tree."""
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
        num_shared, trees = forest_step.step.num_shared, forest_step.trees(firsts)
        assert num_shared is not None
        self.sharing.append([SharedRows(at, count, trees) for count in num_shared])

    def add_sequence(self, tokens: Sequence[int], start: int) -> None:
        """Compute tokens of one row, from place `start` of its cache on. Its `blocks` are the caller's to add."""
        end = start + len(tokens)
        self._add_row(tokens, start, range(start, end), range(start - 1, end - 1))

    def _add_row(self, tokens: Sequence[int], start: int, positions: Sequence[int], parents: Sequence[int]) -> None:
        self.tokens.append([*tokens])
        self.starts.append(start)
        self.positions += positions
        self.parents += parents

    @cached_property
    def lengths(self) -> np.ndarray:
        """[rows] int32 tokens of each."""
        return np.array([len(row) for row in self.tokens], dtype=np.int32)

    @cached_property
    def tables(self) -> list[np.ndarray]:
        """By KV cache group: [rows, columns] int32."""
        tables = []
        for of_table in zip(*self.blocks, strict=True):
            columns = max(table.shape[1] for table in of_table)
            tables.append(np.concatenate([np.pad(t, ((0, 0), (0, columns - t.shape[1]))) for t in of_table]))
        return tables


class DraftModel:
    """The draft model of a runner. Its layers lie in the same KV blocks as the target's.

    Args:
        runner: A runner whose engine has a draft model.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        assert isinstance(runner.speculator, DraftModelSpeculator)
        self._runner = runner
        self._speculator = runner.speculator

    def logits(self, batch: DraftBatch) -> torch.Tensor:
        """Compute tokens, write their KV, and return [wanted, V] what may come after some of them."""
        hidden, wanted = self._forward(batch)
        return self._speculator.model.compute_logits(hidden[wanted])

    def forward(self, batch: DraftBatch) -> torch.Tensor:
        """Compute tokens, write their KV, and return [T, H]."""
        return self._forward(batch)[0]

    def _forward(self, batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H] of all tokens, and [wanted] int64 after which of them logits are wanted."""
        config, lengths, starts = self._runner.kv_cache_config, batch.lengths, np.array(batch.starts)
        ends = (starts + lengths).astype(np.int32)
        query_starts = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        tokens = np.fromiter((token for row in batch.tokens for token in row), dtype=np.int32)
        of_batch = [self._slots(batch, spans(starts, lengths)), np.array(batch.positions), query_starts, ends, tokens]
        on_device = uploaded_together([*of_batch, np.array(batch.wanted, np.int64), *batch.tables], self._runner.device)
        slot_mappings, positions, query_starts_there, ends_there, token_ids, wanted, *tables = on_device
        self._announce_trees(batch)
        metadata = build_attn_metadata(
            attn_groups=self._speculator.attn_groups,
            num_reqs=len(lengths),
            num_tokens=len(batch.positions),
            query_start_loc_gpu=query_starts_there,
            query_start_loc_cpu=torch.from_numpy(query_starts),
            max_query_len=int(lengths.max()),
            seq_lens=ends_there,
            max_seq_len=int(ends.max()),
            block_tables=tables,
            slot_mappings=slot_mappings,
            kv_cache_config=config,
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            positions=positions,
        )
        by_layer = build_slot_mappings_by_layer(slot_mappings, config)
        return self._run(batch, token_ids, positions, metadata, by_layer), wanted

    def _run(
        self, batch: DraftBatch, token_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any
    ) -> torch.Tensor:
        """[T, H] of the tokens of a batch, T each; `metadata` and `slots` are by layer."""
        assert isinstance(self._speculator, StandaloneARSpeculator)
        return self._speculator._run_model(token_ids, positions, metadata, slots, None)

    def _slots(self, batch: DraftBatch, places: np.ndarray) -> np.ndarray:
        """[KV cache groups, T] int64 where places [T] of a batch's rows lie, a place for each token."""
        row = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
        tables = zip(batch.tables, self._runner.block_tables.block_sizes, strict=True)
        return np.stack([table[row, places // size].astype(np.int64) * size + places % size for table, size in tables])

    def _announce_trees(self, batch: DraftBatch) -> None:
        """Tell the builders of its layers which rows are trees, if any are."""
        for number, attn_groups in enumerate(self._speculator.attn_groups if batch.sharing else ()):
            for attn_group in attn_groups:
                builder = attn_group.get_metadata_builder(0)
                assert isinstance(builder, SharesPrefixes)
                builder.groups = [of_group[number] for of_group in batch.sharing]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self._runner.device)


def draft_logits(runner: Any) -> Iterator[torch.Tensor]:
    """Logits as the draft model, or the head, of `BeamModelRunner` makes them, if forests grow from what it says."""
    speculator = runner.speculator
    if runner.drafter is not None and isinstance(speculator, DraftModelSpeculator):
        hidden = torch.zeros(1, speculator.hidden_size, dtype=speculator.dtype, device=runner.device)
        yield speculator.model.compute_logits(hidden)
