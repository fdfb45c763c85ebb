"""Beams of an encoder-decoder model are transformers' own; what its encoder made is there once for all of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

from tests.support.audio import (
    ENGLISH,
    EOS,
    FIRST_TIMESTAMP,
    NO_TIMESTAMPS,
    NUM_AUDIO_TOKENS,
    PREVIOUS,
    PROMPT,
    START,
    TIMESTAMPS_PER_SECOND,
    TRANSCRIBE,
    make_whisper,
    prompt_of,
    sound,
    transformers_answers,
    whispers_answer,
)
from tests.support.disturb import AbortWithin, preempt_all
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.reference import agree, engine_answers
from vllm_trie import beam_params
from vllm_trie.entrypoints.llm import llm_beam_search
from vllm_trie.trie.encoder_blocks import EncoderBlockTrie
from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionBuilder, SharedPrefixAttentionMetadata

pytestmark = pytest.mark.slow

MAX_TOKENS = 40  # beyond a block of the decoder's
ENCODER_BLOCKS = -(-NUM_AUDIO_TOKENS // BLOCK_SIZE)
SUPPRESSED = [51, 91]  # which come up most
FIRST, OFTEN = 62, [184, 188]  # which come first, and often, of what other seeds make heard

Job = tuple[int, SamplingParams]  # the seed of what is heard


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return engines(model, max_model_len=128, max_num_batched_tokens=256)


@pytest.fixture
def encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sounds each call of the encoder gets."""
    calls, encoder = [], engine.runner.model_state.encoder_runner
    stock = encoder.execute_mm_encoder

    def execute(items: list[Any]) -> Any:
        calls.append(len(items))
        return stock(items)

    monkeypatch.setattr(encoder, "execute_mm_encoder", execute)
    return calls


def run(
    engine: Engine,
    jobs: list[Job],
    after_step: Callable[[int], None] = lambda step: None,
    prompts: Sequence[list[int]] | None = None,
) -> list[Any]:
    """All answers, in order; None of requests that were aborted."""
    core, finished, steps = engine.llm.llm_engine, {}, 0
    for number, (seed, params) in enumerate(jobs):
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(str(number), prompt_of(sound(seed), PROMPT if prompts is None else prompts[number]), params)
    while core.has_unfinished_requests():
        finished.update({output.request_id: output for output in core.step()})
        steps += 1
        after_step(steps)
    return [finished.get(str(number)) for number in range(len(jobs))]


@pytest.mark.parametrize("option", ["on", "off"])
def test_what_an_encoder_made_is_read_once_for_all_beams(
    engines: Engines, model: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"additional_config": {"trie_beam": {"check_invariants": True, "shared_prefix_attention": option}}}
    engine = engines(model, max_model_len=128, max_num_batched_tokens=256, **shares)
    jobs = searches(8, 3)
    jobs.insert(1, (5, SamplingParams(temperature=0, max_tokens=20)))
    asked, build = list[list[int]](), SharedPrefixAttentionBuilder.build

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = build(self, *args, **kwargs)
        if self.is_cross_attention and isinstance(metadata, SharedPrefixAttentionMetadata):
            asked.append(metadata.plan.shared.num_shared.tolist())
        return metadata

    monkeypatch.setattr(SharedPrefixAttentionBuilder, "build", watched)
    outputs = run(engine, jobs)
    whole_blocks = NUM_AUDIO_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert bool(asked) == (option == "on")
    assert all(set(counts) == {whole_blocks} for counts in asked)
    for (seed, params), output in zip(jobs, outputs, strict=True):
        if len(output.outputs) > 1:
            assert agree(engine_answers(output, 1.0), transformers_answers(model, sound(seed), params.n, MAX_TOKENS))


def searches(*widths: int, **options: Any) -> list[Job]:
    """A search of each width, on a sound each."""
    return [(seed, beam_params(width, n=width, max_tokens=MAX_TOKENS, **options)) for seed, width in enumerate(widths)]


def encoder_blocks(engine: Engine) -> dict[str, EncoderBlockTrie]:
    """Of each group that decodes."""
    groups = engine.scheduler.kv_cache_manager._groups
    return {
        group_id: trie
        for group_id, group in groups.items()
        for trie in group.tries
        if isinstance(trie, EncoderBlockTrie)
    }


def same(outputs: list[Any], expected: list[Any]) -> bool:
    return [[o.token_ids for o in each.outputs] for each in outputs] == [
        [o.token_ids for o in each.outputs] for each in expected
    ]


def test_beams_that_hear_a_sound_are_those_of_transformers(engine: Engine, encoded: list[int], model: Path) -> None:
    jobs = searches(4, 3, 6, 2)
    jobs.insert(2, (7, SamplingParams(temperature=0, max_tokens=MAX_TOKENS)))  # an ordinary request among them
    outputs = run(engine, jobs)
    assert sum(encoded) == len(jobs), "a sound was encoded for each beam"
    (greedy,) = outputs[2].outputs
    assert greedy.token_ids == run(engine, [jobs[2]])[0].outputs[0].token_ids
    lengths = set()
    for number in (0, 1, 3, 4):
        (seed, params), output = jobs[number], outputs[number]
        assert agree(engine_answers(output, 1.0), transformers_answers(model, sound(seed), params.n, MAX_TOKENS))
        lengths.update(len(hypothesis.token_ids) for hypothesis in output.outputs)
    assert MAX_TOKENS in lengths
    assert min(lengths) < MAX_TOKENS


def test_what_a_generation_configuration_suppresses_no_hypothesis_has(
    engines: Engines, model: Path, tmp_path: Path
) -> None:
    """Unless vLLM's rules are asked for; ordinary requests are vLLM's."""
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    config |= {"suppress_tokens": OFTEN, "begin_suppress_tokens": [EOS, FIRST]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    widths, options = (5, 2, 3), {"max_model_len": 128, "max_num_batched_tokens": 256}
    asked = [(seed, beam_params(width, n=width, max_tokens=MAX_TOKENS)) for seed, width in enumerate(widths)]
    free = [(0, beam_params(5, n=5, max_tokens=MAX_TOKENS, semantics="vllm"))]
    free += [(0, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))]
    *outputs, as_vllm, greedy = run(engines(tmp_path, **options), [*asked, *free])
    *plain, free_as_vllm, free_greedy = run(engines(model, **options), [*asked, *free])
    for seed, (width, output) in enumerate(zip(widths, outputs, strict=True)):
        theirs = transformers_answers(tmp_path, sound(seed), width, MAX_TOKENS)
        assert agree(engine_answers(output, 1.0), theirs), seed
        assert not {*OFTEN} & {token for one in output.outputs for token in one.token_ids}
    for one, other in ((as_vllm, free_as_vllm), (greedy, free_greedy)):
        assert [hypothesis.token_ids for hypothesis in one.outputs] == [own.token_ids for own in other.outputs]
    assert {one.token_ids[0] for output in plain for one in output.outputs} & {EOS, FIRST}, "choose another token"
    assert {*OFTEN} & {token for output in plain for one in output.outputs for token in one.token_ids}


def test_first_tokens_and_suppressed_ones_are_those_of_whispers_own_generate(engine: Engine, model: Path) -> None:
    """vLLM bans tokens before probabilities are made of logits, transformers does so if it makes these anew."""
    bans = dict.fromkeys(SUPPRESSED, -100.0)
    outputs = run(engine, searches(4, 3, logit_bias=bans))
    for seed, (output, width) in enumerate(zip(outputs, (4, 3), strict=True)):
        theirs = whispers_answer(
            model, sound(seed), width, MAX_TOKENS, suppress_tokens=SUPPRESSED, renormalize_logits=True
        )
        assert not {*SUPPRESSED} & {*theirs.token_ids}
        assert agree(engine_answers(output, 1.0)[:1], [theirs])


@pytest.fixture(scope="session")
def model_with_timestamps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that may not start later than after 0.1 s, nor without text."""
    ruled = {"max_initial_timestamp_index": 5, "suppress_tokens": OFTEN, "begin_suppress_tokens": [EOS]}
    return make_whisper(tmp_path_factory.mktemp("whisper"), TIMESTAMPS_PER_SECOND + 1, **ruled)


TASK = [START, ENGLISH, TRANSCRIBE]
WITH_TIMESTAMPS = {
    "freely": TASK,
    "from the start": [*TASK, FIRST_TIMESTAMP],
    "from a text": [*TASK, FIRST_TIMESTAMP + 2, 7, FIRST_TIMESTAMP + 20, FIRST_TIMESTAMP + 20, 8],
    "after what was said before": [PREVIOUS, 5, FIRST_TIMESTAMP + 40, *TASK],
}


def hears(
    engine: Engine,
    jobs: list[tuple[int, list[int], SamplingParams]],
    after_step: Callable[[int], None] = lambda _: None,
) -> list[Any]:
    """The answers to jobs: the seed of a sound, the decoder's prompt, and how it is searched."""
    return run(engine, [(seed, params) for seed, _, params in jobs], after_step, [prompt for _, prompt, _ in jobs])


def test_timestamps_follow_the_rules_of_transformers(engines: Engines, model_with_timestamps: Path) -> None:
    engine = engines(model_with_timestamps, max_model_len=128, max_num_batched_tokens=256)
    asked: list[tuple[int, list[int], int, dict[str, Any]]] = [
        (seed, prompt, width, {}) for seed, prompt in enumerate(WITH_TIMESTAMPS.values()) for width in (1, 3, 5)
    ]
    asked += [(seed, TASK, 4, {"no_repeat_ngram_size": 2}) for seed in (5, 6)]
    searches = [
        (seed, prompt, beam_params(width, n=width, max_tokens=MAX_TOKENS, **options))
        for seed, prompt, width, options in asked
    ]
    num_ruled, outputs = 0, hears(engine, searches)
    assert same(hears(engine, searches, lambda step: preempt_all(engine) if step in (8, 20) else None), outputs)
    for (seed, prompt, width, options), output in zip(asked, outputs, strict=True):
        search = model_with_timestamps, sound(seed), width, MAX_TOKENS, prompt
        ours = engine_answers(output, 1.0)
        theirs = transformers_answers(*search, has_rules_of_timestamps=True, **options)
        if width == 1:
            assert ours[0].token_ids == theirs[0].token_ids, (seed, prompt)
        else:
            assert agree(ours, theirs), (seed, prompt, width)
        num_ruled += theirs != transformers_answers(*search, **options)
    assert num_ruled == len(asked), "the rules change nothing"
    for seed in (0, 1):
        (output,) = hears(engine, [(seed, TASK, beam_params(4, n=4, max_tokens=MAX_TOKENS))])
        asked_whisper = {"return_timestamps": True, "force_unique_generate_call": True}
        best = whispers_answer(model_with_timestamps, sound(seed), 4, MAX_TOKENS, **asked_whisper)
        assert agree(engine_answers(output, 1.0)[:1], [best])


def test_groups_of_beams_are_suppressed_and_keep_to_timestamps(engines: Engines, model_with_timestamps: Path) -> None:
    """The first group, which no other group's tokens hold back, is a search of its own."""
    engine = engines(model_with_timestamps, max_model_len=128, max_num_batched_tokens=256)
    options = {"num_beam_groups": 2, "diversity_penalty": 0.5, "max_tokens": MAX_TOKENS}
    for seed, prompt in enumerate((PROMPT, TASK, [*TASK, FIRST_TIMESTAMP])):
        (output,) = hears(engine, [(seed, prompt, beam_params(6, n=6, **options))])
        found = {tuple(one.token_ids) for one in output.outputs}
        assert not {*OFTEN} & {token for tokens in found for token in tokens}
        for tokens in found if prompt is not PROMPT else ():
            timestamps = [token for token in tokens if token >= FIRST_TIMESTAMP]
            assert timestamps == sorted(timestamps)
        ruled = {"has_rules_of_timestamps": prompt is not PROMPT}
        for answer in transformers_answers(model_with_timestamps, sound(seed), 3, MAX_TOKENS, prompt, **ruled):
            assert tuple(answer.token_ids) in found, (seed, prompt)


def test_timestamps_are_free_where_transformers_has_no_rules(engines: Engines, model_with_timestamps: Path) -> None:
    """After `<|notimestamps|>`, by vLLM's rules, before the task is named, and where tokens are allowed by name."""
    engine = engines(model_with_timestamps, max_model_len=128, max_num_batched_tokens=256)
    params = beam_params(4, n=4, max_tokens=MAX_TOKENS)
    language, without = hears(engine, [(1, [START], params), (1, PROMPT, params)])
    for prompt, output in (([START], language), (PROMPT, without)):
        theirs = transformers_answers(model_with_timestamps, sound(1), 4, MAX_TOKENS, prompt)
        assert agree(engine_answers(output, 1.0), theirs)
    assert any(hypothesis.token_ids[0] < NO_TIMESTAMPS for hypothesis in language.outputs)
    as_vllm = beam_params(4, n=4, max_tokens=MAX_TOKENS, semantics="vllm")
    (output,) = hears(engine, [(1, [*TASK, FIRST_TIMESTAMP], as_vllm)])
    stamped = [[token >= FIRST_TIMESTAMP for token in one.token_ids] for one in output.outputs]
    in_a_row = [all(three) for each in stamped for three in zip(each, each[1:], each[2:], strict=False)]
    assert any(in_a_row), "a rule would ask for text after two timestamps"
    (output,) = hears(engine, [(1, TASK, beam_params(4, n=4, max_tokens=3, allowed_token_ids=[7, 8, 9]))])
    assert all({*one.token_ids} <= {7, 8, 9} and len(one.token_ids) == 3 for one in output.outputs)


def test_llm_beam_search_finds_what_vllms_own_loop_finds(engine: Engine, encoded: list[int]) -> None:
    prompts = [prompt_of(sound(seed)) for seed in (1, 3)]
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    ours = engine.llm.beam_search(prompts, params)
    assert sum(encoded) == len(prompts), "it was not searched in the engine"
    theirs = llm_beam_search.original(engine.llm, prompts, params)
    assert sum(encoded) > 10 * len(prompts), "this loop encodes for each beam and token"
    for found, expected in zip(ours, theirs, strict=True):
        for one, other in zip(found.sequences, expected.sequences, strict=True):
            assert one.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-4)
            assert (one.tokens, one.text) == (other.tokens, other.text)


def test_all_rows_of_a_group_hold_the_same_blocks_of_what_was_encoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, kv = engine.scheduler.kv_cache_manager, engine.runner.rows.kv
    announced, copied, seen = [], set(), dict[str, list[int]]()
    announce, copy = manager.announce, kv.copy_blocks

    def announcing(*args: Any) -> int:
        announced.append(announce(*args))
        return announced[-1]

    def copying(pairs: np.ndarray) -> None:
        copied.update(pairs.ravel().tolist())
        copy(pairs)

    def look(step: int) -> None:
        for group_id, trie in encoder_blocks(engine).items():
            blocks = trie.row_blocks(0)
            assert len(blocks) == trie.num_live_blocks == ENCODER_BLOCKS
            assert all(trie.row_blocks(row) == blocks for row in range(trie.width))
            assert all(manager.block_pool.blocks[block].ref_cnt == 1 for block in blocks)
            assert seen.setdefault(group_id, blocks) == blocks, "they were allocated again"

    monkeypatch.setattr(manager, "announce", announcing)
    monkeypatch.setattr(kv, "copy_blocks", copying)
    run(engine, searches(4, 5, ignore_eos=True), look)
    assert announced == [4 + ENCODER_BLOCKS, 5 + ENCODER_BLOCKS]  # a tail for each row
    assert len(seen) == 2
    assert copied
    assert not copied & {block for blocks in seen.values() for block in blocks}


def test_copied_rows_search_as_rows_do_that_vllm_takes_in(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = searches(4, 3)
    assert engine.runner._copies_rows
    expected = run(engine, jobs)
    monkeypatch.setitem(vars(engine.runner), "_copies_rows", False)
    assert same(run(engine, jobs), expected)


def test_the_encoder_runs_again_after_a_preemption(engine: Engine, encoded: list[int]) -> None:
    jobs = searches(4, 3, 5, ignore_eos=True)
    expected = run(engine, jobs)
    encoded.clear()
    outputs = run(engine, jobs, lambda step: preempt_all(engine) if step in (8, 20) else None)
    assert same(outputs, expected)
    assert sum(encoded) == 3 * len(jobs)


def test_searches_share_too_few_blocks_by_taking_turns(engine: Engine) -> None:
    jobs, scheduler = searches(4, 3, 5, ignore_eos=True), engine.scheduler
    expected, preempted = run(engine, jobs), scheduler.tally.stats.preemptions
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - (2 * 5 + 4 + 2 * ENCODER_BLOCKS))
    try:
        outputs = run(engine, jobs)
    finally:
        pool.free_blocks(taken)
    assert same(outputs, expected)
    assert scheduler.tally.stats.preemptions > preempted


@pytest.mark.parametrize("step", [1, 2, 9])
def test_an_abort_gives_back_what_was_encoded(engine: Engine, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    jobs = searches(4, 3)
    expected = run(engine, jobs)[1:]
    aborting = AbortWithin(engine, monkeypatch, "0", step)
    outputs = run(engine, jobs)
    assert aborting.num_steps > step
    assert outputs[0] is None
    assert same(outputs[1:], expected)


def test_a_group_that_is_preempted_and_aborted_leaves_nothing(engine: Engine) -> None:
    core = engine.llm.llm_engine

    def disturb(step: int) -> None:
        if step == 6:
            engine.scheduler._preempt_request(engine.scheduler.running.pop(), time.monotonic())
            core.abort_request(["1"])

    outputs = run(engine, searches(4, 3), disturb)
    assert outputs[0] is not None
    assert outputs[1] is None


def test_a_prompt_without_a_sound_is_refused(engine: Engine) -> None:
    """vLLM's own answer to it is made of NaNs."""
    with pytest.raises(ValueError, match="beam_width needs data for this model's encoder; add multi_modal_data"):
        engine.llm.generate([{"prompt_token_ids": PROMPT}], beam_params(2), use_tqdm=False)


def test_speculation_is_refused_where_there_is_an_encoder(model: Path) -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    arguments = EngineArgs(str(model), additional_config={"trie_beam": {}}, speculative_config=speculative)
    with pytest.raises(ValueError, match="trie_beam does not support speculative_config on an encoder-decoder model"):
        arguments.create_engine_config()
