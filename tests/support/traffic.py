"""Traffic that engines of several ranks and of one answer alike."""

from __future__ import annotations

from typing import Any

from vllm import SamplingParams

from tests.support.engine import BLOCK_SIZE
from tests.support.options import SAMPLED, WITHOUT_TEXT
from tests.support.running import MOST_TIES, count_ties, prompt_of
from vllm_trie import beam_params

Job = tuple[list[int], SamplingParams]
MAX_TOKENS = BLOCK_SIZE + 9
MAX_BATCHED = 256  # tokens of a step


def jobs() -> list[Job]:
    """Groups of several widths, with and without EOS, on both sides of a block boundary, and ordinary requests."""
    asked = []
    for number, length in enumerate([1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 20]):
        for width, ignore_eos in ((2, True), (5, False)):
            params = beam_params(width, n=width, max_tokens=MAX_TOKENS, ignore_eos=ignore_eos)
            asked.append((prompt_of(length, number), params))
        greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2)
        asked.append((prompt_of(length, number), greedy))
    for number, options in enumerate([*WITHOUT_TEXT, *SAMPLED]):
        params = beam_params(**{"beam_width": 5, "n": 5, "max_tokens": 14} | options)
        asked.append((prompt_of(20 + number % 9, 100 + number), params))
    return asked


def copied(asked: list[Job]) -> list[Job]:
    return [(prompt, params.clone()) for prompt, params in asked]


def check_same(outputs: list[Any], expected: list[Any]) -> None:
    assert count_ties(outputs, expected) <= MOST_TIES * sum(len(output.outputs) for output in expected)
