"""Beam search along sequences with ids, of which each counts once, as a plain loop: no trie, no tensors of beams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from tests.support.items import Item

LogprobsOf = Callable[[Item], Sequence[float]]  # of each token, after generated ones
Ids = tuple[int, ...]


class Found(NamedTuple):
    """A hypothesis: what it competes by, its tokens, and the ids of its items."""

    score: float
    tokens: Item
    ids: Ids


class Beam(NamedTuple):
    total: float
    tokens: Item


@dataclass(frozen=True)
class Along:
    """What hypotheses may be.

    Args:
        sequences: Ids by sequence.
        num_items: In a hypothesis; if there are several, no sequence begins another.
        after: The token after which they begin.
        stops: One of them follows, if there are any.
        barred: That what comes before `after` has not.
    """

    sequences: Mapping[Item, int]
    num_items: int = 1
    after: int | None = None
    stops: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()

    def read(self, tokens: Item) -> tuple[Ids, Item] | None:
        """The ids of the items that are complete, but for the last one, and what has come then; None: not begun."""
        if self.after is not None:
            if self.after not in tokens:
                return None
            tokens = tokens[tokens.index(self.after) + 1 :]
        ids = Ids()
        while len(ids) < self.num_items - 1:
            end = next((end for end in range(1, len(tokens) + 1) if tokens[:end] in self.sequences), None)
            if end is None:
                break
            ids, tokens = (*ids, self.sequences[tokens[:end]]), tokens[end:]
        return ids, tokens

    def ids_of(self, tokens: Item) -> Ids | None:
        """Those of a whole hypothesis, its stop token aside."""
        read = self.read(tokens)
        if read is None or len(read[0]) < self.num_items - 1 or read[1] not in self.sequences:
            return None
        return *read[0], self.sequences[read[1]]

    def further(self, tokens: Item, vocab_size: int) -> set[int]:
        """The tokens that may follow, but for stop tokens."""
        read = self.read(tokens)
        if read is None:
            return {*range(vocab_size)} - {*self.barred}
        rest = read[1]
        return {item[len(rest)] for item in self.sequences if len(item) > len(rest) and item[: len(rest)] == rest}

    def whole(self) -> Iterator[tuple[Item, Ids]]:
        """All hypotheses, if nothing comes before their items."""
        for items in product(self.sequences, repeat=self.num_items):
            tokens, ids = tuple(token for item in items for token in item), tuple(self.sequences[i] for i in items)
            yield from (((*tokens, stop), ids) for stop in self.stops) if self.stops else [(tokens, ids)]


def compared(total: float, length: int, length_penalty: float) -> float:
    return float(np.float32(total) / np.float32(length**length_penalty))


def best_of_each(found: Sequence[Found], width: int) -> list[Found]:
    """The best one of each item, the best `width` of them."""
    best: dict[Ids, Found] = {}
    for each in sorted(found, key=lambda each: -each.score):
        best.setdefault(each.ids, each)
    return [*best.values()][:width]


def all_items(along: Along, logprobs_of: LogprobsOf, width: int, length_penalty: float) -> list[Found]:
    """By forced scores of all hypotheses."""
    found = []
    for tokens, ids in along.whole():
        total = sum(float(logprobs_of(tokens[:at])[token]) for at, token in enumerate(tokens))
        found.append(Found(compared(total, len(tokens), length_penalty), tokens, ids))
    return best_of_each(found, width)


def loop_unique_items(
    along: Along,
    logprobs_of: LogprobsOf,
    widths: Sequence[int],
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[Found]:
    """All hypotheses that a search finds, best first.

    Args:
        widths: Beams after each step; the last number goes on.
    """
    pool, beams, width = list[Found](), [Beam(0.0, ())], max(widths)
    for length in range(1, max_tokens + 1):
        most, candidates = widths[min(length, len(widths)) - 1], list[tuple[Beam, Ids | None, bool]]()
        for total, tokens in beams:
            logprobs = logprobs_of(tokens)
            stops = along.stops if along.ids_of(tokens) else ()
            for token in (*along.further(tokens, len(logprobs)), *stops):
                if logprobs[token] == -math.inf:
                    continue
                path, is_stop = (*tokens, token), token in stops and along.ids_of(tokens) is not None
                ids = along.ids_of(tokens) if is_stop else along.ids_of(path)
                may_end = is_stop or not along.stops or length == max_tokens
                goes_on = not is_stop and bool(
                    along.further(path, len(logprobs)) or (along.stops and along.ids_of(path))
                )
                candidates.append((Beam(total + float(logprobs[token]), path), ids if may_end else None, goes_on))
        candidates.sort(key=lambda candidate: -candidate[0].total)
        seen, num_places = set[Ids](), 0
        for (total, tokens), ids, _ in candidates:
            if ids in seen:
                continue  # a worse hypothesis of the same item takes no place
            num_places += 1
            if num_places > most:
                break
            if ids is not None:
                seen.add(ids)
                pool.append(Found(compared(total, length, length_penalty), tokens, ids))
        pool = best_of_each(pool, width)
        beams = [beam for beam, _, goes_on in candidates if goes_on][:most]
        if not beams:
            break
        if len(pool) < width:
            continue
        longest = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        bound = compared(beams[0].total, longest, length_penalty)
        if width == 1 or early_stopping is True or bound <= pool[-1].score:
            break
    return pool


def agree(ours: Sequence[tuple[float, Item]], theirs: Sequence[Found], tolerance: float = 1e-5) -> None:
    """Raise AssertionError unless these are the same hypotheses, in the same order."""
    assert [tokens for _, tokens in ours] == [found.tokens for found in theirs]
    for (score, _), found in zip(ours, theirs, strict=True):
        assert math.isclose(score, found.score, rel_tol=tolerance, abs_tol=tolerance)
