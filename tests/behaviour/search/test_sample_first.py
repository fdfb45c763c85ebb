"""sample_first=m: each beam begins with m tokens of its own draw, and the search goes on from there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from tests.support.engine import Engine, Engines
from tests.support.loop import adjusted, allowed, loop_beams, one_thread
from tests.support.reference import SCORE_TOLERANCE, agree, engine_answers, load
from tests.support.running import BYTES_PER_BLOCK, prompt_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

EOS, WIDTH, NUM_SAMPLED = 1, 6, 3
WARPED = {"temperature": 1.5, "top_k": 12, "top_p": 0.9}


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines(model)


def found(engine: Engine, params: SamplingParams, prompt: list[int]) -> list[tuple[tuple[int, ...], float]]:
    (output,) = engine.generate([prompt], params)
    return [(tuple(o.token_ids), o.cumulative_logprob) for o in output.outputs if o.token_ids]


def params_of(seed: int | None, **fields: Any) -> SamplingParams:
    fields = {"n": WIDTH, "max_tokens": 20, "sample_first": NUM_SAMPLED, **fields}
    return beam_params(WIDTH, seed=seed, **fields)


def test_a_seed_decides_the_answer_whatever_else_is_in_the_batch(engine: Engine) -> None:
    prompt = prompt_of(30)
    alone = [found(engine, params_of(seed), prompt) for seed in range(3)]
    assert len({tuple(tokens for tokens, _ in answer) for answer in alone}) == 3
    others = [params_of(9), SamplingParams(temperature=1.0, max_tokens=20), beam_params(4, n=4, max_tokens=20)]
    outputs = engine.generate([prompt] * 6, [*others, *(params_of(seed) for seed in range(3))])
    for expected, output in zip(alone, outputs[3:], strict=True):
        assert [tuple(o.token_ids) for o in output.outputs] == [tokens for tokens, _ in expected]


def test_without_a_seed_searches_differ(engine: Engine) -> None:
    one, *others = (found(engine, params_of(None), prompt_of(30)) for _ in range(6))  # two are alike once in 60 times
    assert any(other != one for other in others)


@one_thread()
@torch.inference_mode()
@pytest.mark.parametrize("warping", [{}, WARPED], ids=["plain", "warped"])
def test_first_tokens_follow_the_warped_softmax_and_keep_their_own_log_probabilities(
    engine: Engine, model: Path, warping: dict[str, Any]
) -> None:
    prompt, searches, width = prompt_of(30), 60, 32
    row = adjusted(load(model)(torch.tensor([prompt])).logits[0, -1], prompt, [], **warping).log_softmax(-1)
    filters = {name: value for name, value in warping.items() if name != "temperature"}
    chances = allowed(row, **filters).double().softmax(-1)
    params = [
        beam_params(width, n=width, max_tokens=1, sample_first=1, seed=seed, **warping) for seed in range(searches)
    ]
    counts = Counter[int]()
    for output in engine.generate([prompt] * searches, params):
        for o in output.outputs:
            (token,) = o.token_ids
            assert o.cumulative_logprob == pytest.approx(row[token].item(), abs=SCORE_TOLERANCE)
            counts[token] += 1
    draws = searches * width
    assert counts.total() == draws
    assert all(chances[token] > 0 for token in counts)
    likely = [token for token, chance in enumerate(chances.tolist()) if chance * draws >= 5]
    cells = [(counts[token], draws * chances[token].item()) for token in likely]
    rest = draws - sum(expected for _, expected in cells)
    if rest > 5:
        cells.append((draws - sum(count for count, _ in cells), rest))
    assert len(cells) > 5
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = len(cells) - 1
    assert chi_square < freedom + 3.1 * math.sqrt(2 * freedom) + 6  # beyond the 99.9th percentile


@pytest.mark.parametrize("warping", [{}, WARPED], ids=["plain", "warped"])
def test_search_from_the_sampled_prefixes_is_the_loops(engine: Engine, model: Path, warping: dict[str, Any]) -> None:
    filters = {name: value for name, value in warping.items() if name != "temperature"}
    for seed in range(4):
        prompt = prompt_of(30, seed)
        rules = {"stop_token_ids": [EOS], "min_tokens": NUM_SAMPLED}
        prefixes = found(engine, params_of(seed, max_tokens=NUM_SAMPLED, **rules, **warping), prompt)
        assert [len(tokens) for tokens, _ in prefixes] == [NUM_SAMPLED] * WIDTH
        (output,) = engine.generate([prompt], params_of(seed, **rules, **warping))
        theirs = loop_beams(
            model,
            prompt,
            WIDTH,
            WIDTH,
            20,
            **rules,
            start=[([*tokens], total) for tokens, total in prefixes],
            adjust=lambda *row: adjusted(*row, **warping),
            allow=lambda row: allowed(row, **filters),
        )
        agree(engine_answers(output, 1.0), [*theirs])


def test_a_sampled_stop_finishes_its_hypothesis(engine: Engine) -> None:
    few = {"allowed_token_ids": [EOS, *range(40, 90)], "logit_bias": {EOS: -4.0}, "temperature": 2.0}
    params = params_of(5, sample_first=20, stop_token_ids=[EOS], **few)
    answers = found(engine, params, prompt_of(30))
    assert len(answers) == WIDTH
    assert all(EOS not in tokens[:-1] and (tokens[-1] == EOS or len(tokens) == 20) for tokens, _ in answers)
    assert len({len(tokens) for tokens, _ in answers}) > 1


def test_logprobs_report_each_sampled_token_and_its_rank(engine: Engine, model: Path) -> None:
    prompt = prompt_of(30)
    (output,) = engine.generate([prompt], params_of(3, max_tokens=NUM_SAMPLED, logprobs=2, temperature=2.0))
    ranks = []
    for o in output.outputs:
        with one_thread(), torch.inference_mode():
            rows = load(model)(torch.tensor([[*prompt, *o.token_ids]])).logits[0, len(prompt) - 1 : -1] / 2.0
        for token, reported, row in zip(o.token_ids, o.logprobs, rows.log_softmax(-1), strict=True):
            assert reported[token].logprob == pytest.approx(row[token].item(), abs=SCORE_TOLERANCE)
            assert reported[token].rank == (row > row[token]).sum().item() + 1
            ranks.append(reported[token].rank)
    assert max(ranks) > 2 * WIDTH, "something must be sampled that no search would rank"


def test_a_search_that_starts_anew_draws_the_same(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt_of(30, seed) for seed in range(3)]
    params = [params_of(seed, max_tokens=60, sample_first=40) for seed in range(3)]
    roomy = [[list(o.token_ids) for o in output.outputs] for output in engines(model).generate(prompts, params)]
    engine, preempted = engines(model, kv_cache_memory_bytes=28 * BYTES_PER_BLOCK), []
    scheduler = type(engine.scheduler)
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: (preempted.append(a), preempt(*a, **k)))
    outputs = engine.generate(prompts, params)
    assert preempted, "no group had to start anew"
    assert [[list(o.token_ids) for o in output.outputs] for output in outputs] == roomy
