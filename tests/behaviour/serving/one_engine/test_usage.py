"""Usage in every chunk of a stream: that of the chunk's own choice, as vLLM streams it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support.served import PROMPTS, beams

pytestmark = pytest.mark.slow

USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize(
    "options",
    [beams(3), {"use_beam_search": True}, beams(3, trace=1), beams(3, beam_results=1)],
    ids=lambda options: "-".join(map(str, options)) + str(options.get("vllm_xargs", "")),
)
def test_each_choice_has_its_own_usage(
    serve: Callable[..., AsyncOpenAI], loop: asyncio.AbstractEventLoop, options: dict[str, Any]
) -> None:
    client = serve()
    has_own_fields = len(options.get("vllm_xargs", {})) > 1  # which one prompt alone may ask for
    prompts = PROMPTS[:1] if has_own_fields else PROMPTS[:3]

    async def ask() -> None:
        asked: dict[str, Any] = {"model": "target", "prompt": prompts, "max_tokens": 24, "n": 3, "stop": ["\n\n"]}
        body = {"return_token_ids": True, **options}
        (whole, stream) = (
            await client.completions.create(**asked, extra_body=body),
            await client.completions.create(**asked, extra_body=body, stream=True, stream_options=USAGE),
        )
        *chunks, end = [chunk async for chunk in stream]
        assert end.usage == whole.usage
        choices: list[Any] = [chunk.choices[0] for chunk in chunks]
        assert len(choices) == 3 * len(prompts)
        for chunk, choice in zip(chunks, choices, strict=True):
            prompt, found = choice.prompt_token_ids, choice.token_ids
            usage: Any = chunk.usage
            expected = (len(prompt), len(found), len(prompt) + len(found))
            assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == expected
        assert len({(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage}) > 1

    loop.run_until_complete(ask())


def test_each_choice_of_a_chat_has_its_own_usage(
    serve: Callable[..., AsyncOpenAI], loop: asyncio.AbstractEventLoop
) -> None:
    client = serve()

    async def ask() -> None:
        messages: Any = [{"role": "user", "content": PROMPTS[0]}]
        asked: dict[str, Any] = {"model": "target", "messages": messages, "max_tokens": 24, "n": 3, "stop": ["\n\n"]}
        body = {"return_token_ids": True, **beams(3)}
        stream = await client.chat.completions.create(**asked, extra_body=body, stream=True, stream_options=USAGE)
        *chunks, end = [chunk async for chunk in stream]
        counts = [len(chunk.choices[0].model_extra["token_ids"]) for chunk in chunks]
        assert [chunk.usage.completion_tokens for chunk in chunks] == counts
        assert end.usage.completion_tokens == sum(counts)
        assert {chunk.usage.prompt_tokens for chunk in chunks} == {end.usage.prompt_tokens}

    loop.run_until_complete(ask())
