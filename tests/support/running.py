"""Prompts, searches run to their end step by step, and how their answers are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.stdlib_pair.corpus import held_out_text
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine
from tests.support.reference import NEAR_TIE, SCORE_TOLERANCE
from vllm_trie import supported_engines

Job = tuple[list[int], SamplingParams]
BYTES_PER_BLOCK = 2 * 2 * 2 * 32 * BLOCK_SIZE * 4  # layers, K and V, KV heads, head size, tokens, float32
MOST_TIES = 0.02  # share of answers that near-ties may cut short


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Any tokens of a random model."""
    shuffled = random.Random(seed)
    return [shuffled.randrange(2, 300) for _ in range(length)]


@cache
def _held_out_tokens() -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TRAINED_TARGET)(held_out_text()[:200_000])["input_ids"]


def trained_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Held-out code for the trained model, cut to these lengths."""
    tokens = _held_out_tokens()
    starts = [1 + index * len(tokens) // (len(lengths) + 1) for index in range(len(lengths))]
    return [tokens[:1] + tokens[start : start + length - 1] for start, length in zip(starts, lengths, strict=True)]


def run(engine: Engine, jobs: Sequence[Job], after_step: Callable[[], None] = lambda: None) -> list[Any]:
    """All answers, in order; None of requests that were aborted. Rows are checked after every step."""
    core, finished = engine.llm.llm_engine, {}
    for number, (prompt, params) in enumerate(jobs):
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(str(number), {"prompt_token_ids": prompt}, params, priority=-number)
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step()})
        after_step()
    return [finished.get(str(number)) for number in range(len(jobs))]


def start_with(engine: Engine, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Let the engine have been started with these options, too."""
    vllm_config = engine.llm.llm_engine.vllm_config
    config = supported_engines.plugin_config_of(vllm_config).model_copy(update=options)
    monkeypatch.setitem(
        supported_engines._parsed, id(vllm_config.additional_config), (vllm_config.additional_config, config)
    )


def answers(outputs: Sequence[Any]) -> list[list[tuple[list[int], float]]]:
    return [[(list(o.token_ids), o.cumulative_logprob) for o in output.outputs] for output in outputs]


def count_ties(outputs: Sequence[Any], expected: Sequence[Any], tolerance: float = SCORE_TOLERANCE) -> int:
    """How many hypotheses differ, each by a near-tie only.

    Args:
        tolerance: By how much sums of equal hypotheses may differ, per token.

    Raises:
        AssertionError: one differs otherwise, in anything that is reported of it.
    """
    ties = 0
    for number, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        for rank, (ours, theirs) in enumerate(zip(output.outputs, other.outputs, strict=True)):
            where = (number, rank, ours, theirs)
            if ours.cumulative_logprob is None or theirs.cumulative_logprob is None:  # no further hypothesis
                assert (ours.token_ids, ours.stop_reason) == (theirs.token_ids, theirs.stop_reason), where
                continue
            difference = abs(ours.cumulative_logprob - theirs.cumulative_logprob)
            if ours.token_ids != theirs.token_ids:
                assert difference <= NEAR_TIE * len(ours.token_ids), where
                ties += 1
                continue
            assert difference <= tolerance * len(ours.token_ids), where
            assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason), where
            assert ours.stop_reason == theirs.stop_reason, where
            for place, same_place in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
                found, plain = ({t: e.logprob for t, e in entries.items()} for entries in (place, same_place))
                assert found == pytest.approx(plain, abs=SCORE_TOLERANCE), where
                assert [e.rank for e in place.values()] == [e.rank for e in same_place.values()], where
    return ties
