"""What the rules of timestamps allow is what transformers' processor allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from vllm_trie.search.constraints.suppression import SuppressionConstraint
from vllm_trie.search.constraints.timestamps import START, TimestampConstraint

EOS, TASK, NO_TIMESTAMPS, VOCAB = 5, 7, 8, 16
FIRST = NO_TIMESTAMPS + 1  # <|0.00|>
NEVER = -torch.inf

tokens = st.integers(0, VOCAB - 1)
bounds = st.none() | st.integers(0, VOCAB - FIRST)
prompts = st.lists(st.integers(0, EOS - 1) | st.integers(FIRST, VOCAB - 1), max_size=4)  # what follows the task
seeds = st.integers(0, 2**16)


@st.composite
def histories(draw: Any) -> torch.Tensor:
    """[2, 3, n], anything that rows might have taken, allowed or not."""
    return torch.from_numpy(draw(arrays(np.int64, (2, 3, draw(st.integers(0, 5))), elements=tokens)))


def processor(latest_first: int | None, begin_index: int, **options: bool) -> WhisperTimeStampLogitsProcessor:
    bound = {} if latest_first is None else {"max_initial_timestamp_index": latest_first}
    config = GenerationConfig(eos_token_id=EOS, no_timestamps_token_id=NO_TIMESTAMPS, **bound)
    return WhisperTimeStampLogitsProcessor(config, begin_index, **options)


def processed(processors: Any, logprobs: torch.Tensor, prompt: list[int], taken: torch.Tensor) -> torch.Tensor:
    """What processors make of log-probabilities [2, 3, V] after a prompt and the tokens [2, 3, n] of rows."""
    texts = torch.cat([torch.tensor(prompt).expand(6, -1), taken.flatten(0, 1)], dim=1)
    found: torch.Tensor = processors(texts, logprobs.flatten(0, 1))
    return found.view_as(logprobs)


def states_after(rules: Any, taken: torch.Tensor) -> torch.Tensor:
    states = rules.begin(3, taken.device).expand(2, -1)
    for newest in taken.unbind(-1):
        states = rules.advance(states, newest)
    return states


def some_logprobs(seed: int) -> torch.Tensor:
    """[2, 3, V], sharp or flat, some of them -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 3, VOCAB, generator=generator) * 4 * torch.rand(2, 3, 1, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = NEVER
    return logits.log_softmax(-1)


@given(histories(), prompts, bounds, seeds)
def test_what_it_leaves_out_is_what_transformers_leaves_out(
    taken: torch.Tensor, said: list[int], latest_first: int | None, seed: int
) -> None:
    """Rows count their tokens from the task on, and what was said before it does not count."""
    logprobs, prompt = some_logprobs(seed), [FIRST, 0, TASK, *said]
    before, rules = logprobs.clone(), TimestampConstraint.after(prompt, EOS, NO_TIMESTAMPS, latest_first)
    restricted = rules.restrict(logprobs, states_after(rules, taken))
    assert torch.equal(restricted, processed(processor(latest_first, 3), logprobs, prompt, taken))
    assert torch.equal(logprobs, before), "what is reported elsewhere stays"


@given(histories(), prompts, bounds)
def test_a_draft_leads_on_unless_log_probabilities_say_otherwise(
    taken: torch.Tensor, said: list[int], latest_first: int | None
) -> None:
    prompt, rules = [TASK, *said], TimestampConstraint.after([TASK, *said], EOS, NO_TIMESTAMPS, latest_first)
    logprobs, states = torch.zeros(2, 3, VOCAB), states_after(rules, taken)
    without_sums = processor(latest_first, 1, _detect_timestamp_from_logprob=False)
    allowed = processed(without_sums, logprobs, prompt, taken) > NEVER
    for token in range(VOCAB):
        assert torch.equal(rules.leads_on(states, torch.full((2, 3), token)), allowed[..., token])


@given(histories(), seeds)
def test_suppressed_tokens_are_no_text_that_timestamps_compete_with(taken: torch.Tensor, seed: int) -> None:
    logprobs, prompt = some_logprobs(seed), [0, TASK]
    anywhere, at_first = (1, 3), (EOS, FIRST)
    theirs = LogitsProcessorList(
        [
            SuppressTokensAtBeginLogitsProcessor([*at_first], len(prompt), device="cpu"),
            SuppressTokensLogitsProcessor([*anywhere], device="cpu"),
            processor(None, len(prompt)),
        ]
    )
    restricted = logprobs
    for rules in (
        SuppressionConstraint(anywhere, at_first),
        TimestampConstraint.after(prompt, EOS, NO_TIMESTAMPS, None),
    ):
        restricted = rules.restrict(restricted, states_after(rules, taken))
    assert torch.equal(restricted, processed(theirs, logprobs, prompt, taken))


@pytest.mark.parametrize(("timestamps", "has_text"), [((-2.0, -2.0), True), ((-1.5, -1.5), False), ((-0.9,), False)])
def test_text_is_left_out_if_timestamps_are_likelier_together(timestamps: tuple[float, ...], has_text: bool) -> None:
    logprobs = torch.full((1, 1, VOCAB), NEVER)
    logprobs[..., 0] = -1.0
    logprobs[..., FIRST + 2 : FIRST + 2 + len(timestamps)] = torch.tensor(timestamps)
    rules = TimestampConstraint.after([TASK, FIRST, 4], EOS, NO_TIMESTAMPS, None)
    restricted = rules.restrict(logprobs, rules.begin(1, logprobs.device))
    assert (restricted[0, 0, 0] > NEVER) == has_text
    assert torch.equal(restricted[..., FIRST:], logprobs[..., FIRST:])


def test_prompts_that_say_the_same_to_the_rules_share_a_batch() -> None:
    after = [TimestampConstraint.after([*said, TASK, FIRST], EOS, NO_TIMESTAMPS, 50) for said in ([], [0, FIRST + 3])]
    assert len({*after}) == 1
    assert after[0].begins % 4 == START
    assert TimestampConstraint.after([TASK, FIRST + 1], EOS, NO_TIMESTAMPS, 50) not in after


def test_it_waits_for_no_device() -> None:
    """Nothing of a tensor is read: one without values will do."""
    rules, meta = TimestampConstraint(EOS, NO_TIMESTAMPS, 3), torch.device("meta")
    states = rules.advance(rules.begin(3, meta), torch.empty(1, 3, dtype=torch.int64, device=meta))
    assert rules.restrict(torch.empty(1, 3, VOCAB, device=meta), states).shape == (1, 3, VOCAB)
    assert rules.leads_on(states, torch.empty(1, 3, dtype=torch.int32, device=meta)).shape == (1, 3)
