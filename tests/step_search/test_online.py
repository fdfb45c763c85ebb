"""A search by steps leaves the loop of its server to others while it reckons."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import Any

import pytest
from vllm.exceptions import GenerationError

from vllm_trie.step_search import online
from vllm_trie.step_search.online import StepSearches, _step_search_in_thread

GIVE_UP = 10  # seconds until a loop that has no turn counts as blocked


class Reckoning:
    """A search of one round, which reckons until the loop has had a turn."""

    request_id = "wide"

    def __init__(self) -> None:
        self.loop, self.is_ended = asyncio.get_running_loop(), False

    def _let_others_have_a_turn(self) -> None:
        turn = threading.Event()
        self.loop.call_soon_threadsafe(turn.set)
        assert turn.wait(GIVE_UP), "the loop was blocked while a search reckoned"

    def requests(self) -> dict[str, tuple[str, None]]:
        self._let_others_have_a_turn()
        return {"candidate": ("prompt", None)}

    def take(self, outputs: list[Any]) -> list[str]:
        self._let_others_have_a_turn()
        return outputs

    def scorer(self, candidates: list[str]) -> list[float]:
        self._let_others_have_a_turn()
        return [1.0] * len(candidates)

    def judge(self, scores: list[float]) -> bool:
        self._let_others_have_a_turn()
        return True

    def answer(self) -> str:
        return "answer"

    def failure(self, error: Exception) -> Any:
        raise error

    def end(self) -> None:
        self.is_ended = True

    def take_released(self) -> list[str]:
        return []


class Endless(Reckoning):
    """A search that goes on until it is aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.search, self.scored = self, list[float]()

    def judge(self, scores: list[float]) -> bool:
        self.scored += scores
        return False

    def best_so_far(self, count: int) -> list[float]:
        return self.scored[:count]

    def aborted(self) -> str:
        return "so far"


class PausedError(GenerationError):
    """What vLLM 0.33 raises."""


async def draw(candidate_id: str, prompt: str, params: None) -> AsyncGenerator[Any, None]:
    yield candidate_id


class AnEngine:
    """Of which a search without KV blocks to release asks nothing."""


def test_others_have_their_turns_while_a_search_reckons() -> None:
    async def ask() -> None:
        request: Any = Reckoning()
        engine: Any = AnEngine()
        assert [output async for output in StepSearches()._search(engine, request, draw)] == ["answer"]
        assert request.is_ended

    asyncio.run(ask())


@pytest.mark.parametrize("num_rounds", [0, 2])
def test_a_search_that_an_engine_pauses_answers_with_what_it_has(
    monkeypatch: pytest.MonkeyPatch, num_rounds: int
) -> None:
    """vLLM 0.33 refuses candidates then. A search that has none yet is refused, too."""
    monkeypatch.setattr(online, "is_refusal_of_paused_vllm", lambda error: isinstance(error, PausedError))
    left = num_rounds

    async def pausing_draw(candidate_id: str, prompt: str, params: None) -> AsyncGenerator[Any, None]:
        nonlocal left
        if not left:
            raise PausedError("Generation is paused.")
        left -= 1
        yield candidate_id

    async def ask() -> None:
        request: Any = Endless()
        engine: Any = AnEngine()
        assert [output async for output in StepSearches()._search(engine, request, pausing_draw)] == ["so far"]

    with nullcontext() if num_rounds else pytest.raises(PausedError):
        asyncio.run(ask())


def test_who_cancels_what_reckons_waits_until_it_is_done() -> None:
    """Nobody else may touch a search while a thread does."""
    begun, may_end = threading.Event(), threading.Event()

    def reckon() -> None:
        begun.set()
        assert may_end.wait(GIVE_UP)

    async def cancel() -> None:
        reckoning = asyncio.ensure_future(_step_search_in_thread(reckon))
        await asyncio.to_thread(begun.wait, GIVE_UP)
        reckoning.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not reckoning.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await reckoning

    asyncio.run(cancel())
