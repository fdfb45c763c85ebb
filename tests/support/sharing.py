"""Batches in which rows share their first KV blocks, and what attention of them must be, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st

from vllm_trie.worker.attention.shared_rows import SharedAttentionTokens, SharedRows, shared_attention_tokens


@dataclass
class Group:
    """Rows that share a prefix of so many blocks, then hold so many tokens of their own; each computes the last ones.

    `num_known` of the shared tokens are known to be shared; the kernel must take the others for the rows' own.
    """

    num_rows: int
    shared_blocks: int
    own_tokens: Sequence[int]  # by row
    computed: Sequence[int]  # by row, not more than its own
    known_blocks: int | None = None


class Batch:
    """Random keys, values and queries of groups and of ordinary rows, whose order is random, too."""

    def __init__(
        self,
        groups: Sequence[Group],
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        block_size: int,
        others: int = 0,
        seed: int = 0,
    ) -> None:
        random, choose = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        tables, lengths, counts, places = [], [], [], []
        num_blocks = 1
        for group in [*groups, *(Group(1, 0, [40 + 7 * n], [1 + 5 * n]) for n in range(others))]:
            shared = list(range(num_blocks, num_blocks + group.shared_blocks))
            num_blocks += len(shared)
            places.append(range(len(tables), len(tables) + group.num_rows))
            for own, computed in zip(group.own_tokens, group.computed, strict=True):
                num_own = -(-own // block_size)
                tables.append(shared + list(range(num_blocks, num_blocks + num_own)))
                num_blocks += num_own
                lengths.append(len(shared) * block_size + own)
                counts.append(computed)
        order, numbers = choose.permutation(len(tables)), np.append(0, 1 + choose.permutation(num_blocks - 1))
        place_of = order.argsort()
        self.tables = torch.zeros(len(tables), max(map(len, tables)), dtype=torch.int32)
        for place, row in enumerate(order):
            self.tables[place, : len(tables[row])] = torch.from_numpy(numbers[tables[row]])
        self.lengths = torch.tensor(lengths, dtype=torch.int32)[order]
        self.starts = torch.tensor([0, *np.cumsum(np.array(counts)[order])], dtype=torch.int32)
        self.rows = [
            SharedRows(
                place_of[list(of_group)],
                (group.shared_blocks if group.known_blocks is None else group.known_blocks) * block_size,
            )
            for group, of_group in zip(groups, places, strict=False)
        ]
        self.block_size, self.scale = block_size, head_size**-0.5
        shape = num_blocks * block_size, num_kv_heads, head_size
        self.keys, self.values = torch.randn(2, *shape, generator=random)
        self.queries = torch.randn(int(self.starts[-1]), num_heads, head_size, generator=random)
        self.num_blocks = num_blocks

    @property
    def shared(self) -> SharedAttentionTokens:
        """As the kernels take it."""
        return shared_attention_tokens(self.rows, self.starts.numpy(), self.lengths.numpy(), self.block_size)

    def slots(self, row: int) -> torch.Tensor:
        """[length], where the keys of a row are."""
        at = torch.arange(int(self.lengths[row]))
        return self.tables[row, at // self.block_size].long() * self.block_size + at % self.block_size

    def forget_unused(self) -> None:
        """Let whatever no row has written be no number."""
        used = torch.cat([self.slots(row) for row in range(len(self.lengths))])
        unused = torch.ones(len(self.keys), dtype=torch.bool)
        unused[used] = False
        self.keys[unused] = self.values[unused] = torch.nan

    def reference(self) -> torch.Tensor:
        """[tokens, heads, head size] float64, of all rows."""
        outputs, heads = [], self.queries.shape[1] // self.keys.shape[1]
        for row, (first, end) in enumerate(zip(self.starts[:-1], self.starts[1:], strict=True)):
            keys, values = (
                part[self.slots(row)].double().repeat_interleave(heads, 1) for part in (self.keys, self.values)
            )
            scores = torch.einsum("qhd,khd->hqk", self.queries[first:end].double(), keys) * self.scale
            count, length = int(end - first), len(keys)
            sees = torch.arange(length) <= torch.arange(length - count, length)[:, None]
            weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
        return torch.cat(outputs)

    def of_groups(self) -> torch.Tensor:
        """[tokens] bool, which of them rows of groups compute."""
        found = torch.zeros(len(self.queries), dtype=torch.bool)
        found[self.shared.places.astype(np.int64)] = True
        return found


@st.composite
def any_groups(
    draw: st.DrawFn, most_groups: int, most_rows: int, most_own: int, most_computed: int, most_blocks: int
) -> list[Group]:
    """Groups of so many rows at most, which have as many tokens of their own, compute and share as many at most."""
    groups = []
    for _ in range(draw(st.integers(1, most_groups))):
        num_rows = draw(st.integers(1, most_rows))
        own = draw(st.lists(st.integers(1, most_own), min_size=num_rows, max_size=num_rows))
        computed = [draw(st.integers(1, min(tokens, most_computed))) for tokens in own]
        blocks = draw(st.integers(0, most_blocks))
        groups.append(Group(num_rows, blocks, own, computed, draw(st.integers(0, blocks))))
    return groups
