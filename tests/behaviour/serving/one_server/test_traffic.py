"""Searches among other requests, and clients that vanish."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from benchmarks.server import Server
from tests.support.served import PROMPTS, abort_by, beams, complete

pytestmark = pytest.mark.slow


def test_beams_and_ordinary_requests_run_side_by_side(server: Server) -> None:
    """Streaming, greedy, sampled and beam requests at once answer what they answer alone."""

    def streamed(prompt: str) -> str:
        events = complete(server, prompt, 24, temperature=0, stream=True)
        return "".join(event.choices[0].text for event in events if event.choices)

    def texts(**options: Any) -> Any:
        return lambda prompt: [c.text for c in complete(server, prompt, 24, **options).choices]

    kinds = [
        streamed,
        texts(temperature=0),
        texts(n=3, **beams(6)),
        texts(n=4, use_beam_search=True),
        texts(n=2, stop=["\n\n"], **beams(4)),
    ]
    jobs = [(kind, prompt) for prompt in PROMPTS for kind in kinds]
    alone = [kind(prompt) for kind, prompt in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = [future.result() for future in [pool.submit(kind, prompt) for kind, prompt in jobs]]
    assert together == alone


@pytest.mark.parametrize("options", [beams(64), {"use_beam_search": True, **beams(64)}])
def test_a_client_that_vanishes_takes_its_search_with_it(server: Server, options: dict[str, Any]) -> None:
    async def vanish() -> None:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"ignore_eos": True, **options}
        asked = client.completions.create(model="target", prompt=[5] * 16, max_tokens=480, n=8, extra_body=body)
        search, running = asyncio.create_task(asked), 0.0
        while not running and not search.done():
            running = await asyncio.to_thread(server.gauge, "vllm:num_requests_running")
        search.cancel()
        await asyncio.wait([search])
        assert running <= 1, "one search of 64 beams is one running request"

    abort_by(server, vanish)
    assert complete(server, max_tokens=4).choices[0].text
