"""Best-of-n search over steps, written plainly: one beam after the other, nothing kept but texts, tokens and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_trie.search.step_search import derived_seed


class Found(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    score: float
    reason: str


class Drawn(NamedTuple):
    text: str
    tokens: tuple[int, ...]
    reason: str | None  # None: it came to a delimiter


Draw = Callable[[tuple[int, ...], int, int, bool], Drawn]  # tokens so far, seed, most tokens, stops at delimiters


def search(
    draw: Draw,
    score: Callable[[str], float],
    width: int,
    candidates: int,
    max_tokens: int,
    max_steps: int | None = None,
    stops_early: bool = False,
    seed: int = 0,
) -> list[Found]:
    """The best `width` texts, best first."""
    beams: list[tuple[str, tuple[int, ...]]] = [("", ())]
    completed: list[Found] = []
    number = 0
    while beams:
        places = [beams[i % len(beams)] for i in range(width * candidates)]
        active: list[Found] = []
        for i, (text, tokens) in enumerate(places):
            is_last = max_steps is not None and number == max_steps - 1
            own_seed = derived_seed(seed, number, i % len(beams), i // len(beams))
            drawn = draw(tokens, own_seed, max_tokens - len(tokens), not is_last)
            new_text, new_tokens = text + drawn.text, tokens + drawn.tokens
            reason = drawn.reason or ("length" if len(new_tokens) == max_tokens else None)
            found = Found(new_text, new_tokens, score(new_text), reason or "")
            if reason:
                if all(found.text != other.text for other in completed):
                    completed.append(found)
            elif all(found.text != other.text for other in active):
                active.append(found)
        active.sort(key=lambda f: -f.score)
        beams = [(f.text, f.tokens) for f in active[:width]]
        completed = sorted(completed, key=lambda f: -f.score)[:width]
        number += 1
        if stops_early and len(completed) == width:
            break
    return completed
