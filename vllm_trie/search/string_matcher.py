"""Finds many strings at once: the automaton of Aho and Corasick 1975, "Efficient string matching"."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

ROOT = 0


class StopStringMatcher:
    """Finds strings in text that arrives piece by piece, in time independent of their number and length.

    A state stands for the longest ending of the text so far that is the beginning of one of the strings.

    Args:
        strings: Not empty; none of them is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next = [dict[str, int]()]  # by state: the next state by character, along the strings
        self._ends = [False]  # by state: whether a string ends at it
        for string in strings:
            state = ROOT
            for character in string:
                if (following := self._next[state].get(character)) is None:
                    following = self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._ends.append(False)
                state = following
            self._ends[state] = True
        self._shorter = [ROOT] * len(self._next)  # by state: the state of the next shorter ending
        waiting = deque(self._next[ROOT].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                self._shorter[following] = self._after(self._shorter[state], character)
                self._ends[following] |= self._ends[self._shorter[following]]
                waiting.append(following)

    def read(self, text: str, state: int = ROOT) -> tuple[int, bool]:
        """The state after a piece of text, and whether a string ends in this piece, wherever it begins."""
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
