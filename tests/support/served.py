"""What tests ask a server for, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from benchmarks.server import Server

TITLES = ["return self", "raise ValueError", "yield from items", "import os", "pass"]  # of the catalog "lines"
NEWER = ["assert value", "break", "continue"]  # of another one
PROMPTS = ["def is_prime(number):", "class Foo:\n    def close(self):", "import os\n", "    return"]


def complete(server: Server, prompt: Any = PROMPTS[0], max_tokens: int = 16, **options: Any) -> Any:
    """Options that the client does not know go into the body."""
    known = {"n", "stop", "logprobs", "logit_bias", "presence_penalty", "temperature", "seed", "stream", "echo"}
    known.add("stream_options")
    extra = {name: options.pop(name) for name in list(options) if name not in known}
    return server.client.completions.create(
        model="target", prompt=prompt, max_tokens=max_tokens, extra_body=extra, **options
    )


def chat(server: Server, **options: Any) -> Any:
    messages = [{"role": "user", "content": PROMPTS[0]}]
    return server.client.chat.completions.create(model="target", messages=messages, max_tokens=12, **options)


def beams(width: int, **options: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"beam_width": width, **options}}


BOTH_WAYS = pytest.mark.parametrize(
    "options", [beams(6), {"use_beam_search": True}], ids=["beam_width", "use_beam_search"]
)


async def all_of(outputs: AsyncIterator[Any]) -> list[Any]:
    return [output async for output in outputs]


def abort_by(server: Server, vanish: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Let a client vanish, again where its search was over before that: it is a race, which a busy machine decides."""
    for _ in range(20):
        server.wait_until_idle()
        aborted = finished_groups(server)["abort"]
        asyncio.run(vanish())
        server.wait_until_idle()
        if finished_groups(server)["abort"] == aborted + 1:
            return
    pytest.fail("no search ended with its client")


def finished_groups(server: Server) -> dict[str, float]:
    """How many beam groups ended so far, by reason."""
    name = "vllm:trie_beam_groups_finished_total"
    reasons = ("stop", "length", "abort", "error")
    return {reason: server.gauge(name, label=f'finished_reason="{reason}"') for reason in reasons}
