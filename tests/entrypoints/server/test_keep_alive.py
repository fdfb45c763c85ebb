"""A connection is kept alive while a stream of beams has nothing to send yet."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.utils.sse_keep_alive import SSE_KEEP_ALIVE_COMMENT, with_sse_keep_alive

from tests.support.served import beams
from vllm_trie.entrypoints.requests.refusals import BeamRequestError
from vllm_trie.entrypoints.server import streams

INTERVAL = 0.01  # s
CHUNK = 'data: {"choices":[{"index":0,"text":"x","finish_reason":"stop"}]}\n\n'
DONE = "data: [DONE]\n\n"

both_paths = pytest.mark.parametrize("n", [1, 2], ids=["streamed early", "whole"])


class SlowServer:
    """A server whose searches go on until `released`.

    Args:
        error: What they then raise.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.released, self.cancelled = asyncio.Event(), asyncio.Event()
        self._error = error
        self._serving: Any = OpenAIServingCompletion.__new__(OpenAIServingCompletion)
        self._serving.engine_client = SimpleNamespace(vllm_config=None)
        self._serving.enable_force_include_usage = False

    async def ask(self, n: int, interval: float = INTERVAL) -> Any:
        """What vLLM's router gets for a stream of n hypotheses."""
        args = SimpleNamespace(sse_keep_alive_interval=interval)
        raw_request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(args=args)))
        request = CompletionRequest(prompt="x", stream=True, n=n, **beams(2))
        return await streams.create_server_response.function(self._create, self._serving, request, raw_request)

    async def _create(self, _: Any, request: CompletionRequest, __: Any) -> Any:
        if request.stream:
            return self._events()
        await self._search()
        choices = [{"index": index, "text": "x", "finish_reason": "stop"} for index in range(2)]
        usage = {"prompt_tokens": 1, "total_tokens": 3}
        return CompletionResponse.model_validate({"model": "m", "choices": choices, "usage": usage})

    async def _events(self) -> AsyncGenerator[str, None]:
        await self._search()
        yield CHUNK
        yield DONE

    async def _search(self) -> None:
        try:
            await self.released.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self._error is not None:
            raise self._error


def run(monkeypatch: pytest.MonkeyPatch, job: Callable[[], Awaitable[None]]) -> None:
    monkeypatch.setattr(streams, "has_beams", lambda _: True)
    asyncio.run(asyncio.wait_for(job(), 60))


@both_paths
def test_comments_come_until_the_first_event(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    async def job() -> None:
        server = SlowServer()
        events = with_sse_keep_alive(await server.ask(n), INTERVAL)
        assert await anext(events) == SSE_KEEP_ALIVE_COMMENT
        server.released.set()
        found = [event async for event in events if event != SSE_KEEP_ALIVE_COMMENT]
        assert [event.count('"text"') for event in found] == [*[1] * n, 0]
        assert found[-1] == DONE

    run(monkeypatch, job)


@both_paths
@pytest.mark.parametrize("end", ["closed", "never read", "disconnected"])
def test_a_search_ends_with_its_stream(monkeypatch: pytest.MonkeyPatch, n: int, end: str) -> None:
    async def job() -> None:
        server = SlowServer()
        if end == "disconnected":  # before there is a stream: vLLM cancels what serves the request
            asking = asyncio.create_task(server.ask(n, interval=60))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asking.cancel()
        else:
            events = with_sse_keep_alive(await server.ask(n), INTERVAL)
            if end == "closed":
                assert await anext(events) == SSE_KEEP_ALIVE_COMMENT
                await events.aclose()
            del events
            gc.collect()
        await server.cancelled.wait()

    run(monkeypatch, job)


@both_paths
def test_a_late_error_is_an_event_and_an_early_one_a_response(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    async def job() -> None:
        server = SlowServer(BeamRequestError("beam_width=2 is refused"))
        events = await server.ask(n)
        server.released.set()
        error, done = [event async for event in events]
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 400
        assert "beam_width=2 is refused" in error
        assert done == DONE
        for interval in (60, 0):
            with pytest.raises(BeamRequestError, match="beam_width=2 is refused"):
                await server.ask(n, interval)

    run(monkeypatch, job)
