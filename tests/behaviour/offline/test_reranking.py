"""`rerank` puts the hypotheses of a search into the order of least risk, and returns the best of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import sacrebleu
from vllm import SamplingParams

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from vllm_trie import HypothesisPair, beam_params
from vllm_trie.batch.search import BatchSearcher

pytestmark = pytest.mark.slow

PROMPTS = ["def is_prime(number):", "class Reader:\n    def"]
WIDTH, N = 6, 2
SEARCHES: list[dict[str, Any]] = [{}, {"do_sample": True, "replacement": True, "seed": 5}]


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines(TRAINED_TARGET)


@pytest.mark.parametrize("search", SEARCHES, ids=["best", "sampled"])
def test_the_best_of_the_pool_by_chrf_come_back(engine: Engine, search: dict[str, Any]) -> None:
    options = {**search, "max_tokens": 12}
    pools = engine.llm.generate(PROMPTS, beam_params(WIDTH, n=WIDTH, **options), use_tqdm=False)
    reranked = engine.llm.generate(PROMPTS, beam_params(WIDTH, n=N, rerank="mbr", **options), use_tqdm=False)
    for pool, output in zip(pools, reranked, strict=True):
        texts = [hypothesis.text for hypothesis in pool.outputs]
        utilities = [sum(sacrebleu.sentence_chrf(a, [b]).score for b in texts) / WIDTH for a in texts]
        best = sorted(range(WIDTH), key=lambda place: -utilities[place])[:N]
        assert [hypothesis.text for hypothesis in output.outputs] == [texts[place] for place in best]
        assert [hypothesis.index for hypothesis in output.outputs] == [*range(N)]
        answer = output.kv_transfer_params["trie_beam"]
        assert answer["utilities"] == pytest.approx([utilities[place] for place in best])
        assert answer["search_ranks"] == best
        assert answer["num_judged"] == len(set(texts)) ** 2


def test_a_callable_sees_prompts_and_pairs_in_a_batch_with_requests_that_are_not_reranked(engine: Engine) -> None:
    seen = list[HypothesisPair]()

    def longest(pairs: list[HypothesisPair]) -> list[int]:
        seen.extend(pairs)
        return [len(pair.hypothesis) for pair in pairs]

    params = [beam_params(WIDTH, rerank="mbr", metric=longest, max_tokens=9), beam_params(WIDTH, n=WIDTH, max_tokens=9)]
    one, whole = engine.llm.generate(PROMPTS[:1] * 2, params, use_tqdm=False)
    texts = [hypothesis.text for hypothesis in whole.outputs]
    assert {pair.prompt for pair in seen} == {PROMPTS[0]}
    assert {(pair.hypothesis, pair.reference) for pair in seen} == {(a, b) for a in texts for b in texts}
    assert [hypothesis.text for hypothesis in one.outputs] == [max(texts, key=len)]


def test_a_metric_that_fails_ends_its_own_request_alone(engine: Engine) -> None:
    def broken(pairs: list[HypothesisPair]) -> list[float]:
        raise RuntimeError("no model")

    options: dict[str, Any] = {"n": 2, "rerank": "mbr", "max_tokens": 4, "beam_results": True}
    params = [beam_params(3, metric=metric, **options) for metric in (broken, "chrf")]
    failed, fine = engine.llm.generate(PROMPTS, params, use_tqdm=False)
    reasons = {(hypothesis.finish_reason, hypothesis.stop_reason) for hypothesis in failed.outputs}
    assert reasons == {("error", "rerank='mbr': RuntimeError: no model")}
    assert all(hypothesis.text for hypothesis in failed.outputs)
    assert {hypothesis.finish_reason for hypothesis in fine.outputs} == {"length"}
    for output in (failed, fine):
        results = output.kv_transfer_params["trie_beam"]["beam_results"]
        assert [result["output_ids"] for result in results] == [list(one.token_ids) for one in output.outputs]


def test_what_ends_before_its_ranking_is_forgotten(engine: Engine) -> None:
    core, params = engine.llm.llm_engine, beam_params(4, rerank="mbr", max_tokens=4)
    with pytest.raises(ValueError, match="beam_width=-1"):
        engine.llm.generate(PROMPTS, [params, SamplingParams(extra_args={"beam_width": -1})], use_tqdm=False)
    assert core.get_num_unfinished_requests() == 0

    def interrupted(pairs: list[HypothesisPair]) -> list[float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.llm.generate(PROMPTS, beam_params(4, rerank="mbr", metric=interrupted, max_tokens=4), use_tqdm=False)
    while core.has_unfinished_requests():
        core.step()
    assert core.get_num_unfinished_requests() == 0

    core.add_request("named", {"prompt": PROMPTS[0]}, params)
    core.abort_request(["named"])
    assert core.get_num_unfinished_requests() == 0
    assert not core.has_unfinished_requests()


def test_requests_of_one_name_are_told_apart(engine: Engine) -> None:
    core, answers = engine.llm.llm_engine, list[Any]()
    for params in (beam_params(4, rerank="mbr", max_tokens=4), SamplingParams(max_tokens=4)):
        core.add_request("same", {"prompt": PROMPTS[0]}, params)
    while core.has_unfinished_requests():
        answers += [output for output in core.step() if output.finished]
    assert [output.request_id for output in answers] == ["same"] * 2
    reranked = ["utilities" in (output.kv_transfer_params or {}).get("trie_beam", {}) for output in answers]
    assert sorted(reranked) == [False, True]
    assert [len(output.outputs) for output in answers] == [1, 1]


def test_a_metric_sees_the_text_of_a_prompt_of_tokens(engine: Engine) -> None:
    seen = list[HypothesisPair]()

    def noted(pairs: list[HypothesisPair]) -> list[float]:
        seen.extend(pairs)
        return [0.0] * len(pairs)

    token_ids = engine.llm.get_tokenizer().encode(PROMPTS[0])
    params = beam_params(2, rerank="mbr", metric=noted, max_tokens=4)
    engine.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    assert {pair.prompt for pair in seen} == {engine.llm.get_tokenizer().decode(token_ids)}


def test_wrong_requests_are_refused_before_any_work(engine: Engine) -> None:
    params = beam_params(2, rerank="mbr", max_tokens=4)
    params.n = 3
    with pytest.raises(ValueError, match="n=3 exceeds beam_width=2"):
        engine.llm.generate(PROMPTS, params, use_tqdm=False)
    with pytest.raises(ValueError, match="detokenize=False is not supported together with rerank='mbr'"):
        engine.llm.generate(PROMPTS, beam_params(2, rerank="mbr", detokenize=False), use_tqdm=False)


def test_elsewhere_it_is_refused_in_a_sentence(engine: Engine) -> None:
    processor = engine.llm.llm_engine.input_processor
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    with pytest.raises(ValueError, match=r"rerank='mbr' works in LLM\.generate, LLM\.chat and batch jobs, not here"):
        processor.process_inputs("0", prompt, beam_params(2, rerank="mbr"), supported_tasks=("generate",))


def test_a_batch_job_notes_utilities(engine: Engine) -> None:
    searcher = object.__new__(BatchSearcher)
    searcher._llm, searcher._options = engine.llm, {}
    options: dict[str, Any] = {"n": 2, "rerank": "mbr", "metric": "ter", "rerank_confidence": 0.9, "max_tokens": 6}
    searcher._params = beam_params(4, **options, beam_results=True)
    (line,) = searcher({"id": ["1"], "prompt": PROMPTS[:1]})["line"]
    hypotheses = json.loads(line)["hypotheses"]
    utilities = [hypothesis["utility"] for hypothesis in hypotheses]
    scores = [hypothesis["cumulative_logprob"] / len(hypothesis["token_ids"]) for hypothesis in hypotheses]
    assert [hypothesis["score"] for hypothesis in hypotheses] == pytest.approx(scores)
    assert len(utilities) == 2
    assert 0 >= utilities[0] >= utilities[1]
