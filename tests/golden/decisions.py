"""Decisions of searches and their answers: as arrays, in a file, and how two records of them are compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

NO_RANK = 0  # bits of what hypotheses compete by, where that is their score
SCORE_TOLERANCE = 1e-4  # between processors that round differently


class Rows(NamedTuple):
    """Continuations of the beams of one step, in the order of their slots, or in which they finish. All [n] int32."""

    parents: np.ndarray  # the slot that each continues; -1 where there is no beam
    tokens: np.ndarray  # -1 where there is no beam
    scores: np.ndarray  # the bits of a float32, the cumulative log-probability
    ranks: np.ndarray  # the bits of a float32, what it competes by, or `NO_RANK`

    @classmethod
    def of(cls, parents: Any, tokens: Any, scores: Any, ranks: Any = None) -> Self:
        """Of what an engine has."""
        scores = np.ascontiguousarray(scores, np.float32)
        is_there = np.isfinite(scores)
        ranks = np.zeros_like(scores) if ranks is None else np.ascontiguousarray(ranks, np.float32)
        parents, tokens = (np.where(is_there, field, -1).astype(np.int32) for field in (parents, tokens))
        return cls(parents, tokens, scores.view(np.int32), np.where(is_there, ranks.view(np.int32), NO_RANK))

    @classmethod
    def none(cls) -> Self:
        """No row."""
        return cls.of([], [], [])

    def of_one_parent(self) -> Self:
        """The same, of beams that go on from one."""
        return self._replace(parents=np.minimum(self.parents, 0))


Steps = dict[int, tuple[Rows, Rows]]  # by number, from 1: the beams that go on, and the hypotheses that finish
FIELDS = ("parent", "token", "score", "what it competes by")


@dataclass
class Record:
    """What came of some searches.

    Attributes:
        steps: By the name of a search.
        answers: By the name of a request, JSON of what the front end returned, output by output.
        firm: Names of the searches that decide the same where logits are disturbed by a little.
        logprob_bits: A checksum of what torch makes of the model's logits.
    """

    steps: dict[str, Steps]
    answers: dict[str, list[Any]]
    firm: list[str]
    logprob_bits: int

    @property
    def num_steps(self) -> int:
        """Of all searches."""
        return sum(map(len, self.steps.values()))

    def save(self, path: Path) -> None:
        """Write it as one file of compressed arrays."""
        columns = [
            np.stack([np.full(len(rows.parents), which), np.full(len(rows.parents), number), *rows])
            for steps in self.steps.values()
            for number, of_step in steps.items()
            for which, rows in enumerate(of_step)
        ]
        sizes = [sum(len(rows.parents) for pair in steps.values() for rows in pair) for steps in self.steps.values()]
        head = {"searches": [*self.steps], "firm": self.firm, "logprob_bits": self.logprob_bits}
        numbers = [[*steps] for steps in self.steps.values()]
        text = json.dumps(head | {"sizes": sizes, "numbers": numbers, "answers": self.answers})
        table = np.concatenate(columns, axis=1, dtype=np.int32) if columns else np.zeros((6, 0), np.int32)
        planes = table.view(np.uint8).reshape(*table.shape, 4).transpose(0, 2, 1)  # equal bytes side by side
        np.savez_compressed(path, planes=planes, text=np.frombuffer(text.encode(), np.uint8))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read such a file."""
        with np.load(path) as file:
            planes, head = file["planes"], json.loads(file["text"].tobytes())
        table = np.ascontiguousarray(planes.transpose(0, 2, 1)).view(np.int32)[..., 0]
        parts = np.split(table, np.cumsum(head["sizes"])[:-1], axis=1)
        steps = {
            name: _steps(numbers, part)
            for name, numbers, part in zip(head["searches"], head["numbers"], parts, strict=True)
        }
        return cls(steps, head["answers"], head["firm"], head["logprob_bits"])


def _steps(numbers: list[int], table: np.ndarray) -> Steps:
    def rows(number: int, which: int) -> Rows:
        return Rows(*table[2:, (table[0] == which) & (table[1] == number)])

    return {number: (rows(number, 0), rows(number, 1)) for number in numbers}


def differences(recorded: Record, found: Record) -> Iterator[str]:
    """Of each request that differs the first difference, in a sentence.

    Where torch makes other bits of the same logits, searches that are firm must decide the same, with scores that are
    close; others, and answers, are not compared.
    """
    if recorded.logprob_bits != found.logprob_bits:
        for name in recorded.firm:
            yield from _first(name, recorded.steps[name], found.steps.get(name, {}), is_exact=False)
        return
    for name in {**recorded.steps, **found.steps}:
        yield from _first(name, recorded.steps.get(name, {}), found.steps.get(name, {}))
    for name in {**recorded.answers, **found.answers}:
        before, now = recorded.answers.get(name), found.answers.get(name)
        if before != now:
            yield f"{name!r}, its answer{_first_path(before, now)}"


def _first(name: str, recorded: Steps, found: Steps, is_exact: bool = True) -> Iterator[str]:
    for number in sorted({*recorded, *found}):
        where = f"{name!r}, step {number}"
        if number not in recorded or number not in found:
            yield f"{where}: {'recorded' if number in recorded else 'found'} alone"
            return
        kinds = zip(("beam", "finished hypothesis"), recorded[number], found[number], strict=True)
        for kind, before, now in kinds:
            if (difference := _of_rows(before, now, is_exact)) is not None:
                yield f"{where}, {kind} {difference}"
                return


def _of_rows(recorded: Rows, found: Rows, is_exact: bool) -> str | None:
    if len(recorded.parents) != len(found.parents):
        return f"count: {len(recorded.parents)} recorded, {len(found.parents)} found"
    for name, before, now in zip(FIELDS, recorded, found, strict=True):
        is_float = name in FIELDS[2:]
        if is_float and not is_exact:
            floats = before.view(np.float32), now.view(np.float32)
            differs = ~np.isclose(*floats, rtol=1e-6, atol=SCORE_TOLERANCE)
        else:
            differs = before != now
        if differs.any():
            slot = int(differs.argmax())
            return f"{slot}, {name}: {_shown(before, slot, is_float)} recorded, {_shown(now, slot, is_float)} found"
    return None


def _shown(column: np.ndarray, slot: int, is_float: bool) -> str:
    return f"{column.view(np.float32)[slot]:.9g}" if is_float else str(column[slot])


def _first_path(recorded: Any, found: Any) -> str:
    """Where in two pieces of JSON they differ first, and how."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        keys = [key for key in {**recorded, **found} if recorded.get(key) != found.get(key)]
        if keys and keys[0] in recorded and keys[0] in found:
            return f", {keys[0]}{_first_path(recorded[keys[0]], found[keys[0]])}"
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        place = next(at for at, pair in enumerate(zip(recorded, found, strict=True)) if pair[0] != pair[1])
        return f", {place}{_first_path(recorded[place], found[place])}"
    return f": {str(recorded)[:200]} recorded, {str(found)[:200]} found"
