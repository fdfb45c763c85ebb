"""Streams that vLLM's parsers of reasoning read: their parts together are what they make of the whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import pytest
from openai import AsyncOpenAI
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser

from tests.support.served import PROMPTS, beams

pytestmark = pytest.mark.slow

BEAMS = [{"use_beam_search": True, **beams(3)}, beams(3)]


class ReasonsBetweenTokens(DeepSeekR1ReasoningParser):
    """As most of vLLM's parsers: here between tokens that the answer of a chat has, the first one first."""

    start_token, end_token = "\n       ", "("

    @cached_property
    def vocab(self) -> dict[str, int]:
        return {self.model_tokenizer.decode([token]): token for token in range(len(self.model_tokenizer))}

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return False  # in the prompt, which has such tokens, too


class ReasonsInDocs(ReasonsBetweenTokens):
    """Between tokens that the answer of a response has."""

    start_token, end_token = "\n   ", " a"


def client_of(serve: Callable[..., AsyncOpenAI], parser: type[ReasonsBetweenTokens]) -> AsyncOpenAI:
    ReasoningParserManager.register_module(parser.__name__, module=parser)
    return serve("--reasoning-parser", parser.__name__)


@pytest.mark.parametrize("options", BEAMS, ids=lambda options: "-".join(map(str, options)))
def test_the_parts_of_a_chat_have_the_reasoning_and_the_content_of_the_whole(
    serve: Callable[..., AsyncOpenAI], loop: asyncio.AbstractEventLoop, options: dict[str, Any]
) -> None:
    client = client_of(serve, ReasonsBetweenTokens)

    async def ask() -> None:
        messages: Any = [{"role": "user", "content": PROMPTS[0]}]
        asked: dict[str, Any] = {"model": "target", "messages": messages, "max_tokens": 40, "extra_body": options}
        (whole,) = (await client.chat.completions.create(**asked)).choices
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
        parts: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
        message: Any = whole.message
        assert len(parts) > 3
        assert message.reasoning
        assert message.content
        assert "".join(getattr(part, "reasoning", None) or "" for part in parts) == message.reasoning
        assert "".join(part.content or "" for part in parts) == message.content

    loop.run_until_complete(ask())


def test_the_parts_of_a_response_have_the_reasoning_and_the_content_of_the_whole(
    serve: Callable[..., AsyncOpenAI], loop: asyncio.AbstractEventLoop
) -> None:
    client = client_of(serve, ReasonsInDocs)

    async def ask() -> None:
        asked: dict[str, Any] = {"model": "target", "input": PROMPTS[0], "max_output_tokens": 40}
        whole: Any = await client.responses.create(**asked, extra_body=beams(3))
        events = [event async for event in await client.responses.create(stream=True, **asked, extra_body=beams(3))]
        (reasoning,) = [item.content[0].text for item in whole.output if item.type == "reasoning"]
        of_parts = [
            "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
            for kind in ("reasoning_text", "output_text")
        ]
        assert of_parts == [reasoning, whole.output_text]

    loop.run_until_complete(ask())
