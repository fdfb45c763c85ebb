"""Streams of `AsyncLLM`: parts of one answer, also among other requests, and what is left when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import pairwise
from threading import Event, current_thread, main_thread
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.support.served import all_of
from vllm_trie import StepCandidate, beam_params
from vllm_trie.entrypoints.requests import phrases
from vllm_trie.entrypoints.requests.item_sets import RequestItemSets
from vllm_trie.entrypoints.requests.refusals import BeamRequestError

pytestmark = pytest.mark.slow

PROMPTS = ["def is_prime(number):", "class Foo:\n    def close(self):", "import os\n"]


def asked(llm: AsyncLLM, prompt: str, params: SamplingParams, kind: RequestOutputKind) -> AsyncGenerator[Any, None]:
    params = params.clone()
    params.output_kind = kind
    return llm.generate(prompt, params, f"{kind.name} {prompt} {params.max_tokens}")


def test_deltas_make_the_text_that_grows_to_the_whole(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    params = beam_params(3, max_tokens=40, logprobs=1, stop=["\n\n\n"])
    kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY]

    async def ask() -> list[list[list[Any]]]:
        jobs = [[all_of(asked(llm, prompt, params, kind)) for kind in kinds] for prompt in PROMPTS]
        return [await asyncio.gather(*of_prompt) for of_prompt in jobs]

    most = 0
    for deltas, grown, (whole,) in loop.run_until_complete(ask()):
        expected = whole.outputs[0]
        pieces = [output.outputs[0] for output in deltas]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert [token for piece in pieces for token in piece.token_ids] == [*expected.token_ids]
        assert [place for piece in pieces for place in piece.logprobs] == expected.logprobs
        assert pieces[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-5)
        assert pieces[-1].finish_reason == expected.finish_reason
        texts = [output.outputs[0].text for output in grown]
        assert texts[-1] == expected.text
        assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
        most = max(most, len(pieces), len(texts))
    assert most > 3


def test_a_search_by_steps_takes_any_prompt_and_ends_when_it_is_aborted(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop
) -> None:
    def score(candidates: list[StepCandidate]) -> list[float]:
        return [-len(candidate.text) for candidate in candidates]

    steps = {"unit": "step", "step_stop": ["\n"], "scorer": score, "seed": 1}
    token_ids = llm.get_tokenizer().encode(PROMPTS[0])

    async def ask() -> None:
        returning = {"order": "mcts", "pool": 1, "lookahead": 2}
        params = beam_params(2, max_tokens=16, max_steps=3, **steps, **returning)
        prompts: list[Any] = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": token_ids}, token_ids]
        answers = [await all_of(llm.generate(prompt, params, str(i))) for i, prompt in enumerate(prompts)]
        texts = [answer.outputs[0].text for (answer,) in answers]
        assert len(set(texts)) == 1
        endless = beam_params(2, n=2, max_tokens=480, ignore_eos=True, **{**steps, "step_stop": ["no such line"]})
        searching = asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], endless, "endless")))
        while not llm.output_processor.has_unfinished_requests():
            await asyncio.sleep(0.01)
        await llm.abort("endless")
        (aborted,) = await searching
        assert [output.finish_reason for output in aborted.outputs] == ["abort"] * 2
        assert not llm.output_processor.has_unfinished_requests()

    loop.run_until_complete(asyncio.wait_for(ask(), 60))


def test_a_stream_that_nobody_reads_any_more_ends_its_search(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    endless = beam_params(2, max_tokens=480, ignore_eos=True)

    async def leave() -> None:
        for _ in range(20):  # again where the search was over before its first part was read: busy machines do that
            async with aclosing(asked(llm, PROMPTS[0], endless, RequestOutputKind.DELTA)) as outputs:
                first = await anext(outputs)
            if not first.finished:
                break
        assert not first.finished
        assert not llm.output_processor.has_unfinished_requests()
        (again,) = await all_of(asked(llm, PROMPTS[0], beam_params(2, max_tokens=4), RequestOutputKind.FINAL_ONLY))
        assert again.outputs[0].token_ids

    loop.run_until_complete(asyncio.wait_for(leave(), 60))


def test_others_are_served_while_a_thread_reads_what_a_request_brings(
    llm: AsyncLLM, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading waits for another request to end: on the event loop that would never happen."""
    other_ended, readers = Event(), []
    read = {"sets": RequestItemSets.read, "phrases": phrases.request_phrases_as_tokens}

    def once_another_ended(name: str, *args: Any) -> Any:
        assert other_ended.wait(60)
        readers.append(current_thread())
        return read[name](*args)

    monkeypatch.setattr(RequestItemSets, "read", lambda *args: once_another_ended("sets", *args))
    monkeypatch.setattr(phrases, "request_phrases_as_tokens", lambda *args: once_another_ended("phrases", *args))
    brings = {
        "sets": {"allowed_sequences": ["self.x", "self.y = 1"]},
        "as JSON": {"allowed_sequences": '["self.x", "self.y = 1"]'},
        "phrases": {"phrase_boosts": [("self", 2.0)]},
    }

    async def ask() -> list[Any]:
        asking = []
        for name, options in brings.items():
            params = SamplingParams(max_tokens=9, n=2, extra_args={"beam_width": 2, **options})
            asking.append(asyncio.ensure_future(all_of(llm.generate(PROMPTS[0], params, name))))
        await all_of(llm.generate(PROMPTS[1], SamplingParams(max_tokens=4), "ordinary"))
        await all_of(llm.generate(PROMPTS[1], beam_params(2, max_tokens=4), "plain beams"))
        other_ended.set()
        return await asyncio.gather(*asking)

    (items,), (as_json,), (boosted,) = loop.run_until_complete(asyncio.wait_for(ask(), 120))
    assert {output.text for output in items.outputs} == {"self.x", "self.y = 1"}
    assert [o.token_ids for o in as_json.outputs] == [o.token_ids for o in items.outputs]
    assert all(output.token_ids for output in boosted.outputs)
    assert len(readers) == 3
    assert main_thread() not in readers


def test_what_a_thread_refuses_is_a_refusal(llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
    params = SamplingParams(max_tokens=9, extra_args={"beam_width": 2, "allowed_sequences": "x" * 100})
    with pytest.raises(BeamRequestError, match=r"allowed_sequences='xxx.*' is not a list of 1 to 100,000 strings"):
        loop.run_until_complete(all_of(llm.generate(PROMPTS[0], params, "refused")))
    assert not llm.output_processor.has_unfinished_requests()
