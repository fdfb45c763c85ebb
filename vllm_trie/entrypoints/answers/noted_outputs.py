"""Records the engine's outputs behind a server's response, which itself lacks the number of tokens per choice."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar

from vllm.outputs import RequestOutput

_noted: ContextVar[list[list[RequestOutput]] | None] = ContextVar("noted outputs", default=None)


@contextmanager
def noting_answer_outputs() -> Iterator[list[list[RequestOutput]]]:
    """Record, in this `with` block, the last output of each prompt, in the order of the prompts."""
    outputs: list[list[RequestOutput]] = []
    before = _noted.set(outputs)
    try:
        yield outputs
    finally:
        _noted.reset(before)


def noted_answer_outputs(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a prompt, recorded if this runs within `noting_answer_outputs`."""
    if (of_all := _noted.get()) is None:
        return outputs
    of_all.append([])
    return _note_answer_outputs(outputs, of_all[-1])


async def _note_answer_outputs(
    outputs: AsyncGenerator[RequestOutput, None], last: list[RequestOutput]
) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(outputs):
        async for output in outputs:
            last[:] = [output]
            yield output
