"""What moves in KV caches: plans that the host makes, and forks, whose parents only the device knows.

On GPUs `worker.kv.copies` carries them out; elsewhere the host reads the parents, and torch and numpy do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker import launches
from vllm_trie.worker.kv.kv_caches import KVCaches

LARGE_BLOCK = 128  # tokens: from this block size on, a part of a block is copied faster than all of it


class KVPart(NamedTuple):
    """Copies of parts of blocks, in one KV cache group; no block is both source and destination."""

    number: int  # of the KV cache group
    pairs: np.ndarray  # [copies, 2] int64 blocks, from, to
    tokens: np.ndarray  # [copies, 2] int64, the first copied token in the block, and where the copied ones end


class KVMoves(NamedTuple):
    """Copies of blocks, and after these of tokens, which are read before anything is written."""

    blocks: np.ndarray  # [copies, 2] int64, from, to, in all layers
    tokens: Sequence[np.ndarray] = ()  # by KV cache group: [2, tokens] int64 slots, from, to
    parts: Sequence[KVPart] = ()  # of other blocks

    @classmethod
    def together(cls, plans: Sequence[KVMoves]) -> KVMoves:
        """Joins the plans of several groups of rows, each for all KV cache groups."""
        tokens = [np.hstack(of_number) for of_number in zip(*(plan.tokens for plan in plans), strict=True)]
        parts = [part for plan in plans for part in plan.parts]
        return cls(np.concatenate([plan.blocks for plan in plans]), tokens, parts)


def move_kv(moves: KVMoves, kv: KVCaches) -> None:
    """Carries out a plan, by kernels where there are some."""
    if launches.worker_runs_kernels_on(kv.device):
        launches.worker_module_for_gpus("worker.kv.copies").launch_kv_moves(moves, kv)
    else:
        move_kv_by_torch(moves, kv)


def move_kv_by_torch(moves: KVMoves, kv: KVCaches) -> None:
    """`move_kv` without Triton kernels: on hosts by numpy, which is faster there; on GPUs the kernels' reference."""
    moving = [(number, from_to) for number, from_to in enumerate(moves.tokens) if from_to.size]
    held = [(number, to, kv.read_tokens(number, from_)) for number, (from_, to) in moving]
    if len(moves.blocks):
        kv.copy_blocks(moves.blocks)
    for part in moves.parts:
        kv.copy_parts(*part)
    for of_group in held:
        kv.write_tokens(*of_group)


def kv_rows_of_groups(slots: Sequence[np.ndarray], num_common: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
    """[3, R] int64, what is known of rows before they continue others: `KVFork.rows` without the last count.

    Args:
        slots: [G, b] of the rows of equally wide groups; one array per width.
        num_common: [G] each, how many first tokens all histories of a group have in common.
    """
    rows, first = [np.empty((3, 0), np.int64)], 0
    for of_groups, of_prompts in zip(slots, num_common, strict=True):
        width, count = of_groups.shape[1], of_groups.size
        firsts = np.arange(first, first + count, width)
        rows.append(np.stack([of_groups.ravel(), firsts.repeat(width), np.repeat(of_prompts, width)]))
        first += count
    return np.concatenate(rows, axis=1)


class KVFork(NamedTuple):
    """R rows that continue histories of rows of their own group, possibly their own; on the device.

    A row that continues another is dead itself: no row is both source and destination, so copies may run in any order.
    """

    # [4, R] int64: slots, the first row of their group among the R, how many first tokens the histories of their group
    # have in common, and tokens of each history.
    rows: torch.Tensor
    parents: torch.Tensor  # [R] integers, the row of its group that each continues
    num_tokens_on_host: np.ndarray  # [R], the last row of `rows`

    @classmethod
    def of(
        cls, rows: np.ndarray, num_tokens: np.ndarray, parents: Sequence[torch.Tensor], device: torch.device
    ) -> KVFork:
        """Lets rows continue rows of their own group.

        Args:
            rows: [3, R], see `kv_rows_of_groups`.
            num_tokens: [R], of each history, all of them computed.
            parents: [G, b] each, on the device, the row of its group that each continues.
            device: The rows' device.
        """
        of_rows = torch.cat([chosen.flatten() for chosen in parents]) if len(parents) > 1 else parents[0].flatten()
        return cls(uploaded_for_search(np.vstack([rows, num_tokens]), device), of_rows, num_tokens)

    @property
    def sources(self) -> torch.Tensor:
        """[R] int64, the slots that they continue."""
        slots, firsts, *_ = self.rows
        return slots[firsts + self.parents]

    def moving(self) -> np.ndarray:
        """[4, rows] of those that continue another one: slots, sources, and the two counts.

        For host-readable devices.
        """
        rows = self.rows.cpu().numpy()
        sources = rows[0].take(rows[1] + self.parents.cpu().numpy())
        (which,) = (rows[0] != sources).nonzero()
        moving = rows.take(which, axis=1)
        moving[1] = sources[which]
        return moving


def fork_kv(fork: KVFork, tokens: torch.Tensor, kv: KVCaches) -> None:
    """Lets each row continue the history of its source: copies its tokens, full blocks, and contents of tail blocks.

    Args:
        fork: Rows that continue themselves stay unchanged.
        tokens: [slots, length] int32, of each slot.
        kv: The blocks, and the tables of the rows.
    """
    if launches.worker_runs_kernels_on(kv.device):
        launches.worker_module_for_gpus("worker.kv.copies").launch_kv_fork(fork, tokens, kv)
    elif (rows := fork.moving()).size:
        copy_kv_histories(rows, tokens, kv)
        move_kv_by_torch(kv_moves_of_tails(rows, kv), kv)


def copy_kv_histories(rows: np.ndarray, tokens: torch.Tensor, kv: KVCaches) -> None:
    """Copies tokens, and full blocks of all tables, from the source of each of `KVFork.moving` rows.

    Nobody reads tokens beyond a history; on the earlier stages of a pipeline, where vLLM may have written the next ones
    by now, nobody reads generated tokens at all.
    """
    num_common, num_tokens = rows[2:]
    slots, sources = kv.indices(*rows[:2])
    least, most = int(num_tokens.min()), int(num_tokens.max())
    history = kv.indexable(tokens)[:, num_common.min() : most]
    history[slots] = history[sources]
    for table, block_size, _ in kv.tables:
        num_columns, blocks = most // block_size, kv.indexable(table)
        if least // block_size == num_columns:
            full = blocks[:, :num_columns]
            full[slots] = full[sources]
        else:
            which, columns = (np.arange(num_columns) < (num_tokens // block_size)[:, None]).nonzero()
            to, from_, at = kv.indices(*rows[:2, which], columns)
            blocks[to, at] = blocks[from_, at]


def kv_moves_of_tails(rows: np.ndarray, kv: KVCaches) -> KVMoves:
    """Moves the contents of each source's partly filled tail blocks into the row's own.

    Of large blocks, as on hosts and for models with recurrent states, only what rows of a group do not have in common.
    """
    whole, parts = [np.empty((0, 2), np.int64)], list[KVPart]()
    for table, block_size, number in kv.tables:
        slots, sources, num_common, num_tokens = rows[:, rows[3] % block_size > 0]
        columns, blocks = num_tokens // block_size, table.cpu().numpy()
        pairs = np.array([blocks[sources, columns], blocks[slots, columns]], np.int64).T
        if block_size >= LARGE_BLOCK and kv.tokens_of_block[number]:
            tokens = np.array([num_common, num_tokens]) - columns * block_size
            parts.append(KVPart(number, pairs, np.maximum(tokens, 0).T))
        else:
            whole.append(pairs)
    return KVMoves(np.concatenate(whole), parts=parts)
