"""What vLLM drafts for ordinary requests by n-grams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import MAX_LEN, NUM_SLOTS, Batch, batches, few
from tests.support.interpreter import Interpreter
from vllm_trie.worker.cpu.ngram import after_ngram_match_on_cpu

pytestmark = pytest.mark.slow


def run_propose(
    all_token_ids: torch.Tensor, total_len: torch.Tensor, idx_mapping: torch.Tensor, num_sampled: torch.Tensor,
    last_sampled: torch.Tensor, ngrams: tuple[int, int], num_drafts: int,
) -> torch.Tensor:  # fmt: skip
    """What vLLM's speculator proposes for a batch."""
    from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=ngrams[0], prompt_lookup_max=ngrams[1], num_speculative_tokens=num_drafts
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=NUM_SLOTS),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
    )
    states: Any = SimpleNamespace(
        all_token_ids=SimpleNamespace(gpu=all_token_ids), total_len=SimpleNamespace(gpu=total_len)
    )
    speculator = NgramGPUSpeculator(config, torch.device("cpu"), states)
    batch: Any = SimpleNamespace(num_reqs=len(idx_mapping), idx_mapping=idx_mapping)
    # Metadata, slots and hidden states of the forward, rejected drafts, and what only draft models read.
    drafts = speculator.propose(
        batch, None, None, None, None, num_sampled, None, last_sampled, None, None, None, dp_sync_state=None
    )
    return drafts.clone()


@few
@given(batches(), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_rows_are_drafted_what_came_after_their_newest_tokens(
    interpreter: Interpreter, batch: Batch, shortest: int, more: int, num_drafts: int
) -> None:
    tokens = batch.integers(NUM_SLOTS, MAX_LEN, high=3)
    lengths = batch.integers(NUM_SLOTS, low=1, high=MAX_LEN + 1)
    newest = tokens[torch.arange(NUM_SLOTS), lengths.long() - 1].long()[:, None]
    num_sampled = batch.integers(len(batch.idx_mapping), high=3)
    interpreter.check(
        "tests.worker.cpu.test_ngram:run_propose",
        tokens, lengths, batch.idx_mapping, num_sampled, newest, (shortest, shortest + more), num_drafts,
    )  # fmt: skip


def by_loop(tokens: list[int], shortest: int, longest: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[len(tokens) - length :]:
                return tokens[start + length :]
    return []


@settings(max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 3))
def test_the_longest_match_counts_then_the_latest(tokens: list[int], shortest: int, more: int) -> None:
    found = after_ngram_match_on_cpu(np.array(tokens, np.int32), shortest, shortest + more)
    assert found.tolist() == by_loop(tokens, shortest, shortest + more)
