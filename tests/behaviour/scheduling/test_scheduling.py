"""Groups among other requests: rows, budget, chunked prefill, prefix cache, preemption, aborts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from tests.support.engine import BLOCK_SIZE, Engine, Engines, num_used_blocks
from tests.support.reference import agree, engine_answers, transformers_beams, transformers_greedy
from tests.support.running import BYTES_PER_BLOCK, prompt_of
from vllm_trie import beam_params
from vllm_trie.messages import HYPOTHESES

pytestmark = pytest.mark.slow


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


def watch_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, tokens) of every step that the model runs."""
    runner, steps = engine.runner, []

    def prepare_inputs(scheduler_output: Any, *args: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        steps.append((len(counts), sum(counts.values())))
        return type(runner).prepare_inputs(runner, scheduler_output, *args)

    monkeypatch.setattr(runner, "prepare_inputs", prepare_inputs)
    return steps


def unsent(engine: Engine) -> list[EngineCoreOutput]:
    """What waits to be sent."""
    outputs: dict[int, EngineCoreOutputs] = {}
    engine.scheduler.outbox.empty_into(outputs, lists_finished=False)
    return [output for of_client in outputs.values() for output in of_client.outputs]


def test_rows_and_tokens_stay_within_the_engines_limits(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(model, max_num_seqs=12, max_num_batched_tokens=64)
    steps = watch_steps(engine, monkeypatch)
    prompts = [prompt_of(150, seed) for seed in range(6)]
    params = [
        beam_params(8, n=8, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20),
        beam_params(5, n=5, max_tokens=20, ignore_eos=True),
        beam_params(12, n=12, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=20),
        beam_params(3, n=3, max_tokens=20, ignore_eos=True),
    ]
    outputs = engine.generate(prompts, params)
    assert max(rows for rows, _ in steps) == 12
    assert max(tokens for _, tokens in steps) <= 64
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        if param.n == 1:
            assert list(output.outputs[0].token_ids) == transformers_greedy(model, prompt, 20)
        else:
            theirs = transformers_beams(model, prompt, param.n, param.n, 20, eos_token_id=None)
            assert agree(engine_answers(output, 1.0), theirs)


def test_queue_order_is_kept_when_a_wide_group_waits_for_rows(engines: Engines, model: Path) -> None:
    engine = engines(model, max_num_seqs=12, max_num_batched_tokens=64)
    add, order = engine.llm.llm_engine.add_request, []
    add("first", {"prompt_token_ids": prompt_of(10)}, beam_params(8, max_tokens=30, ignore_eos=True))
    add("wide", {"prompt_token_ids": prompt_of(10)}, beam_params(12, max_tokens=2, ignore_eos=True))
    add("late", {"prompt_token_ids": prompt_of(10)}, SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.llm.llm_engine.has_unfinished_requests():
        order += [output.request_id for output in engine.llm.llm_engine.step() if output.finished]
    assert order == ["first", "wide", "late"]


def test_searches_of_one_token_take_one_row_each(engines: Engines, model: Path) -> None:
    engine = engines(model, max_num_seqs=8, max_num_batched_tokens=64, async_scheduling=False)
    core, prompts = engine.llm.llm_engine, {str(seed): prompt_of(10, seed) for seed in range(4)}
    for name, prompt in prompts.items():
        core.add_request(name, {"prompt_token_ids": prompt}, beam_params(8, n=8, max_tokens=1, ignore_eos=True))
    outputs = {output.request_id: output for output in core.step()}
    assert outputs.keys() == prompts.keys()
    for name, prompt in prompts.items():
        assert agree(engine_answers(outputs[name], 1.0), transformers_beams(model, prompt, 8, 8, 1, eos_token_id=None))


def test_a_group_that_sits_out_steps_for_want_of_budget_goes_on_where_it_was(
    engines: Engines, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(model, max_num_seqs=54, max_num_batched_tokens=64, long_prefill_token_threshold=15)
    engine.watched.restart()
    long = prompt_of(490)  # 15 tokens a step; once all three groups decode, 49 are set aside and 15 are left
    shorts = {4: prompt_of(62, 1), 28: prompt_of(62, 2), 20: prompt_of(4, 3)}  # by width
    core, finished = engine.llm.llm_engine, {}

    def add(name: str, prompt: list[int], params: SamplingParams) -> None:
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(name, {"prompt_token_ids": prompt}, params)

    def step() -> None:
        finished.update({output.request_id: output for output in core.step()})

    add("long", long, SamplingParams(temperature=0, max_tokens=5))
    for width, prompt in shorts.items():
        add(str(width), prompt, beam_params(width, n=width, max_tokens=50, ignore_eos=True))
        for _ in range(12):  # long enough to fork beyond a full block
            step()
    while core.has_unfinished_requests():
        step()
    assert {4, 28} <= engine.watched.waiting
    assert list(finished["long"].outputs[0].token_ids) == transformers_greedy(model, long, 5)
    for width, prompt in shorts.items():
        theirs = transformers_beams(model, prompt, width, width, 50, eos_token_id=None)
        assert agree(engine_answers(finished[str(width)], 1.0), theirs)


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_prefix_caching_changes_no_answer_and_holds_true_history_only(
    engines: Engines, model: Path, caching: bool
) -> None:
    engine = engines(model, enable_prefix_caching=caching)
    prompts = [prompt_of(3 * BLOCK_SIZE) + prompt_of(extra, extra) for extra in (0, 1, 31, 40)]
    params = beam_params(6, n=6, max_tokens=70, ignore_eos=True)
    first = engine.generate(prompts, params)
    again = engine.generate(prompts, params)
    assert (again[1].num_cached_tokens > 0) == caching
    for prompt, output, repeated in zip(prompts, first, again, strict=True):
        theirs = transformers_beams(model, prompt, 6, 6, 70, eos_token_id=None)
        assert agree(engine_answers(output, 1.0), theirs)
        assert agree(engine_answers(repeated, 1.0), theirs)
    for prompt, output in zip(prompts, first, strict=True):  # replay every hypothesis as a prompt
        for o in output.outputs[:2]:
            replayed = prompt + list(o.token_ids)
            (greedy,) = engine.generate([replayed], SamplingParams(temperature=0, max_tokens=5))
            assert list(greedy.outputs[0].token_ids) == transformers_greedy(model, replayed, 5)


def test_a_group_that_cannot_grow_alone_ends_with_an_error_and_the_engine_goes_on(
    engines: Engines, model: Path
) -> None:
    engine = engines(model, kv_cache_memory_bytes=26 * BYTES_PER_BLOCK, max_num_seqs=24)
    too_wide = beam_params(20, n=2, max_tokens=200, ignore_eos=True)
    fits = beam_params(4, n=4, max_tokens=30, ignore_eos=True)
    prompt = prompt_of(40)
    failed, fine = engine.generate([prompt, prompt], [too_wide, fits])
    for output in failed.outputs:
        assert output.finish_reason == "error"
        assert "beam_width=20" in output.stop_reason
        assert "KV blocks" in output.stop_reason
    theirs = transformers_beams(model, prompt, 4, 4, 30, eos_token_id=None)
    assert agree(engine_answers(fine, 1.0), theirs)


@pytest.mark.parametrize("is_async", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_group_that_starves_by_itself_takes_no_other_with_it(engines: Engines, model: Path, is_async: bool) -> None:
    """By priority, another one may be before it in the queue, and have room as soon as it is gone."""
    engine = engines(model, num_gpu_blocks_override=25, scheduling_policy="priority", async_scheduling=is_async)
    core, answers = engine.llm.llm_engine, dict[str, Any]()
    asked = {"wide": (10, 450, prompt_of(20, 1)), "narrow": (2, 8, prompt_of(430, 2))}
    for priority, (name, (width, max_tokens, prompt)) in zip((1, 0), asked.items(), strict=True):
        params = beam_params(width, n=width, max_tokens=max_tokens, ignore_eos=True)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        core.add_request(name, {"prompt_token_ids": prompt}, params, priority=priority)
        for _ in range(25):
            answers |= {output.request_id: output.outputs for output in core.step()}
    while core.has_unfinished_requests():
        answers |= {output.request_id: output.outputs for output in core.step()}
    assert [output.finish_reason for output in answers["narrow"]] == ["length"] * 2
    assert {output.finish_reason for output in answers["wide"]} == {"error"}
    assert "needs at least" in answers["wide"][0].stop_reason


@pytest.mark.parametrize("after_steps", [0, 1, 2])
def test_an_aborted_group_leaves_nothing_and_disturbs_nobody(engines: Engines, model: Path, after_steps: int) -> None:
    engine = engines(model)
    core = engine.llm.llm_engine
    prompt = prompt_of(70)
    core.add_request("gone", {"prompt_token_ids": prompt_of(50, 1)}, beam_params(5, n=3, max_tokens=60))
    core.add_request("stays", {"prompt_token_ids": prompt}, beam_params(4, max_tokens=40, ignore_eos=True))
    for _ in range(after_steps):
        core.step()
    core.abort_request(["gone"])
    finished = []
    while core.has_unfinished_requests():
        finished += [o for o in core.step() if o.finished]
    assert [o.request_id for o in finished] == ["stays"]
    (theirs,) = transformers_beams(model, prompt, 4, 1, 40, eos_token_id=None)
    assert list(finished[0].outputs[0].token_ids) == theirs.token_ids
    core.step()  # tells the worker
    assert not engine.runner.groups
    assert not engine.runner.req_states.req_id_to_index


def test_a_search_is_one_request_whatever_it_brings_and_has_one_answer(engines: Engines, model: Path) -> None:
    engine = engines(model)
    core, prompt = engine.llm.llm_engine, prompt_of(40)
    params = beam_params(4, n=3, max_tokens=20, ignore_eos=True, logprobs=2)
    core.add_request("g", {"prompt_token_ids": prompt}, params)
    assert params.n == 3
    assert core.get_num_unfinished_requests() == 3, "as many as it will have outputs"
    added, sent = [*engine.scheduler.requests], []
    while engine.scheduler.has_requests():
        outputs, _ = engine.core.step_fn()
        sent += [output for of_client in (outputs or {}).values() for output in of_client.outputs]
    assert [output.request_id for output in sent] == added
    assert len(added) == 1
    theirs = transformers_beams(model, prompt, 4, 3, 20, eos_token_id=None)
    assert sent[0].new_token_ids == [token for one in theirs for token in one.token_ids]
    assert sent[0].new_logprobs.logprob_token_ids.shape == (60, 3)
    core.abort_request(["g"])


def test_sharing_saves_blocks_and_reclaiming_each_step_holds_the_least(engines: Engines, model: Path) -> None:
    engine = engines(model)
    manager, width, length, max_tokens = engine.scheduler.kv_cache_manager, 8, 5 * BLOCK_SIZE, 2 * BLOCK_SIZE
    peaks = {}
    for interval in (1, 1000):
        manager.reclaim_interval, peak = interval, 0
        core = engine.llm.llm_engine
        core.add_request(
            "g", {"prompt_token_ids": prompt_of(length)}, beam_params(width, max_tokens=max_tokens, ignore_eos=True)
        )
        while core.has_unfinished_requests():
            core.step()
            peak = max(peak, num_used_blocks(manager))
        peaks[interval] = peak
    unshared = width * ((length + max_tokens) // BLOCK_SIZE)
    assert peaks[1] <= peaks[1000] < unshared
    assert manager.total_counts().shared > 0
    assert manager.total_counts().reclaimed > 0


def test_ending_all_requests_answers_each_search_once(engines: Engines, model: Path) -> None:
    engine = engines(model)
    core = engine.llm.llm_engine
    core.add_request("g", {"prompt_token_ids": prompt_of(40)}, beam_params(5, n=3, max_tokens=60))
    for _ in range(5):
        core.step()
    assert engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == [], "which the engine would answer"
    (output,) = unsent(engine)
    assert output.kv_transfer_params["trie_beam"][HYPOTHESES].are_aborted
    assert output.new_token_ids
    core.abort_request(["g"])


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_is_vllms_own_before_and_after_each_search_and_its_answers_stay(
    engines: Engines, model: Path, is_async: bool
) -> None:
    engine = engines(model, async_scheduling=is_async)
    core, parts = engine.llm.llm_engine, [engine.scheduler, engine.scheduler.kv_cache_manager, engine.runner]
    parts.append(engine.runner.attn_groups[0][0].get_metadata_builder(0))
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    search = beam_params(3, n=3, max_tokens=6, ignore_eos=True)
    jobs = {"long": (prompt_of(9), long)} | {f"search {n}": (prompt_of(40, n), search) for n in range(3)}
    alone = {name: engine.generate([prompt], params)[0].outputs for name, (prompt, params) in jobs.items()}
    together, at_rest, to_come, num_steps = dict[str, Any](), list[bool](), [*jobs], 0
    while to_come or core.has_unfinished_requests():
        if num_steps % 14 == 0 and to_come:
            name = to_come.pop(0)
            core.add_request(name, {"prompt_token_ids": jobs[name][0]}, jobs[name][1])
        together |= {output.request_id: output.outputs for output in core.step() if output.finished}
        at_rest.append(all(part.is_at_rest for part in parts))
        num_steps += 1
    assert [is_at_rest for is_at_rest, _ in groupby(at_rest[2:])] == [True, *[False, True] * 3]
    for name, outputs in alone.items():
        assert [output.token_ids for output in together[name]] == [output.token_ids for output in outputs], name


@pytest.mark.parametrize("extra_args", [{"beam_width": 4}, {"beam_width": -4}, {"beam_widht": 4}])
def test_a_request_that_the_front_end_did_not_check_gets_an_error_and_the_engine_goes_on(
    engines: Engines, model: Path, extra_args: dict
) -> None:
    engine = engines(model)
    params = SamplingParams(max_tokens=4, extra_args=extra_args)
    engine.scheduler.add_request(Request("unchecked", prompt_of(4), params, None))
    (output,) = unsent(engine)
    assert output.request_id == "unchecked"
    assert output.finish_reason == FinishReason.ERROR
    assert "VLLM_USE_RUST_FRONTEND" in output.stop_reason
    assert len(engine.generate([prompt_of(4)], beam_params(2, n=2, max_tokens=3))[0].outputs) == 2


def test_copies_for_a_group_that_was_preempted_at_once_are_not_made(engines: Engines, model: Path) -> None:
    engine = engines(model)
    core, manager = engine.llm.llm_engine, engine.scheduler.kv_cache_manager
    core.add_request("g", {"prompt_token_ids": prompt_of(40)}, beam_params(5, max_tokens=60))
    core.step()
    (request,) = engine.scheduler.running
    assert manager.allocate_slots(request, 1) is not None  # fans the group out, whose partial block is to be copied
    manager.free(request)
    assert manager.take_update(request.request_id) is None
    core.abort_request(["g"])
