"""Searches that are aborted, or paused, answer with the best that they have found so far."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from threading import Event
from typing import Any

import pytest
from openai import AsyncOpenAI
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.stats import IterationStats

from tests.support.served import PROMPTS, all_of, beams
from vllm_trie import Trace, beam_params, hypotheses, supported_engines
from vllm_trie.entrypoints import async_llm
from vllm_trie.entrypoints.requests.item_sets import RequestItemSets
from vllm_trie.messages import NO_HYPOTHESIS
from vllm_trie.step_search import online, opening

pytestmark = pytest.mark.slow

FINAL_ONLY, DELTA, CUMULATIVE = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE
LONG: dict[str, Any] = {"max_tokens": 480, "ignore_eos": True}


async def ended(llm: AsyncLLM, jobs: dict[str, tuple[SamplingParams, RequestOutputKind]], how: str) -> dict[str, Any]:
    """The outputs of requests that are ended, all together, once each of them has been searched for a while."""
    started, outputs = asyncio.Event(), dict[str, list[Any]]()

    async def read(name: str, params: SamplingParams, kind: RequestOutputKind) -> None:
        params = params.clone()
        params.output_kind = kind
        outputs[name] = []
        async for output in llm.generate(PROMPTS[0], params, name):
            outputs[name].append(output)
            if name == "clock" and len(outputs[name]) == 12:
                started.set()

    clock = SamplingParams(temperature=0, **LONG)
    reading = [asyncio.ensure_future(read(name, *job)) for name, job in {"clock": (clock, DELTA), **jobs}.items()]
    await started.wait()
    if how == "pause":
        await llm.pause_generation(mode="abort")
    elif how == "all":  # as vLLM's /abort_requests does where it is given no ids
        processor = llm.output_processor
        await llm.abort([*processor.request_states, *processor.parent_requests], internal=True)
    else:
        await llm.abort([*jobs, "clock"])
    await asyncio.gather(*reading)
    await llm.resume_generation()
    assert not llm.output_processor.has_unfinished_requests()
    return outputs


def run(loop: asyncio.AbstractEventLoop, job: Awaitable[Any]) -> Any:
    return loop.run_until_complete(asyncio.wait_for(job, 120))


async def have_begun(llm: AsyncLLM, count: int) -> None:
    while llm.output_processor.get_num_unfinished_requests() < count:
        await asyncio.sleep(0.01)


async def check_it_serves_on(llm: AsyncLLM) -> None:
    params = beam_params(2, max_tokens=4)
    params.output_kind = FINAL_ONLY
    (after,) = await all_of(llm.generate(PROMPTS[0], params, "after"))
    assert after.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("how", ["abort", "pause", "all"])
def test_the_best_hypotheses_so_far_come_back(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str) -> None:
    search = beam_params(4, n=3, logprobs=1, **LONG)
    stochastic = beam_params(4, n=2, do_sample=True, stochastic=True, **LONG)
    groups = beam_params(4, n=4, num_beam_groups=2, diversity_penalty=0.5, **LONG)
    compact = beam_params(4, compact=True, trace=True, **LONG)
    results = beam_params(4, n=3, beam_results=True, **LONG)
    jobs = {"n": search, "delta": search, "stochastic": stochastic, "groups": groups}
    jobs |= {"compact": compact, "results": results}
    kinds = {name: (params, DELTA if name == "delta" else FINAL_ONLY) for name, params in jobs.items()}

    async def check() -> None:
        outputs = await ended(llm, kinds, how)
        for name in ("n", "stochastic", "groups"):
            ((answer,), n) = outputs[name], jobs[name].n
            assert [found.finish_reason for found in answer.outputs] == ["abort"] * n
            assert all(found.text and len(found.token_ids) > 2 for found in answer.outputs)
            assert len({tuple(found.token_ids) for found in answer.outputs}) == n
        ((answer,),) = (outputs["n"],)
        sums = [found.cumulative_logprob for found in answer.outputs]
        assert all(better >= worse for better, worse in pairwise(sums))
        for found in answer.outputs:
            own = [place[token].logprob for place, token in zip(found.logprobs, found.token_ids, strict=True)]
            assert sum(own) == pytest.approx(found.cumulative_logprob, abs=1e-4)
        parts = [found for output in outputs["delta"] for found in output.outputs]
        assert sorted(part.index for part in parts if part.finish_reason == "abort") == [0, 1, 2]
        (answer,) = outputs["compact"]
        found = hypotheses(answer)
        assert (len(found), found.finish_reasons) == (4, ["abort"] * 4)
        assert [*found.token_ids[0][: found.lengths[0]]] == answer.outputs[0].token_ids
        trace = Trace.of(answer)
        assert [trace.hypothesis(number) for number in trace.returned] == [
            [*row[:length]] for row, length in zip(found.token_ids, found.lengths, strict=True)
        ]
        (answer,) = outputs["results"]
        found = answer.kv_transfer_params["trie_beam"]["beam_results"]
        assert [one["output_ids"] for one in found] == [[*one.token_ids] for one in answer.outputs]
        assert {one["meta_info"]["finish_reason"]["type"] for one in found} == {"abort"}
        await check_it_serves_on(llm)

    run(loop, check())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_what_a_stream_has_sent_begins_the_answer(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str) -> None:
    search = beam_params(2, logprobs=1, **LONG)
    jobs = {kind.name: (search, kind) for kind in (DELTA, CUMULATIVE)}

    async def check() -> None:
        outputs = await ended(llm, jobs, how)
        parts, grown = [[output.outputs[0] for output in outputs[name]] for name in jobs]
        assert [parts[-1].finish_reason, grown[-1].finish_reason] == ["abort"] * 2
        assert all(len(part.token_ids) == len(part.logprobs) for part in parts)
        assert grown[-1].text.startswith("".join(part.text for part in parts[:-1]))
        assert all(later.text.startswith(earlier.text) for earlier, later in pairwise(grown))
        total = sum(place[token].logprob for place, token in zip(grown[-1].logprobs, grown[-1].token_ids, strict=True))
        assert total == pytest.approx(grown[-1].cumulative_logprob, abs=1e-4)
        await check_it_serves_on(llm)

    run(loop, check())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_searches_that_wait_answer_with_nothing(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str) -> None:
    """Two that need all rows: one of them has not begun."""
    wide = beam_params(60, n=2, **LONG)

    async def check() -> None:
        outputs = await ended(llm, dict.fromkeys(("one", "other"), (wide, FINAL_ONLY)), how)
        found = sorted(
            (output.outputs for name in ("one", "other") for output in outputs[name]), key=lambda o: o[0].text
        )
        texts = [[bool(one.text) for one in of_search] for of_search in found]
        assert texts == [[False, False], [True, True]]
        assert {one.finish_reason for of_search in found for one in of_search} == {"abort"}
        await check_it_serves_on(llm)

    run(loop, check())


def test_an_ordinary_request_is_aborted_though_a_search_of_its_name_is_still_answered(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering, may_answer = asyncio.Event(), asyncio.Event()

    async def whole_later(output: Any, _: Any) -> Any:
        answering.set()
        await may_answer.wait()
        return output

    monkeypatch.setattr(async_llm, "whole_answer", whole_later)

    async def check() -> None:
        search, ordinary = beam_params(2, max_tokens=4), SamplingParams(temperature=0, **LONG)
        search.output_kind = ordinary.output_kind = FINAL_ONLY
        of_search = asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], search, "name")))
        await answering.wait()
        of_ordinary = asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], ordinary, "name")))
        await have_begun(llm, 1)
        await llm.abort("name")
        ((output,),) = [await asyncio.wait_for(of_ordinary, 30)]
        assert output.outputs[0].finish_reason == "abort"
        may_answer.set()
        assert await of_search
        await check_it_serves_on(llm)

    run(loop, check())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_vllm_counts_a_search_that_was_aborted_as_one(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three, one waits until it is aborted. Their times begin when they came, not when the machine was started."""
    finished, counts, record = dict[str, Any](), list[Any](), IterationStats.update_from_finished_request

    def recorded(self: IterationStats, **fields: Any) -> None:
        record(self, **fields)
        finished[fields["request_id"]] = self.finished_requests[-1]
        counts.append(self.prompt_token_stats)

    monkeypatch.setattr(IterationStats, "update_from_finished_request", recorded)
    wide, jobs = beam_params(55, n=2, **LONG), {"one": (beam_params(3, **LONG), FINAL_ONLY)}
    jobs |= dict.fromkeys(("wide", "waiting"), (wide, FINAL_ONLY))

    async def check() -> None:
        begun = time.monotonic()
        outputs = await ended(llm, jobs, how)
        took = time.monotonic() - begun
        for name in jobs:
            times, ((answer,),) = finished[name], [outputs[name]]
            assert times.finish_reason == FinishReason.ABORT
            assert times.num_generation_tokens == sum(len(one.token_ids) for one in answer.outputs)
            assert times.queued_time + times.prefill_time + times.decode_time <= took
            assert min(times.queued_time, times.prefill_time, times.inference_time) >= 0
        assert finished["waiting"].prefill_time < finished["waiting"].queued_time
        (num_tokens,) = {len(output.prompt_token_ids) for output in outputs["wide"]}
        assert sum({id(one): one.total for one in counts}.values()) == 2 * num_tokens
        await check_it_serves_on(llm)

    run(loop, check())


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_requests_that_are_being_read_answer_with_nothing_at_once(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two is being read, for as long as the test likes; the other one waits for that."""
    may_be_read, read = Event(), RequestItemSets.read

    def read_later(*args: Any) -> Any:
        assert may_be_read.wait(60)
        return read(*args)

    monkeypatch.setattr(RequestItemSets, "read", read_later)
    options = {"allowed_sequences": ["self.x", "self.y = 1"], "beam_width": 2}

    async def check() -> None:
        jobs = {"n": {"n": 2, "logprobs": 1}, "compact": {"extra_args": {**options, "compact": True}}}
        asking = []
        for name, fields in jobs.items():
            params = SamplingParams(**{"extra_args": options, **fields}, max_tokens=9, output_kind=FINAL_ONLY)
            asking.append(asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], params, name))))
        await asyncio.sleep(0.1)
        await (llm.abort([*jobs]) if how == "abort" else llm.pause_generation(mode="abort"))
        ((two,), (one,)) = await asyncio.gather(*asking)
        found = [(out.text, out.token_ids, out.finish_reason, out.stop_reason) for out in two.outputs]
        assert found == [("", [], "abort", None), ("", [], "abort", NO_HYPOTHESIS)]
        assert [out.logprobs for out in two.outputs] == [[], []]
        assert (two.prompt, two.finished, len(hypotheses(one))) == (PROMPTS[0], True, 0)
        await llm.resume_generation()
        may_be_read.set()
        params = SamplingParams(max_tokens=9, extra_args=options)
        assert await all_of(llm.generate(PROMPTS[0], params, "n"))  # the reader serves on
        assert not llm.output_processor.has_unfinished_requests()
        await check_it_serves_on(llm)

    try:
        run(loop, check())
    finally:
        may_be_read.set()


@pytest.mark.parametrize("how", ["abort", "pause"])
def test_a_search_by_steps_answers_with_the_best_that_was_scored(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supported_engines.plugin_config_of(llm.vllm_config).model_copy(
        update={"scorers": {"short": "http://127.0.0.1:9"}}
    )
    monkeypatch.setattr(opening, "plugin_config_of", lambda _: config)

    async def scores(_: Any, candidates: list[Any]) -> list[float]:
        return [-float(len(candidate.text)) for candidate in candidates]

    monkeypatch.setattr(online, "_step_scores", scores)
    by_steps = beam_params(2, n=2, unit="step", step_stop=[" "], scorer="short", seed=0, temperature=1.0, **LONG)

    async def check() -> None:
        outputs = await ended(llm, {"steps": (by_steps, FINAL_ONLY)}, how)
        (answer,) = outputs["steps"]
        assert {found.finish_reason for found in answer.outputs} == {"abort"}
        assert all(found.text and found.token_ids for found in answer.outputs)
        first, second = answer.kv_transfer_params["trie_beam"]["scores"]
        assert first >= second
        await check_it_serves_on(llm)

    run(loop, check())


def test_a_search_by_steps_of_which_nothing_was_scored_answers_with_nothing(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = supported_engines.plugin_config_of(llm.vllm_config).model_copy(
        update={"scorers": {"late": "http://127.0.0.1:9"}}
    )
    monkeypatch.setattr(opening, "plugin_config_of", lambda _: config)

    async def scores(*_: Any) -> list[float]:
        await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(online, "_step_scores", scores)
    by_steps = beam_params(2, n=2, unit="step", step_stop=[" "], scorer="late", logprobs=1, **LONG)

    async def check() -> None:
        ((answer,),) = [(await ended(llm, {"steps": (by_steps, FINAL_ONLY)}, "pause"))["steps"]]
        assert [(out.text, out.finish_reason, out.logprobs) for out in answer.outputs] == 2 * [("", "abort", [])]
        await check_it_serves_on(llm)

    run(loop, check())


def test_a_paused_server_answers_with_what_its_beams_have(
    serve: Callable[..., AsyncOpenAI], llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    """As vLLM's own loop."""
    client = serve()

    async def check() -> None:
        asked: dict[str, Any] = {"model": "target", "prompt": PROMPTS[0], "max_tokens": 480, "n": 3}
        for options in ({"use_beam_search": True}, beams(3)):
            body = {"ignore_eos": True, **options}
            answering = asyncio.ensure_future(client.completions.create(**asked, extra_body=body))
            await have_begun(llm, 1)
            clock = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            assert await all_of(llm.generate(PROMPTS[1], clock, "clock"))
            await llm.pause_generation()
            answer = await answering
            await llm.resume_generation()
            assert [choice.finish_reason for choice in answer.choices] == ["abort"] * 3
            assert all(choice.text for choice in answer.choices)
        await check_it_serves_on(llm)

    run(loop, check())


def test_a_stream_of_a_search_that_waits_says_that_it_was_aborted(
    serve: Callable[..., AsyncOpenAI], llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    client = serve()

    async def ends(of_chunks: Awaitable[Any]) -> list[tuple[str, Any]]:
        choices = [choice async for chunk in await of_chunks for choice in chunk.choices]
        return [(end.finish_reason, end.stop_reason) for end in choices if end.finish_reason is not None]

    async def check() -> None:
        asked: dict[str, Any] = {"model": "target", "max_tokens": 480, "stream": True}
        body = {"ignore_eos": True, **beams(60)}
        begun = asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], beam_params(60, **LONG), "begun")))
        await have_begun(llm, 1)
        complete, chat = client.completions.create, client.chat.completions.create
        messages: Any = [{"role": "user", "content": "x"}]
        waiting = asyncio.gather(
            ends(complete(**asked, prompt=[*PROMPTS[:2]], extra_body=body)),
            ends(complete(**asked, prompt=PROMPTS[0], extra_body={**body, "use_beam_search": True})),
            ends(chat(**asked, messages=messages, extra_body=body)),
        )
        await have_begun(llm, 5)
        await llm.pause_generation()
        assert await begun
        await llm.resume_generation()
        assert await waiting == [[("abort", None)] * 2, [("abort", None)], [("abort", None)]]
        await check_it_serves_on(llm)

    run(loop, check())
