"""Drafts without a draft model: how the newest tokens of beams continued where they occurred before.

Matches are looked for in the prompt and in what the group's beams have generated: a copy of either continues as the
original did. As in vLLM's n-gram speculation the longest match counts most, and of equally long ones the latest. Beams
often differ by a single token, so a newest token may also replace another one, after which the copy continues.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.search import search_spans
from vllm_trie.speculation.search.forest import Forest

Array = np.ndarray

MOST_PAIRS = 1 << 14  # of a beam and a match; with more, each beam searches only its own history
MOST_PLACES = 1 << 15  # places looked at for all beams together: long prompts of few words must not delay the step
# Hashes a continuation to one number: odd, so that no token is lost, and large.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NGrams(NamedTuple):
    """How many of a beam's newest tokens must have occurred before, and how many are compared at most."""

    shortest: int
    longest: int


class DraftPromptIndex:
    """An index of the places of each token in a prompt or other sequence.

    Args:
        prompt: Token ids.
    """

    def __init__(self, prompt: Sequence[int] | Array) -> None:
        self.tokens = np.array(prompt, dtype=np.int32)
        self._positions = np.argsort(self.tokens, kind="stable")
        self._sorted = self.tokens[self._positions]

    def find(self, tokens: Array) -> tuple[Array, Array]:
        """The latest places of `tokens`: [H] index of the token in `tokens`, and [H] its position in the sequence."""
        starts, ends = (np.searchsorted(self._sorted, tokens, side=side) for side in ("left", "right"))
        counts = np.minimum(ends - starts, max(MOST_PLACES // len(tokens), 1))
        return np.repeat(np.arange(len(tokens)), counts), self._positions[search_spans(ends - counts, counts)]


class DraftPaths(NamedTuple):
    """Possible continuations of beams: the best of each beam first, then the second best."""

    beams: Array  # [K]
    tokens: Array  # [K, num_tokens] int32


def look_up_drafts(
    prompt: DraftPromptIndex, generated: Array, ngrams: NGrams, num_tokens: int, most: int
) -> DraftPaths:
    """How the newest tokens of beams continued where they occurred before.

    Where a continuation reaches the end of the text, it repeats the text from the match on.

    Args:
        prompt: The prompt of all beams.
        generated: [b, G] int32, what each beam has generated, G >= 1.
        ngrams: Which matches count.
        num_tokens: Tokens of each continuation.
        most: The most different continuations of a beam.
    """
    history = _DraftHistories(prompt, generated)
    matches = _draft_matches(history, ngrams, num_tokens)
    best = np.zeros(len(generated), dtype=np.int64)
    np.maximum.at(best, matches.beams, matches.lengths)
    if generated.shape[1] > 1 and best.min() < ngrams.longest:
        replaced = _draft_matches(history, ngrams, num_tokens, is_replaced=True)
        matches = _Matches(*map(np.concatenate, zip(matches, replaced, strict=True)))
    order = np.lexsort((-matches.ends, -matches.lengths, matches.beams))  # of each beam, the best first
    beams, rows, ends = (matches.beams[order], matches.rows[order], matches.ends[order])
    ahead = np.arange(num_tokens) % (history.length - 1 - ends)[:, None]
    tokens = history.tokens(rows[:, None], ends[:, None] + 1 + ahead)
    different = _different_drafts(beams, tokens)
    beams, tokens = beams[different], tokens[different]
    counts = np.bincount(beams, minlength=len(generated))
    ranks = search_spans(0, counts)
    order = np.lexsort((beams, ranks))[: int(np.minimum(counts, most).sum())]
    return DraftPaths(beams[order], tokens[order])


def add_drafts_to_forest(forest: Forest, found: DraftPaths, draft_width: int) -> list[list[int]]:
    """Adds continuations to a forest that consists of roots alone, as far as there is room.

    Args:
        forest: Its roots are the beams.
        found: The continuations. A negative token ends its continuation before it.
        draft_width: The most nodes of a layer.

    Returns:
        The nodes of each layer, in the order in which they were added; no layer is empty.
    """
    nodes, growing, layers = found.beams.tolist(), [*range(len(found.beams))], list[list[int]]()
    for tokens in found.tokens.T.tolist():
        paths, growing, layer = growing, list[int](), list[int]()
        for path in paths:
            parent, token = nodes[path], tokens[path]
            node = forest.child(parent, token)
            if node is None:
                if token < 0 or len(layer) == draft_width or not forest.has_room:
                    continue
                node = forest.add(parent, token)
                layer.append(node)
            nodes[path] = node
            growing.append(path)
        if not layer:
            break
        layers.append(layer)
    return layers


class _DraftHistories:
    """The tokens of beams of equal length: prompt and generated.

    Args:
        prompt: P tokens.
        generated: [b, G].
    """

    def __init__(self, prompt: DraftPromptIndex, generated: Array) -> None:
        self.prompt, self.generated = prompt, generated
        self.length = len(prompt.tokens) + generated.shape[1]

    def tokens(self, rows: Array, positions: Array) -> Array:
        """Tokens of rows at positions counted from 0; any shape."""
        num_prompt = len(self.prompt.tokens)
        of_prompt = self.prompt.tokens[np.minimum(positions, num_prompt - 1)]
        return np.where(positions < num_prompt, of_prompt, self.generated[rows, np.maximum(positions - num_prompt, 0)])


class _Matches(NamedTuple):
    """Places where the newest tokens of beams occurred before: [H] each."""

    beams: Array
    rows: Array  # the row with the match
    ends: Array  # the position of the match's last token
    lengths: Array  # of matching tokens


def _draft_matches(history: _DraftHistories, ngrams: NGrams, num_tokens: int, is_replaced: bool = False) -> _Matches:
    """All earlier occurrences of the newest tokens of beams that are long enough to count.

    Args:
        is_replaced: The newest token of a beam replaces another one, which counts against the match.
    """
    skip = int(is_replaced)
    beams, rows, ends = _draft_match_places(history, num_tokens + skip, skip)
    lengths, growing = np.ones_like(ends), np.arange(len(ends))
    for back in range(1, min(ngrams.longest + skip, history.length - 1 - skip)):
        at = ends[growing] - back
        of_beam = history.tokens(beams[growing], np.array(history.length - 1 - skip - back))
        growing = growing[(at >= 0) & (history.tokens(rows[growing], np.maximum(at, 0)) == of_beam)]
        if not len(growing):
            break
        lengths[growing] += 1
    kept = np.flatnonzero(lengths - skip >= ngrams.shortest)
    return _Matches(beams[kept], rows[kept], ends[kept] + skip, lengths[kept] - skip)


def _draft_match_places(history: _DraftHistories, num_tokens: int, skip: int) -> tuple[Array, Array, Array]:
    """[H] beams, and the row and position of an earlier token that equals the beam's newest but `skip`.

    The prompt, and what all rows have in common after it, is searched once for all beams; of several rows that continue
    alike for `num_tokens`, one is searched.
    """
    prompt, generated = history.prompt, history.generated
    last = generated.shape[1] - 1 - skip
    newest, differs = generated[:, last], (generated != generated[0]).any(axis=0)
    num_common = min(max(int(differs.argmax()) - num_tokens, 0), last) if differs.any() else last
    of_prompt, in_prompt = prompt.find(newest)
    of_common, in_common = DraftPromptIndex(generated[0, :num_common]).find(newest)
    own, tails = generated[:, num_common:last], generated[:, num_common:]
    rows, columns = np.nonzero(np.isin(own, newest) & _first_of_alike_drafts(tails, num_tokens)[:, : own.shape[1]])
    by_token = np.argsort(newest, kind="stable")
    starts = np.searchsorted(newest[by_token], own[rows, columns], side="left")
    counts = np.searchsorted(newest[by_token], own[rows, columns], side="right") - starts
    if counts.sum() <= MOST_PAIRS:
        of_tails = by_token[search_spans(starts, counts)]
        rows, columns = np.repeat(rows, counts), np.repeat(columns, counts)
    else:
        rows, columns = np.nonzero(own == newest[:, None])
        of_tails = rows
    beams, of_rows = np.concatenate([of_prompt, of_common, of_tails]), np.concatenate([of_prompt, of_common, rows])
    in_generated = np.concatenate([in_common, columns + num_common])
    return beams, of_rows, np.concatenate([in_prompt, in_generated + len(prompt.tokens)])


def _first_of_alike_drafts(tails: Array, num_tokens: int) -> Array:
    """[b, T], whether no earlier row has the same tokens up to this one and for `num_tokens` more."""
    as_bytes = np.ascontiguousarray(tails).view(f"V{tails.shape[1] * tails.itemsize}")[:, 0]
    order = np.argsort(as_bytes, kind="stable")
    differs = np.ones(tails.shape, dtype=bool)
    differs[1:] = np.logical_or.accumulate(tails[order[1:]] != tails[order[:-1]], axis=1)
    is_first = np.empty_like(differs)
    is_first[order] = differs
    return is_first[:, np.minimum(np.arange(tails.shape[1]) + num_tokens, tails.shape[1] - 1)]


def _different_drafts(beams: Array, tokens: Array) -> Array:
    """The first occurrence of each continuation of a beam. Compares by hash: a very few that differ may be dropped."""
    numbers = beams.astype(np.uint64)
    for column in tokens.T:
        numbers = numbers * _MULTIPLIER ^ column.astype(np.uint64)
        numbers ^= numbers >> np.uint64(32)
    _, first = np.unique(numbers, return_index=True)
    return np.sort(first)
