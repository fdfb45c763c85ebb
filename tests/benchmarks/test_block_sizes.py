"""Forks replayed on tries of other block sizes hold what beams that part there hold."""

from __future__ import annotations

import random
from itertools import count

import numpy as np
import pytest

from benchmarks.tables.block_sizes import SIZES, Operation, recorded, replay
from benchmarks.watch import watched
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engines
from tests.support.running import trained_prompts
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

WIDTH, NUM_STEPS = 4, 60


def random_search(seed: int) -> list[Operation]:
    """What a search of `WIDTH` beams does to its trie; survivors keep their rows."""
    draw = random.Random(seed)
    operations: list[Operation] = [("fan_out", (np.arange(WIDTH)[:, None],))]
    for _ in range(NUM_STEPS):
        survivors = draw.sample(range(WIDTH), draw.randint(1, WIDTH))
        parents = [row if row in survivors else draw.choice(survivors) for row in range(WIDTH)]
        operations += [("fork", (np.array(parents),)), ("grow", ())]
    return operations


def live_by_histories(operations: list[Operation], num_tokens: int, block_size: int) -> list[int]:
    """Blocks that beams must hold: equal beginnings of whole blocks once, and a tail for each."""
    ids, live, rows = count(), [], [[-1] * num_tokens for _ in range(WIDTH)]
    for name, args in operations:
        if name == "fork":
            rows = [rows[parent] for parent in args[0]]
            continue
        rows = [[*row, next(ids)] for row in rows]
        num_full, partial = divmod(len(rows[0]), block_size)
        full = {tuple(row[: depth * block_size]) for row in rows for depth in range(1, num_full + 1)}
        live.append(len(full) + (WIDTH if partial else 0))
    return live


@pytest.mark.parametrize("size", SIZES)
def test_a_replay_holds_each_common_beginning_of_whole_blocks_once(size: int) -> None:
    for seed, num_tokens in enumerate((1, 7, 8, 31, 32, 33, 64)):
        operations = random_search(seed)
        replayed = replay(operations, num_tokens, size)
        assert replayed.live == live_by_histories(operations, num_tokens, size)
        lengths = range(num_tokens + 1, num_tokens + 2 + NUM_STEPS)
        assert replayed.unshared == [WIDTH * -(-length // size) for length in lengths]


def test_blocks_of_one_token_need_no_copies_and_larger_ones_hold_more() -> None:
    entries = [(size * max(one.live), one.num_copied) for size in SIZES for one in [replay(random_search(0), 40, size)]]
    assert entries[0][1] == 0 < entries[1][1]
    assert [held for held, _ in entries] == sorted(held for held, _ in entries)


@pytest.mark.nightly
def test_in_the_engines_own_size_a_replay_counts_what_the_engine_counted(engines: Engines) -> None:
    llm = engines(TRAINED_TARGET, enable_prefix_caching=False).llm
    for prompt in trained_prompts([BLOCK_SIZE - 1, BLOCK_SIZE, 40]):
        with recorded() as operations:
            steps = watched(llm, prompt, beam_params(WIDTH, max_tokens=70, ignore_eos=True), WIDTH)
        assert replay(operations, len(prompt), BLOCK_SIZE).live == [live for live in steps.live if live]
