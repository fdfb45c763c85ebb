"""Beams on prompts with images are transformers' own, and an image is encoded once for all beams of a search."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import BeamSearchParams

from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.images import KINDS, TEXTS, image, make_model, prompts, run, transformers_answers, why_not
from tests.support.models import COMMON
from tests.support.reference import agree, engine_answers
from tests.support.sweep import sweep
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sweep([*KINDS], "qwen3_vl"))
def kind(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kind: str) -> Path:
    return make_model(kind, tmp_path_factory.mktemp(kind))


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    engine = engines(model, max_model_len=256, max_num_batched_tokens=64, limit_mm_per_prompt={"image": 2, "video": 0})
    assert engine.llm.llm_engine.reset_prefix_cache()
    engine.llm.llm_engine.reset_encoder_cache()
    return engine


@pytest.fixture
def encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each call of the encoder gets."""
    calls, encoder = [], engine.runner.model_state.encoder_runner
    stock = encoder.execute_mm_encoder

    def execute(items: list[Any]) -> Any:
        if items:
            calls.append(len(items))
        return stock(items)

    monkeypatch.setattr(encoder, "execute_mm_encoder", execute)
    return calls


def test_llm_beam_search_finds_what_vllms_own_loop_finds(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, params, opened = prompts(kind), BeamSearchParams(beam_width=3, max_tokens=8), []
    announce = engine.scheduler.kv_cache_manager.announce
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler.kv_cache_manager, "announce", lambda *args: opened.append(1) or announce(*args))
        ours = engine.llm.beam_search(asked, params)
    assert len(opened) == len(asked), "it was not searched in the engine"
    theirs = llm_beam_search.original(engine.llm, asked, params)
    for found, expected in zip(ours, theirs, strict=True):
        for one, other in zip(found.sequences, expected.sequences, strict=True):
            assert one.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-4)
            assert (one.tokens, one.text) == (other.tokens, other.text)


def test_beams_that_see_an_image_are_those_of_transformers(
    engine: Engine, encoded: list[int], kind: str, model: Path
) -> None:
    jobs = [
        (prompt, beam_params(width, n=width, max_tokens=40))
        for prompt, width in zip(prompts(kind), (4, 3, 6), strict=True)
    ]
    jobs.append(({"prompt": TEXTS[0].format("")}, beam_params(4, n=4, max_tokens=40)))  # and one of text alone
    outputs = run(engine, jobs)
    num_images = sum(len(prompt["multi_modal_data"]["image"]) for prompt, _ in jobs[:3])
    assert sum(encoded) == num_images, "an image was encoded for each beam"
    for (prompt, params), output in zip(jobs, outputs, strict=True):
        if "multi_modal_data" in prompt or KINDS[kind].placeholder:  # transformers' BLIP-2 wants an image
            token_ids, theirs = transformers_answers(model, prompt, params.n, 40)
            assert output.prompt_token_ids == token_ids
            assert agree(engine_answers(output, 1.0), theirs)
    assert [o.token_ids for o in outputs[0].outputs] != [o.token_ids for o in outputs[3].outputs]
    assert any(o.finish_reason == "stop" for output in outputs for o in output.outputs)


def test_beams_see_the_image_again_after_a_preemption(engine: Engine, encoded: list[int], kind: str) -> None:
    jobs = [(prompt, beam_params(4, n=4, max_tokens=40, ignore_eos=True)) for prompt in prompts(kind, 10)]
    expected = run(engine, jobs)
    outputs = run(engine, jobs, preempted_at=(8, 20))
    for output, other in zip(outputs, expected, strict=True):
        assert [o.token_ids for o in output.outputs] == [o.token_ids for o in other.outputs]


def test_beams_that_see_an_image_speculate_by_ngrams_and_find_the_same(
    engines: Engines, model: Path, kind: str
) -> None:
    """Positions of drafts follow their parents, those of M-RoPE too, which images shift."""
    ngrams = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    limits: dict[str, Any] = {"max_model_len": 256, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    engine = engines(model, max_num_batched_tokens=64, speculative_config=ngrams, **limits)
    jobs = [(p, beam_params(w, n=w, max_tokens=100, ignore_eos=True)) for p in prompts(kind) for w in (1, 3)]
    outputs = run(engine, jobs)
    for _, params in jobs:
        params.extra_args["speculation"] = "off"
    plain = run(engine, jobs)
    for output, other in zip(outputs, plain, strict=True):
        assert agree(engine_answers(output, 1.0), engine_answers(other, 1.0))
    count = "drafted" if kind == "blip2" else "accepted"  # what the random BLIP-2 makes up does not repeat itself
    assert sum(output.kv_transfer_params["trie_beam"][count] for output in outputs) > 0


def test_the_next_turn_finds_the_blocks_of_an_answer_to_its_own_image_alone(engine: Engine, kind: str) -> None:
    """Their hashes are those of the image, too, and of nothing that stands for another one."""
    prompt, *_ = prompts(kind, 20)
    output, *_ = run(engine, [(prompt, beam_params(4, max_tokens=3 * BLOCK_SIZE, ignore_eos=True))])
    of_text = engine.llm.get_tokenizer()(prompt["prompt"]).input_ids
    history = [*of_text, *output.outputs[0].token_ids]
    cached = []
    for seen in (20, 24):
        turn = {"prompt_token_ids": history, "multi_modal_data": {"image": image(seen)}}
        (answer,) = run(engine, [(turn, SamplingParams(temperature=0, max_tokens=1))])
        assert answer.prompt_token_ids == [*output.prompt_token_ids, *output.outputs[0].token_ids]
        cached.append(answer.num_cached_tokens)
    assert cached == [(len(answer.prompt_token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE, 0]


def test_an_image_whose_first_request_was_refused_comes_with_the_next_one(engine: Engine, kind: str) -> None:
    asked = prompts(kind, 40)[:2]
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_num_seqs=64"):
        engine.llm.generate(asked, beam_params(65), use_tqdm=False)
    with pytest.raises(ValueError, match="beam_width=65 exceeds max_num_seqs=64"):
        engine.llm.beam_search(asked, BeamSearchParams(beam_width=65, max_tokens=4))
    for limit in (None, 1):
        with pytest.raises(ValueError, match="exceed"):
            engine.llm.beam_search(asked, BeamSearchParams(beam_width=65, max_tokens=4), concurrency_limit=limit)
    outputs = engine.llm.generate(asked, beam_params(4, max_tokens=4), use_tqdm=False)
    assert all(output.outputs[0].token_ids for output in outputs)


@pytest.mark.parametrize("kind", ["llava"], indirect=True)
def test_vllms_own_loop_runs_where_beams_take_no_images(
    engine: Engine, engines: Engines, model: Path, kind: str, tmp_path: Path
) -> None:
    asked, params = prompts(kind, 50), BeamSearchParams(beam_width=3, max_tokens=6)
    expected = [[one.tokens for one in found.sequences] for found in engine.llm.beam_search(asked, params)]
    vocab_size = len(engine.llm.get_tokenizer())
    LlamaForCausalLM(LlamaConfig(**{**COMMON, "vocab_size": vocab_size})).save_pretrained(tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    limits: dict[str, Any] = {"max_model_len": 256, "limit_mm_per_prompt": {"image": 2, "video": 0}}
    speculating = engines(model, speculative_config=drafts, max_logprobs=20, **limits)
    for _ in range(2):
        found = speculating.llm.beam_search(asked, params)
        assert [[one.tokens for one in of_one.sequences] for of_one in found] == expected
    with pytest.raises(ValueError, match="beam_width works on multimodal prompts only without a draft model"):
        speculating.llm.generate(asked, beam_params(3), use_tqdm=False)


@pytest.mark.parametrize("kind", ["qwen2_5_vl"], indirect=True)
def test_a_search_behind_the_uuid_of_another_image_ends_with_the_reason(
    engines: Engines, model: Path, kind: str
) -> None:
    limits: dict[str, Any] = {"max_model_len": 256, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    engine, (asked, *_) = engines(model, mm_processor_cache_gb=0, **limits), prompts(kind)
    named = {**asked, "multi_modal_uuids": {"image": ["mine"]}}
    expected, _ = run(engine, [(asked, beam_params(3, n=3, max_tokens=8)), (named, SamplingParams(max_tokens=3))])
    other = {**named, "prompt": "x" + named["prompt"], "multi_modal_data": {"image": [image(3)]}}
    ordinary = {"prompt": "def g():"}, SamplingParams(max_tokens=3)
    for n in (1, 3):
        jobs = [(other, beam_params(3, n=n)), (asked, beam_params(3, n=3, max_tokens=8)), ordinary]
        failed, found, _ = run(engine, jobs)
        reasons = {(hypothesis.finish_reason, hypothesis.stop_reason) for hypothesis in failed.outputs}
        assert len(failed.outputs) == n
        ((finish_reason, why),) = reasons
        assert (finish_reason, why[:63]) == ("error", "beam_width: one of multi_modal_uuids already belongs to other d")
        assert [o.token_ids for o in found.outputs] == [o.token_ids for o in expected.outputs]
        engine.check_nothing_is_left()


UNSUPPORTED = {
    "video_pruning_rate": ({"video_pruning_rate": 0.5}, "video_pruning_rate on a model with M-RoPE positions"),
    "speculation": (
        {"speculative_config": {"method": "draft_model", "model": "itself", "num_speculative_tokens": 3}},
        'speculative_config with a draft model on a model with M-RoPE positions \\(use "ngram"\\)',
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize("option", UNSUPPORTED)
def test_engines_say_what_beams_cannot_do_with_mrope(model: Path, option: str) -> None:
    options, feature = deepcopy(UNSUPPORTED[option])
    if "speculative_config" in options:
        options["speculative_config"]["model"] = str(model)
    arguments = EngineArgs(str(model), dtype="float32", additional_config={"trie_beam": {}}, **options)
    with pytest.raises(ValueError, match=f"trie_beam does not support {feature}; start vLLM without it or"):
        arguments.create_engine_config()
