"""Inputs of draft models and heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import MAX_LEN, NUM_SLOTS, Batch, batches, few
from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow

HEAD = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator:"


@few
@given(batches())
def test_a_draft_model_reads_what_was_accepted_and_the_newest_token(interpreter: Interpreter, batch: Batch) -> None:
    num_rows, num_expanded = len(batch.idx_mapping), batch.num_tokens + len(batch.idx_mapping)
    buffers = SimpleNamespace(query_start_loc=batch.integers(NUM_SLOTS + 1), seq_lens=batch.integers(NUM_SLOTS))
    given_batch = SimpleNamespace(
        num_reqs=num_rows,
        num_tokens=batch.num_tokens,
        query_start_loc_np=batch.query_start_loc.numpy(),
        input_ids=batch.integers(batch.num_tokens),
        positions=batch.integers(batch.num_tokens, low=MAX_LEN - 8, high=MAX_LEN, dtype=torch.int64),
        idx_mapping=batch.idx_mapping,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.integers(num_rows, low=MAX_LEN - 8, high=MAX_LEN + 1),
    )
    interpreter.check(
        "vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator:prepare_prefill_inputs",
        buffers,
        given_batch,
        batch.integers(NUM_SLOTS, 1, dtype=torch.int64),
        torch.from_numpy(batch.random.integers(0, batch.lengths)),
        batch.integers(num_expanded + 2),
        batch.integers(num_expanded + 2, dtype=torch.int64),
        batch.integers(NUM_SLOTS, dtype=torch.int64),
        NUM_SLOTS,
        MAX_LEN,
    )


@few
@given(batches())
def test_a_head_reads_what_follows_each_accepted_token(interpreter: Interpreter, batch: Batch) -> None:
    num_rows, num_sampled = len(batch.idx_mapping), batch.integers(len(batch.idx_mapping), high=2)
    buffers = SimpleNamespace(
        input_ids=batch.integers(batch.num_tokens + 2),
        positions=batch.integers(batch.num_tokens + 2, dtype=torch.int64),
        query_start_loc=batch.integers(NUM_SLOTS + 1),
        seq_lens=batch.integers(NUM_SLOTS),
    )
    given_batch = SimpleNamespace(
        num_reqs=num_rows,
        input_ids=batch.integers(batch.num_tokens),
        positions=batch.integers(batch.num_tokens, dtype=torch.int64),
        idx_mapping=batch.idx_mapping,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.integers(num_rows),
    )
    num_rejected = torch.from_numpy(batch.random.integers(0, batch.lengths))
    last, step = batch.integers(NUM_SLOTS, dtype=torch.int64), torch.ones((), dtype=torch.int64)
    newest, following = batch.integers(NUM_SLOTS, 1, dtype=torch.int64), batch.integers(1, NUM_SLOTS)
    interpreter.check(
        HEAD + "prepare_prefill_inputs",
        *(last, step, buffers, given_batch, num_sampled, num_rejected, newest, following, NUM_SLOTS),
    )


@few
@given(batches(), st.booleans(), st.integers(0, 2))
def test_a_head_goes_on_from_its_draft_and_its_own_states(
    interpreter: Interpreter, batch: Batch, advances: bool, step: int
) -> None:
    num_rows, num_steps, longest = len(batch.idx_mapping), 3, 16
    drafts, current = batch.integers(num_rows, num_steps, dtype=torch.int64), torch.tensor(step)
    buffers = SimpleNamespace(
        input_ids=batch.integers(NUM_SLOTS),
        positions=batch.integers(NUM_SLOTS, high=longest, dtype=torch.int64),
        query_start_loc=batch.integers(NUM_SLOTS + 1),
        seq_lens=batch.integers(NUM_SLOTS, high=longest + 1),
    )
    keys, lengths = batch.integers(NUM_SLOTS, dtype=torch.int64), batch.integers(num_rows, low=8, high=longest + 1)
    rejected = batch.integers(num_rows, high=4)
    first = drafts[:, 0], lengths, rejected, buffers, keys, longest, NUM_SLOTS, advances
    interpreter.check(HEAD + "prepare_decode_inputs", *first)
    states, own = torch.zeros(NUM_SLOTS, 5), torch.rand(num_rows, 5)
    output = batch.integers(NUM_SLOTS, num_steps, dtype=torch.int64)
    later = drafts[:, 1].clone(), current, own, output, states, buffers, keys, num_rows, longest, num_steps, advances
    interpreter.check(HEAD + "update_draft_inputs", *later)
