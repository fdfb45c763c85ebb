"""What requests ask to be done to their logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.support.batches import MAX_LEN, NUM_SLOTS, VOCAB_SIZE, Batch, batches, few
from tests.support.interpreter import Interpreter

pytestmark = pytest.mark.slow

SAMPLE = "vllm.v1.worker.gpu.sample."
NUM_WORDS = -(-VOCAB_SIZE // 32)


def sometimes(batch: Batch, values: torch.Tensor, otherwise: float) -> torch.Tensor:
    """Of half of the slots, these values."""
    return torch.where(batch.floats(len(values)) < 0.5, values, otherwise)


def bits(batch: Batch, num_rows: int) -> torch.Tensor:
    return batch.integers(num_rows, NUM_WORDS, low=-(2**31), high=2**31)


@few
@given(batches())
def test_temperatures(interpreter: Interpreter, batch: Batch) -> None:
    temperature = sometimes(batch, batch.floats(NUM_SLOTS) + 0.5, 0.0)
    interpreter.check(
        SAMPLE + "gumbel:apply_temperature", batch.logits(), batch.expanded_idx_mapping, temperature, tolerance=1e-6
    )


@few
@given(batches())
def test_min_p(interpreter: Interpreter, batch: Batch) -> None:
    min_p = sometimes(batch, batch.floats(NUM_SLOTS) * 0.3, 0.0)
    interpreter.check(SAMPLE + "min_p:apply_min_p", batch.logits(), batch.expanded_idx_mapping, min_p)


@few
@given(batches())
def test_penalties_count_outputs_prompts_and_drafts(interpreter: Interpreter, batch: Batch) -> None:
    interpreter.check(
        SAMPLE + "penalties:apply_penalties",
        batch.logits(),
        batch.expanded_idx_mapping,
        batch.integers(batch.num_logits, high=3),  # so that drafts repeat themselves
        batch.expanded_local_pos,
        sometimes(batch, batch.floats(NUM_SLOTS) + 0.7, 1.0),
        sometimes(batch, batch.floats(NUM_SLOTS) - 0.5, 0.0),
        sometimes(batch, batch.floats(NUM_SLOTS) - 0.5, 0.0),
        bits(batch, NUM_SLOTS),
        batch.integers(NUM_SLOTS, VOCAB_SIZE, high=2),
        tolerance=1e-5,
    )


@few
@given(batches(max_drafts=0))
def test_prompts_are_marked_and_outputs_counted(interpreter: Interpreter, batch: Batch) -> None:
    prompt_len = batch.integers(NUM_SLOTS, low=1, high=20)
    interpreter.check(
        SAMPLE + "penalties:bincount",
        batch.idx_mapping,
        batch.integers(NUM_SLOTS, MAX_LEN),
        prompt_len,
        prompt_len + batch.integers(NUM_SLOTS, high=20),
        bits(batch, NUM_SLOTS),
        batch.integers(NUM_SLOTS, VOCAB_SIZE, high=2),
        MAX_LEN,
    )


def lists(batch: Batch, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tokens are on a list of each slot, and which."""
    tokens = batch.random.permuted(torch.arange(VOCAB_SIZE).expand(NUM_SLOTS, -1).numpy(), axis=1)
    counts = batch.integers(NUM_SLOTS, high=longest + 1)
    return sometimes(batch, counts, 0).int(), torch.from_numpy(tokens[:, :longest].copy()).int()


@few
@given(batches())
def test_allowed_tokens_biases_and_stop_tokens(interpreter: Interpreter, batch: Batch) -> None:
    num_stops, stops = lists(batch, 8)
    interpreter.check(
        SAMPLE + "logit_bias:apply_logit_bias",
        batch.logits(),
        batch.expanded_idx_mapping,
        batch.integers(batch.num_logits, high=10, dtype=torch.int64),
        *lists(batch, 6),
        *lists(batch, 9),
        batch.floats(NUM_SLOTS, 9),
        batch.integers(NUM_SLOTS, high=12),
        num_stops,
        batch.integers(NUM_SLOTS, high=2),
        stops,
        False,
    )


@few
@given(batches())
def test_stop_tokens_are_not_banned_if_nothing_else_is_left(interpreter: Interpreter, batch: Batch) -> None:
    _, tokens = lists(batch, 4)
    nothing = torch.zeros(NUM_SLOTS, dtype=torch.int32)
    interpreter.check(
        SAMPLE + "logit_bias:apply_logit_bias",
        torch.where(batch.floats(batch.num_logits, VOCAB_SIZE) < 0.4, float("-inf"), batch.logits()),
        batch.expanded_idx_mapping,
        batch.integers(batch.num_logits, high=10, dtype=torch.int64),
        nothing + 3,  # allowed
        tokens,
        nothing,
        tokens,
        batch.floats(NUM_SLOTS, 4),
        nothing + 8,  # the least length
        batch.integers(NUM_SLOTS, low=2, high=5),  # stop tokens
        batch.integers(NUM_SLOTS, high=2),
        tokens,
        True,
    )


@few
@given(batches())
def test_bad_words_are_not_completed(interpreter: Interpreter, batch: Batch) -> None:
    num_tokens = int(batch.random.integers(1, 4))
    num_words = batch.integers(NUM_SLOTS, high=8)
    offsets = torch.zeros(NUM_SLOTS, 9, dtype=torch.int32)
    offsets[:, 1:] = batch.integers(NUM_SLOTS, 8, low=1, high=4).cumsum(1)
    prompt_len = batch.integers(NUM_SLOTS, low=3, high=6)
    interpreter.check(
        SAMPLE + "bad_words:apply_bad_words",
        batch.logits()[:, :num_tokens].clone(),
        batch.expanded_idx_mapping,
        batch.integers(NUM_SLOTS, 24, high=num_tokens),
        offsets,
        num_words,
        batch.integers(NUM_SLOTS, MAX_LEN, high=num_tokens),
        prompt_len,
        prompt_len + batch.integers(NUM_SLOTS, high=4),
        batch.integers(batch.num_logits, high=num_tokens),
        batch.expanded_local_pos,
        max(1, int(num_words[batch.idx_mapping].max())),
    )


@few
@given(batches(max_drafts=2))
def test_grammars_ban_what_their_bits_do_not_allow(interpreter: Interpreter, batch: Batch) -> None:
    """Triton's interpreter cannot run this kernel."""
    from vllm.v1.worker.gpu.structured_outputs import _apply_grammar_bitmask_kernel

    requests = [row for row in range(len(batch.idx_mapping)) if batch.random.random() < 0.7] or [0]
    mapping = [(request, place) for request in requests for place in range(3)]  # there may be fewer places
    masks, logits = bits(batch, len(mapping)), batch.logits()
    expected = logits.clone()
    for (request, place), mask in zip(mapping, masks.tolist(), strict=True):
        if place <= batch.num_drafts[request]:
            row = int(batch.cu_num_logits[request]) + place
            for token in range(VOCAB_SIZE):
                if not mask[token // 32] >> token % 32 & 1:
                    expected[row, token] = float("-inf")
    indices = torch.tensor([request * 3 + place for request, place in mapping], dtype=torch.int32)
    _apply_grammar_bitmask_kernel[(len(masks), 1)](
        logits, logits.stride(0), indices, batch.cu_num_logits, masks, masks.stride(0), VOCAB_SIZE,
        MASK_STRIDE=3, BLOCK_SIZE=8192,
    )  # fmt: skip
    assert logits.equal(expected)
