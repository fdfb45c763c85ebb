"""Drafts without a draft model: how the newest tokens of beams went on where they occurred before.

They are looked for in the prompt and in what the beams of the group have generated: a copy of either goes on as it did.
As in vLLM's n-gram speculation the longest match counts most, and of equally long ones the latest. Beams often differ
by a single token: so a newest token may also stand for another one, after which the copy goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vllm_trie.search import search_spans
from vllm_trie.speculation.search.forest import Forest

Array = np.ndarray

MOST_PAIRS = 1 << 14  # of a beam and a place; where there are more, each beam looks into its own history alone
MOST_PLACES = 1 << 15  # that are looked at, for all beams together: else long prompts of few words hold everyone up
# What makes one number of a continuation: odd, so that no token is lost, and large.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NGrams(NamedTuple):
    """How many of a beam's newest tokens must have occurred before, and how many are compared."""

    shortest: int
    longest: int


class DraftPromptIndex:
    """Where each token stands in a prompt, or in what comes after it.

    Args:
        prompt: Its tokens.
    """

    def __init__(self, prompt: Sequence[int] | Array) -> None:
        self.tokens = np.array(prompt, dtype=np.int32)
        self._positions = np.argsort(self.tokens, kind="stable")
        self._sorted = self.tokens[self._positions]

    def find(self, tokens: Array) -> tuple[Array, Array]:
        """The latest places of some tokens: [H] which of them, and [H] where it stands."""
        starts, ends = (np.searchsorted(self._sorted, tokens, side=side) for side in ("left", "right"))
        counts = np.minimum(ends - starts, max(MOST_PLACES // len(tokens), 1))
        return np.repeat(np.arange(len(tokens)), counts), self._positions[search_spans(ends - counts, counts)]


class DraftPaths(NamedTuple):
    """How beams may go on: the best of each beam first, then the second best ones."""

    beams: Array  # [K]
    tokens: Array  # [K, num_tokens] int32


def look_up_drafts(
    prompt: DraftPromptIndex, generated: Array, ngrams: NGrams, num_tokens: int, most: int
) -> DraftPaths:
    """How the newest tokens of beams went on before.

    What comes after the end of a text is what repeats it from the match on.

    Args:
        prompt: The prompt of all beams.
        generated: [b, G] int32, what each beam has generated, G >= 1.
        ngrams: Which matches count.
        num_tokens: Of each continuation.
        most: Different continuations of a beam.
    """
    history = _DraftHistories(prompt, generated)
    matches = _draft_matches(history, ngrams, num_tokens)
    best = np.zeros(len(generated), dtype=np.int64)
    np.maximum.at(best, matches.beams, matches.lengths)
    if generated.shape[1] > 1 and best.min() < ngrams.longest:
        replaced = _draft_matches(history, ngrams, num_tokens, is_replaced=True)
        matches = _Matches(*map(np.concatenate, zip(matches, replaced, strict=True)))
    order = np.lexsort((-matches.ends, -matches.lengths, matches.beams))  # the best first, of each beam
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
    """Let a forest of roots alone grow by these continuations, as far as there is room.

    Args:
        forest: Its roots are the beams.
        found: How they may go on. A token that is negative ends its continuation before it.
        draft_width: The most nodes of a layer.

    Returns:
        The nodes of each layer, all in the order in which they were added; no layer is empty.
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
    """All that is known of beams of equal length.

    Args:
        prompt: Of P tokens.
        generated: [b, G].
    """

    def __init__(self, prompt: DraftPromptIndex, generated: Array) -> None:
        self.prompt, self.generated = prompt, generated
        self.length = len(prompt.tokens) + generated.shape[1]

    def tokens(self, rows: Array, positions: Array) -> Array:
        """The tokens of rows at positions from 0 on; of any shape."""
        num_prompt = len(self.prompt.tokens)
        of_prompt = self.prompt.tokens[np.minimum(positions, num_prompt - 1)]
        return np.where(positions < num_prompt, of_prompt, self.generated[rows, np.maximum(positions - num_prompt, 0)])


class _Matches(NamedTuple):
    """Places at which the newest tokens of beams stood before: [H] each."""

    beams: Array
    rows: Array  # where it is
    ends: Array  # the position of its last token
    lengths: Array  # tokens that match


def _draft_matches(history: _DraftHistories, ngrams: NGrams, num_tokens: int, is_replaced: bool = False) -> _Matches:
    """All matches that count.

    Args:
        is_replaced: The newest token of a beam stands for another one, which counts against the match.
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
    """[H] beams, and the row and position of a token that is the same as their newest but `skip`, and before it.

    The prompt, and what all rows have in common from there on, is looked through once, as each beam's own; of rows that
    go on alike for `num_tokens` one is.
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
    """[b, T] whether no row in front of this one has the same tokens up to there, and for `num_tokens` more."""
    as_bytes = np.ascontiguousarray(tails).view(f"V{tails.shape[1] * tails.itemsize}")[:, 0]
    order = np.argsort(as_bytes, kind="stable")
    differs = np.ones(tails.shape, dtype=bool)
    differs[1:] = np.logical_or.accumulate(tails[order[1:]] != tails[order[:-1]], axis=1)
    is_first = np.empty_like(differs)
    is_first[order] = differs
    return is_first[:, np.minimum(np.arange(tails.shape[1]) + num_tokens, tails.shape[1] - 1)]


def _different_drafts(beams: Array, tokens: Array) -> Array:
    """The first of each continuation of a beam. A very few that differ are taken for the same."""
    numbers = beams.astype(np.uint64)
    for column in tokens.T:
        numbers = numbers * _MULTIPLIER ^ column.astype(np.uint64)
        numbers ^= numbers >> np.uint64(32)
    _, first = np.unique(numbers, return_index=True)
    return np.sort(first)
