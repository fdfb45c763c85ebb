"""Many strings looked for at once: the automaton of Aho and Corasick 1975, "Efficient string matching"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopStringMatcher:
    """Looks for strings in text that comes piece by piece, in time that does not grow with their number or length.

    A state stands for the longest ending of the text so far with which one of the strings begins.

    Args:
        strings: Not empty, nor is any of them.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next = [dict[str, int]()]  # by state: where a character leads that goes on with a string
        self._ends = [False]  # by state: whether a string ends there
        for string in strings:
            state = ROOT
            for character in string:
                if (following := self._next[state].get(character)) is None:
                    following = self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._ends.append(False)
                state = following
            self._ends[state] = True
        self._shorter = [ROOT] * len(self._next)  # by state: that of the next shorter ending
        waiting = deque(self._next[ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self._after(self._shorter[state], character)
                self._ends[following] |= self._ends[self._shorter[following]]
                waiting.append(following)

    def read(self, text: str, state: int = ROOT) -> tuple[int, bool]:
        """The state after a piece of text, and whether a string ends in this piece, wherever it has begun."""
        is_found = False
        for character in text:
            state = self._after(state, character)
            is_found |= self._ends[state]
        return state, is_found

    def _after(self, state: int, character: str) -> int:
        while (following := self._next[state].get(character)) is None:
            if state == ROOT:
                return ROOT
            state = self._shorter[state]
        return following
