"""Inputs of a forward pass, and what a step changes in slots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.support.batches import MAX_LEN, NUM_SLOTS, VOCAB_SIZE, Batch, batches, few
from tests.support.interpreter import Interpreter
from vllm_trie.compat.sources import installed_vllm, minor_vllm_version

pytestmark = pytest.mark.slow

INPUT_BATCH = "vllm.v1.worker.gpu.input_batch:"


@few
@given(batches())
def test_prefilling_rows_get_the_tokens_of_their_prompts(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        INPUT_BATCH + "prepare_prefill_inputs",
        batch.integers(batch.num_tokens + 2),
        batch.integers(1 + batch.flag(), NUM_SLOTS),
        batch.idx_mapping,
        batch.query_start_loc,
        batch.integers(NUM_SLOTS, MAX_LEN),
        batch.integers(NUM_SLOTS, low=3, high=20),
        batch.integers(NUM_SLOTS, high=20),
    )


@few
@given(batches())
def test_positions_go_on_where_a_row_has_been_computed_to(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        INPUT_BATCH + "prepare_pos_seq_lens",
        batch.idx_mapping,
        batch.query_start_loc,
        batch.integers(NUM_SLOTS),
        batch.integers(batch.num_tokens + 2, dtype=torch.int64),
        batch.integers(NUM_SLOTS),
    )


def rope_positions(
    prefill_positions: torch.Tensor, deltas: torch.Tensor, positions: torch.Tensor, *arguments: torch.Tensor
) -> torch.Tensor:
    """What a batch sees of the positions that lie in the slots."""
    from vllm.v1.worker.gpu.mm.rope import RopeState

    num_dims, num_tokens = prefill_positions.shape[1], positions.shape[1]
    state = RopeState(num_dims, NUM_SLOTS, num_tokens - 1, MAX_LEN, torch.device("cpu"))
    state.prefill_positions.gpu.copy_(prefill_positions.flatten(0, 1))
    state.prefill_delta.np[:] = deltas
    state.apply_staged_writes()
    state.positions.copy_(positions)
    state.prepare_positions(*arguments)
    return state.positions


@few
@given(batches())
def test_positions_of_a_prompt_are_given_and_go_on_from_their_last(interpreter: Interpreter, batch: Batch) -> None:
    num_dims = 3 + batch.flag()
    interpreter.check(
        "tests.worker.cpu.test_inputs:rope_positions",
        batch.integers(NUM_SLOTS, num_dims, MAX_LEN),
        batch.integers(NUM_SLOTS, low=-9, high=9),
        batch.integers(num_dims, batch.num_tokens + 3, dtype=torch.int64),
        batch.idx_mapping,
        batch.query_start_loc,
        batch.integers(NUM_SLOTS, low=3, high=20),
        batch.integers(NUM_SLOTS, low=9, high=30),
    )


@few
@given(batches())
def test_decoding_rows_get_their_newest_token_and_drafts(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        INPUT_BATCH + "combine_sampled_and_draft_tokens",
        batch.integers(batch.num_tokens + 2),
        batch.idx_mapping,
        batch.integers(NUM_SLOTS, 1, dtype=torch.int64),
        batch.query_start_loc,
        batch.integers(NUM_SLOTS, low=6, high=12),
        batch.integers(NUM_SLOTS, low=6, high=12),
        batch.integers(NUM_SLOTS, max(batch.max_drafts, 1), dtype=torch.int64),
        batch.cu_num_logits,
        batch.num_logits,
    )


@few
@given(batches(max_drafts=2))
def test_rows_of_logits_know_their_slots_and_places(interpreter: Interpreter, batch: Batch) -> None:
    slots, places = interpreter.check(
        INPUT_BATCH + "expand_idx_mapping", batch.idx_mapping, batch.num_logits, batch.cu_num_logits, 3
    )
    assert slots.equal(batch.expanded_idx_mapping)
    assert places.equal(batch.expanded_local_pos)


@few
@given(batches())
def test_rows_in_their_prefill_sample_nothing_and_reject_nothing(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        INPUT_BATCH + "get_num_sampled_and_rejected",
        torch.from_numpy(batch.random.integers(1, batch.num_drafts + 2)).int(),
        batch.integers(NUM_SLOTS, low=6, high=12),
        batch.cu_num_logits,
        batch.idx_mapping,
        batch.integers(NUM_SLOTS, low=6, high=12),
    )


@few
@given(batches())
def test_sampled_tokens_go_to_their_slots(interpreter: Interpreter, batch: Batch) -> None:
    num_sampled = torch.from_numpy(batch.random.integers(0, batch.num_drafts + 2)).int()
    drafts = [batch.integers(n, 3, dtype=torch.int64) for n in (len(batch.idx_mapping), NUM_SLOTS)]
    if batch.flag():
        batch.idx_mapping[-1] = -1
    interpreter.check(
        INPUT_BATCH + "post_update",
        batch.idx_mapping,
        batch.integers(NUM_SLOTS),
        batch.integers(NUM_SLOTS, 1, dtype=torch.int64),
        batch.integers(NUM_SLOTS, VOCAB_SIZE, high=3) if batch.flag() else None,
        batch.integers(len(batch.idx_mapping), batch.max_drafts + 1, dtype=torch.int64),
        num_sampled,
        torch.from_numpy(batch.num_drafts).int() + 1 - num_sampled,
        batch.query_start_loc if batch.flag() else None,
        batch.integers(NUM_SLOTS, MAX_LEN),
        batch.integers(NUM_SLOTS, low=1, high=40),
        *(drafts if minor_vllm_version(installed_vllm().version) != "0.32" else ()),
    )


@few
@given(batches())
def test_tokens_of_a_step_count_as_computed(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        INPUT_BATCH + "post_update_num_computed_tokens",
        batch.idx_mapping,
        batch.integers(NUM_SLOTS),
        batch.query_start_loc,
    )


@few
@given(batches())
def test_logprobs_of_a_prompt_are_of_the_tokens_that_follow(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        "vllm.v1.worker.gpu.sample.prompt_logprob:get_prompt_logprobs_token_ids",
        batch.num_tokens,
        batch.query_start_loc,
        batch.idx_mapping,
        batch.integers(NUM_SLOTS, high=30),
        batch.integers(NUM_SLOTS, MAX_LEN),
    )
