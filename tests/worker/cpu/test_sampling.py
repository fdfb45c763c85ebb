"""Draws, log-probabilities and the verification of drafts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.support.batches import NUM_SLOTS, VOCAB_SIZE, Batch, batches, few
from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow

SAMPLE = "vllm.v1.worker.gpu.sample."
SPEC_DECODE = "vllm.v1.worker.gpu.spec_decode."


def seeds_of(batch: Batch) -> torch.Tensor:
    return batch.integers(NUM_SLOTS, low=-(2**63), high=2**63, dtype=torch.int64)


def temperatures_of(batch: Batch) -> torch.Tensor:
    return torch.where(
        batch.floats(NUM_SLOTS) < batch.random.choice([0, 0.4, 1]), 0.0, 3 * batch.floats(NUM_SLOTS) + 0.2
    )


@few
@given(batches())
def test_a_seed_draws_the_same_tokens(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        SAMPLE + "gumbel:gumbel_sample",
        batch.logits(),
        batch.expanded_idx_mapping,
        temperatures_of(batch),
        seeds_of(batch),
        batch.integers(batch.num_logits, high=2**20, dtype=torch.int64),
        False,  # apply_temperature
        False,  # is_drafting
        None,
        None,
        batch.flag(),  # use_fp64
    )


@few
@given(batches())
def test_logprobs_and_ranks_of_the_best_tokens(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        "tests.worker.cpu.test_sampling:topk_scores",
        batch.logits(),
        int(batch.random.integers(4)),
        batch.integers(batch.num_logits, dtype=torch.int64),
        [],
        batch.expanded_idx_mapping,
        tolerance=1e-5,
    )


@few
@given(batches())
def test_logprobs_of_tokens_that_requests_name(interpreter: Interpreter, batch: Batch) -> None:
    named = [(slot, batch.integers(1 + slot % 3).tolist()) for slot in batch.idx_mapping.tolist()[::2]]
    interpreter.check(
        "tests.worker.cpu.test_sampling:topk_scores",
        batch.logits(),
        int(batch.random.integers(4)),
        batch.integers(batch.num_logits, dtype=torch.int64),
        named,
        batch.expanded_idx_mapping,
        tolerance=1e-5,
    )


def topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled: torch.Tensor,
    named: list[tuple[int, list[int]]],
    idx_mapping: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState, compute_topk_scores

    state = LogprobTokenIdsState(NUM_SLOTS, torch.device("cpu"))
    for slot, token_ids in named:
        state.num_token_ids.np[slot] = len(token_ids)
        state.token_ids.stage_write(slot, 0, token_ids)
    state.apply_staged_writes()
    longest = max((len(token_ids) for _, token_ids in named), default=0)
    scores = compute_topk_scores(logits, num_logprobs, sampled, None, state, idx_mapping, longest)
    return scores.logprob_token_ids, scores.logprobs, scores.selected_token_ranks


@few
@given(batches(max_drafts=0))
def test_logits_that_are_no_numbers_are_counted(interpreter: Interpreter, batch: Batch) -> None:
    """Triton's interpreter lacks a function that this kernel needs."""
    from vllm.v1.worker.gpu.metrics.logits import get_num_nans

    is_nan = batch.floats(batch.num_logits, VOCAB_SIZE) < 0.01
    assert get_num_nans(batch.logits().masked_fill(is_nan, float("nan"))).equal(is_nan.sum(1).int())


@few
@given(batches())
def test_drafts_within_a_prompt_are_marked(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        SPEC_DECODE + "rejection_sampler:gather_draft_sampled",
        batch.integers(batch.num_logits + 4),
        batch.integers(batch.num_logits + 4, high=6, dtype=torch.int64),
        torch.from_numpy(batch.random.permutation(batch.num_logits + 4)[: batch.num_logits]),
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        batch.integers(NUM_SLOTS, high=6),
    )


def flatten(sampled: torch.Tensor, num_sampled: torch.Tensor, cu_num_logits: torch.Tensor) -> torch.Tensor:
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import _flatten_sampled_kernel

    flat = torch.zeros(int(cu_num_logits[-1]), dtype=torch.int64)
    _flatten_sampled_kernel[(len(sampled),)](flat, sampled, sampled.stride(0), num_sampled, cu_num_logits, num_warps=1)
    return flat


@few
@given(batches(max_drafts=2))
def test_sampled_tokens_are_laid_out_as_logits_are(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        "tests.worker.cpu.test_sampling:flatten",
        batch.integers(len(batch.idx_mapping), 3, dtype=torch.int64),
        torch.from_numpy(batch.random.integers(0, batch.num_drafts + 2)).int(),
        batch.cu_num_logits,
    )


@settings(few, max_examples=24)
@given(batches(max_drafts=2))
def test_a_seed_takes_the_same_drafts_and_tokens(interpreter: Interpreter, batch: Batch) -> None:
    logits = batch.logits() * 3
    drafts = batch.integers(batch.num_logits)
    likely = logits.argmax(-1).roll(1).int()
    drafts = torch.where(batch.floats(batch.num_logits) < 0.7, likely, drafts)
    drafts = torch.where(batch.floats(batch.num_logits) < 0.1, -1, drafts)
    interpreter.check(
        "tests.worker.cpu.test_sampling:verify_drafts",
        logits,
        None,
        drafts,
        batch.cu_num_logits,
        batch.integers(batch.num_logits, high=2**20, dtype=torch.int64),
        batch.idx_mapping,
        batch.expanded_idx_mapping,
        batch.expanded_local_pos,
        temperatures_of(batch),
        seeds_of(batch),
        2,
        None,
        batch.flag(),  # use_fp64
    )


def verify_drafts(*arguments: object) -> list[list[int]]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    sampled, num_sampled = rejection_sampler.rejection_sample(*arguments)
    return [tokens[:count] for tokens, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True)]
