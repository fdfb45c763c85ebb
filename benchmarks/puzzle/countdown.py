"""Countdown: reach a target from four numbers, in three lines that each use two numbers that are left.

A prompt is "3 7 12 18=40\\n", an answer "12+18=30\\n30+7=37\\n37+3=40". Whether it is right is a matter of arithmetic.
After a wrong first line most puzzles cannot be solved any more.
"""

from __future__ import annotations

import random
import re
import zlib
from functools import cache
from itertools import combinations, combinations_with_replacement
from typing import NamedTuple

COUNT = 4  # of numbers
GREATEST_NUMBER, GREATEST_RESULT = 9, 40
TARGETS = range(10, GREATEST_RESULT + 1)
# Shares of all sets of numbers, in tenths; no set of numbers is in two splits.
SPLITS = {"train": range(6), "rollouts": range(6, 8), "held out": range(8, 9), "test": range(9, 10)}
LINE = re.compile(r"(\d{1,2})([+*-])(\d{1,2})=(\d{1,2})")

Numbers = tuple[int, ...]  # sorted


class Puzzle(NamedTuple):
    """Numbers, in the order in which they are shown, and what to make of them."""

    numbers: Numbers
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))}={self.target}\n"


class Move(NamedTuple):
    """A line, and the numbers that are left after it."""

    line: str
    left: Numbers


@cache
def moves(numbers: Numbers) -> tuple[Move, ...]:
    """All lines that two of these numbers make, the greater one first; results are from 1 to `GREATEST_RESULT`."""
    found = {}
    for pair in combinations(range(len(numbers)), 2):
        b, a = sorted(numbers[i] for i in pair)
        others = [number for i, number in enumerate(numbers) if i not in pair]
        for operator, result in (("+", a + b), ("-", a - b), ("*", a * b)):
            if 0 < result <= GREATEST_RESULT:
                found[f"{a}{operator}{b}={result}"] = tuple(sorted((*others, result)))
    return tuple(Move(line, left) for line, left in sorted(found.items()))


@cache
def solutions(numbers: Numbers, target: int) -> int:
    """How many sequences of lines lead to the target."""
    if len(numbers) == 1:
        return int(numbers[0] == target)
    return sum(solutions(move.left, target) for move in moves(numbers))


def is_solved(puzzle: Puzzle, answer: str) -> bool:
    """Whether an answer uses all numbers, computes right, and ends at the target."""
    left = left_behind(puzzle, answer)
    return left == (puzzle.target,)


def left_behind(puzzle: Puzzle, answer: str) -> Numbers | None:
    """The numbers that are left after these lines; None if one of them is wrong."""
    left = list(puzzle.numbers)
    for line in answer.removesuffix("\n").split("\n"):
        match = LINE.fullmatch(line)
        if match is None:
            return None
        a, b, result = (int(match[group]) for group in (1, 3, 4))
        for number in (a, b):
            if number not in left:
                return None
            left.remove(number)
        if result != {"+": a + b, "-": a - b, "*": a * b}[match[2]]:
            return None
        left.append(result)
    return tuple(sorted(left))


def puzzles(split: str, count: int | None = None) -> list[Puzzle]:
    """Puzzles that have a solution, none twice, in an order of chance that is the same each time.

    Args:
        split: Of `SPLITS`.
        count: How many; None: all there are.

    Raises:
        ValueError: there are fewer.
    """
    rng = random.Random(split)
    found = [Puzzle(numbers, target) for numbers in _numbers(split) for target in TARGETS if solutions(numbers, target)]
    if count is not None and count > len(found):
        raise ValueError(f"count={count} puzzles asked for; {split!r} has {len(found)}")
    shown = [reordered(puzzle, rng) for puzzle in found]
    rng.shuffle(shown)
    return shown[:count]


def _numbers(split: str) -> list[Numbers]:
    every = combinations_with_replacement(range(1, GREATEST_NUMBER + 1), COUNT)
    return [numbers for numbers in every if split_of(numbers) == split]


def reordered(puzzle: Puzzle, rng: random.Random) -> Puzzle:
    """The same puzzle, with its numbers shown in another order."""
    return puzzle._replace(numbers=tuple(rng.sample(puzzle.numbers, COUNT)))


def split_of(numbers: Numbers) -> str:
    """The split that these numbers belong to, in whatever order."""
    tenth = zlib.crc32(repr(sorted(numbers)).encode()) % 10
    return next(name for name, tenths in SPLITS.items() if tenth in tenths)


def a_solution(puzzle: Puzzle, rng: random.Random) -> str:
    """One of all solutions, each as likely."""
    left, lines = tuple(sorted(puzzle.numbers)), []
    while len(left) > 1:
        choices = moves(left)
        (move,) = rng.choices(choices, [solutions(choice.left, puzzle.target) for choice in choices])
        lines.append(move.line)
        left = move.left
    return "\n".join(lines)
