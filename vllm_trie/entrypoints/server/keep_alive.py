"""Lets vLLM keep the connection of a stream alive before its first event: vLLM does so only once it has the stream.

A stream of beams is otherwise returned with its first event, so that a refusal is a response of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any
from weakref import finalize

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.logger import init_logger

logger = init_logger("vllm.trie_beam.server")


def server_keep_alive_interval(raw_request: Any) -> float:
    """The seconds of --sse-keep-alive-interval, as vLLM's routers read them; 0 for none."""
    args = None if raw_request is None else getattr(raw_request.app.state, "args", None)
    interval = float(getattr(args, "sse_keep_alive_interval", 0))
    return interval if 0 < interval < float("inf") else 0.0


async def stream_within_interval(
    beginning: Coroutine[Any, Any, Any], interval: float, error_event: Callable[[Exception], str]
) -> Any:
    """What `beginning` returns or raises; if that takes longer than `interval`, a stream that waits for it.

    Args:
        beginning: Returns a stream of events, or an error. It is cancelled when the stream is closed, or dropped.
        interval: In seconds.
        error_event: Makes the content of an event of an error.
    """
    begun = asyncio.create_task(beginning)
    try:
        await asyncio.wait([begun], timeout=interval)
    except asyncio.CancelledError:
        begun.cancel()
        raise
    if begun.done():
        return begun.result()
    events = _events_once_begun(begun, error_event)
    finalize(events, begun.cancel).atexit = False  # where nobody reads the stream
    return events


async def _events_once_begun(
    begun: asyncio.Task[Any], error_event: Callable[[Exception], str]
) -> AsyncGenerator[str, None]:
    """The events of a stream that has yet to begin; an error is an event, as the response has begun."""
    try:
        events = await begun
    except Exception as error:
        logger.exception("A stream of beams failed before its first event.")
        failure = error_event(error)
    else:
        if not isinstance(events, ErrorResponse):
            async with aclosing(events):
                async for event in events:
                    yield event
            return
        failure = json.dumps(events.model_dump())
    yield f"data: {failure}\n\n"
    yield "data: [DONE]\n\n"
