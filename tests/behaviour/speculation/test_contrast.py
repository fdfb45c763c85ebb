"""Searches that contrast the draft model find what an independent search finds, with both models in transformers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.support.cached import WatchedCache
from tests.support.contrast import Weights, contrasted_beams, score_of
from tests.support.disturb import Clumsy
from tests.support.engine import BLOCK_SIZE, TRAINED_TARGET, Engine
from tests.support.pairs import TRAINED, count_differing
from tests.support.reference import SCORE_TOLERANCE, Answer, agree, is_greedy, load
from tests.support.running import MOST_TIES, Job, prompt_of, run, trained_prompts
from tests.support.trained_pair import counts, rows_of
from vllm_trie import beam_params

pytestmark = pytest.mark.slow

MAX_TOKENS = 14
PROMPTS = trained_prompts([12, 30, 41, 64, 77])
CASES: list[dict[str, Any]] = [
    {"beam_width": 2, "contrast": {"model": "draft", "alpha": 0.1, "beta": 0.5}, "logprobs": 2},
    {"beam_width": 4, "contrast": {}, "length_penalty": 0.0, "speculation": "auto"},
    {"beam_width": 8, "contrast": {"alpha": 0.02, "beta": 2.0}, "length_penalty": 0.6, "speculation": "off"},
    {"beam_width": 1, "contrast": {"alpha": 0.3, "beta": 1}},
    {"beam_width": 5, "contrast": {"alpha": 0.01, "beta": 1_000}, "length_penalty": -0.5},
]


def contrasting() -> list[Job]:
    return [
        (prompt, beam_params(**case, n=case["beam_width"], max_tokens=MAX_TOKENS))
        for prompt, case in zip(PROMPTS, CASES, strict=True)
    ]


def others() -> list[Job]:
    """An ordinary request, which vLLM drafts for, and searches that speculate or do not."""
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    modes = ("exact", "off")
    return [
        (PROMPTS[2], greedy),
        *((PROMPTS[1], beam_params(3, n=3, max_tokens=MAX_TOKENS, speculation=mode)) for mode in modes),
    ]


def check_others(greedy: Any, speculating: Any, plain: Any) -> None:
    assert is_greedy(TRAINED_TARGET, PROMPTS[2], list(greedy.outputs[0].token_ids), MAX_TOKENS)
    assert count_differing([speculating], [plain]) == 0
    assert counts(speculating)["accepted"] > 0


def test_beams_are_those_of_the_independent_search_whatever_shares_their_batch_and_preempts_them(
    engine: Engine,
) -> None:
    jobs, in_full = [*contrasting(), *others()], 0
    outputs = run(engine, jobs)
    check_others(*outputs[len(CASES) :])
    for prompt, case, output in zip(PROMPTS, CASES, outputs, strict=False):
        given = {name: value for name, value in case["contrast"].items() if name != "model"}
        weights, penalty = Weights(**given), case.get("length_penalty", 1.0)
        theirs = contrasted_beams(TRAINED, prompt, case["beam_width"], weights, MAX_TOKENS, penalty)
        found = [list(hypothesis.token_ids) for hypothesis in output.outputs]
        ours = [Answer(tokens, score_of(TRAINED, prompt, tokens, weights) / len(tokens) ** penalty) for tokens in found]
        in_full += agree(ours, [Answer(their.token_ids, their.score) for their in theirs])
        sums = {tuple(their.token_ids): their.sum_logprobs for their in theirs}
        for hypothesis in output.outputs:
            total = hypothesis.cumulative_logprob
            assert total == pytest.approx(sums.get(tuple(hypothesis.token_ids), total), abs=1e-3), "not the model's own"
        assert output.kv_transfer_params is None, "it speculates"
    assert in_full >= (1 - MOST_TIES) * len(CASES)

    clumsy = Clumsy(engine)
    again = run(engine, jobs, clumsy.preempt_whenever_a_search_is_further)
    assert clumsy.num_preempted > MAX_TOKENS // 2
    assert count_differing(again[: len(CASES)], outputs[: len(CASES)]) == 0


def test_prompts_in_chunks_and_cached_prompts_lead_to_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.llm.llm_engine.reset_prefix_cache()
    whole = run(engine, contrasting())
    cached = run(engine, contrasting())
    assert [output.num_cached_tokens for output in cached] == [
        (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS
    ]
    assert count_differing(cached, whole) == 0
    assert engine.llm.llm_engine.reset_prefix_cache()
    monkeypatch.setattr(engine.scheduler.scheduler_config, "long_prefill_token_threshold", 20)
    assert count_differing(run(engine, contrasting()), whole) == 0


def found_from_nothing(engine: Engine, jobs: list[Job]) -> list[Any]:
    """What requests answer that begin in one step, where no KV block holds anything true before."""
    for cache in engine.runner.kv_caches:
        cache.fill_(1.0)
    with WatchedCache(engine) as watched:
        outputs = run(engine, jobs)
        assert watched.check() > 0
    return outputs


def contrast(prompt: list[int], width: int = 4, **weights: float) -> Job:
    return prompt, beam_params(width, n=width, contrast=weights, max_tokens=MAX_TOKENS)


def greedy(prompt: list[int]) -> Job:
    return prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)


def test_a_prompt_that_others_compute_in_the_same_step_leads_to_what_it_leads_to_alone(engine: Engine) -> None:
    """The prefix cache has blocks of the others before the draft model has computed them."""
    prompt, longer = PROMPTS[3], [*PROMPTS[3], *PROMPTS[4]]
    contrasts = [contrast(prompt), contrast(prompt, 2, beta=2.0), contrast([*prompt, *PROMPTS[2]], 3)]
    alone = [output for job in contrasts for output in found_from_nothing(engine, [job])]
    searches = [(longer, beam_params(3, max_tokens=8, speculation=mode)) for mode in ("exact", "off")]
    for others in ([greedy(longer)], searches):
        outputs = found_from_nothing(engine, [*others, *contrasts])
        assert count_differing(outputs[len(others) :], alone) == 0
    first, _, last = contrasts
    chain = [greedy(prompt), first, greedy(last[0]), last]  # each goes on from blocks of the one before it
    _, found_first, _, found_last = found_from_nothing(engine, chain)
    assert count_differing([found_first, found_last], [alone[0], alone[2]]) == 0


def test_the_next_turn_finds_both_models_kv_of_an_answer_in_the_prefix_cache(engine: Engine) -> None:
    assert engine.llm.llm_engine.reset_prefix_cache()
    params = beam_params(4, contrast={}, max_tokens=2 * BLOCK_SIZE - 20, ignore_eos=True)
    prompts = [prompt[:24] for prompt in PROMPTS[1:]]
    turns = [
        (
            [*prompt, *output.outputs[0].token_ids, *prompt_of(9)],
            beam_params(4, n=4, contrast={}, max_tokens=MAX_TOKENS),
        )
        for prompt, output in zip(prompts, run(engine, [(prompt, params) for prompt in prompts]), strict=True)
    ]
    cached = run(engine, turns)
    assert [output.num_cached_tokens for output in cached] == [2 * BLOCK_SIZE] * len(turns)
    assert engine.llm.llm_engine.reset_prefix_cache()
    assert count_differing(run(engine, turns), cached) == 0


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    (output,) = run(engine, contrasting()[:1])
    for hypothesis in output.outputs:
        tokens = tuple(hypothesis.token_ids)
        for place, row in zip(hypothesis.logprobs, rows_of(PROMPTS[0], tokens), strict=True):
            expected = {token: row[token].item() for token in {*row.topk(2).indices.tolist(), *tokens} & place.keys()}
            assert {t: entry.logprob for t, entry in place.items()} == pytest.approx(expected, abs=SCORE_TOLERANCE)
            assert {*row.topk(2).indices.tolist()} <= place.keys()


def test_a_stream_sends_what_the_search_finds(engine: Engine) -> None:
    params = beam_params(4, contrast={"beta": 1.0}, max_tokens=30)
    (whole,) = run(engine, [(PROMPTS[3], params)])
    params.output_kind, parts = RequestOutputKind.DELTA, list[int]()
    core = engine.llm.llm_engine
    core.add_request("stream", {"prompt_token_ids": PROMPTS[3]}, params)
    while core.has_unfinished_requests():
        parts += [token for output in core.step() for token in output.outputs[0].token_ids]
    assert parts == list(whole.outputs[0].token_ids)


def test_the_temperature_is_that_of_both_models(engine: Engine) -> None:
    """Greedily, where the model's own first choices are so different from each other that this decides."""
    (output,) = run(engine, [(PROMPTS[2], beam_params(1, contrast={"alpha": 0.01}, temperature=2.0, max_tokens=8))])
    text = list(PROMPTS[2])
    for token in output.outputs[0].token_ids:
        with torch.inference_mode():
            expert, amateur = (
                load(model)(torch.tensor([text])).logits[0, -1].div(2).log_softmax(-1) for model in TRAINED
            )
        scores = (1.5 * expert - 0.5 * amateur).where(expert >= expert.max() + math.log(0.01), -math.inf)
        assert token == scores.argmax()
        text.append(token)
