"""What the size of KV blocks does to sharing: the forks of real searches, replayed on tries of other block sizes.

An engine has one size, on CPUs a multiple of 32. Which tokens beams share does not depend on it, so the same forks tell
what blocks of any size would hold. Blocks of one token are the trie paper's trie.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, NamedTuple
from unittest import mock

from benchmarks.common import BLOCK_SIZE
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.significance import interval
from benchmarks.watch import watched
from vllm_trie import beam_params
from vllm_trie.trie.blocks import BlockTrie, trie_fan_out_blocks

SIZES = (1, 8, 16, 32, 64)
Operation = tuple[str, tuple[Any, ...]]  # a method of `BlockTrie`, and its arguments besides new blocks


class Replayed(NamedTuple):
    """What one search would hold in blocks of one size, each time that its rows have room for another token."""

    live: list[int]  # blocks
    unshared: list[int]  # blocks, if rows shared nothing
    num_copied: int  # tails, by all forks


@contextmanager
def recorded() -> Iterator[list[Operation]]:
    """What searches of engines in this process do to their tries."""
    operations = list[Operation]()

    def recording(name: str) -> Callable[..., Any]:
        method, takes_blocks = getattr(BlockTrie, name), name != "fork"

        def record(trie: BlockTrie, *args: Any) -> Any:
            operations.append((name, args[:-1] if takes_blocks else args))
            return method(trie, *args)

        return record

    with ExitStack() as patches:
        for name in ("fan_out", "grow", "fork"):
            patches.enter_context(mock.patch.object(BlockTrie, name, recording(name)))
        yield operations


def replay(operations: Sequence[Operation], num_tokens: int, block_size: int) -> Replayed:
    """Do to a trie of this block size what a search did to its own.

    Args:
        operations: From the fan-out on, as `recorded`.
        num_tokens: Of the prefix that fans out.
    """
    ids = count()
    trie = BlockTrie(block_size, [next(ids) for _ in range(-(-num_tokens // block_size))], num_tokens)
    found = Replayed([], [], 0)
    for name, args in operations:
        if name == "fork":
            trie.fork(*args)
            continue
        num_new = trie.blocks_to_grow() if name == "grow" else trie_fan_out_blocks(num_tokens, *args, block_size)
        getattr(trie, name)(*args, [next(ids) for _ in range(num_new)])
        found.live.append(trie.num_live_blocks)
        found.unshared.append(trie.width * -(-trie.num_tokens // block_size))
    return found._replace(num_copied=trie.counts.copied)


def cells(setting: Setting) -> list[Cell]:
    return [(width,) for width in setting.widths or setting.pick((3,), (3, 9), (3, 6, 9, 15))]


def measure(bench: Bench, width: int) -> Measured:
    """The same searches in blocks of every size; in the engine's own, what the engine counted."""
    setting = bench.setting
    llm = bench.engine(enable_prefix_caching=False)
    params = beam_params(width, max_tokens=setting.max_tokens or setting.pick(16, 64, 128), ignore_eos=True)
    replays: dict[int, list[Replayed]] = {size: [] for size in SIZES}
    prompts = bench.prompts(setting.pick(2, 3, 6))
    for prompt in prompts:
        with recorded() as operations:
            steps = watched(llm, prompt, params, width)
        for size, own in replays.items():
            own.append(replay(operations, len(prompt), size))
        assert max(replays[BLOCK_SIZE][-1].live) == max(steps.live), "the replay is not what the engine did"
    return Measured([_row(width, size, replays[size]) for size in SIZES])


def _row(width: int, size: int, searches: Sequence[Replayed]) -> Cell:
    peaks = [(max(one.live), max(one.unshared)) for one in searches]
    overlaps = [statistics.fmean(1 - a / b for a, b in zip(one.live, one.unshared, strict=True)) for one in searches]
    return (
        width,
        size,
        "the engine's" if size == BLOCK_SIZE else "the trie paper's" if size == 1 else "",
        statistics.fmean(size * live for live, _ in peaks),
        statistics.fmean(size * unshared for _, unshared in peaks),
        str(interval([live / unshared for live, unshared in peaks])),
        str(interval(overlaps)),
        statistics.fmean(one.num_copied / len(one.live) for one in searches),
        len(searches),
    )


TABLE = Table(
    "Sharing by block size",
    (
        "beams",
        "block size",
        "whose",
        "peak, KV entries",
        "unshared, KV entries",
        "M_T/M_B (95 %)",
        "overlap (95 %)",
        "tails copied per step",
        "n",
    ),
    cells,
    measure,
    f"natural prompts, one at a time; the engine has blocks of {BLOCK_SIZE} tokens, as vLLM's attention on CPUs takes "
    "multiples of 32; what other sizes would hold is counted by replaying the forks of the same searches; live blocks, "
    "as if dead ones were given back at once; M_T/M_B: mean ratio of peaks; overlap: share of unshared blocks that "
    "sharing saves, mean over steps; entries: blocks times their size",
)
