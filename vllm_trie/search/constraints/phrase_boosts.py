"""Contextual biasing: phrases that occur in a hypothesis add their weights to what it competes by.

Source: the context graphs of speech recognisers, e.g. icefall `ContextGraph`: an automaton by Aho and Corasick 1975.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import uploaded
from vllm_trie.search.rank import Array

ROOT, NOWHERE = 0, -1

Tokens = tuple[int, ...]


class Phrase(NamedTuple):
    """A phrase occurs wherever one of the ways to write it ends."""

    ways: tuple[Tokens, ...]
    weight: float


@dataclass(frozen=True)
class PhraseBoosts(Constraint):
    """Each phrase adds its weight as often as it occurs, and a share of it where a hypothesis ends in its beginning.

    The pending share is the largest weight * k / n among the ways of n tokens whose first k < n, at least one, are the
    hypothesis' last k; a hypothesis that is finished has none. The states [G, r] are nodes of an automaton.
    """

    phrases: tuple[Phrase, ...]

    @classmethod
    def of(cls, phrases: Sequence[Sequence[Any]]) -> PhraseBoosts:
        """Of phrases as the option has them once their tokens are known: (token ids or ways, weight) each."""
        return _boosts(tuple(Phrase(_as_ways(tokens), float(weight)) for tokens, weight in phrases))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _boosts, (self.phrases,)

    @cached_property
    def _hash(self) -> int:
        return hash(self.phrases)

    @cached_property
    def most_boost(self) -> float:  # type: ignore[override]
        """See `Constraint`."""
        automaton = _automaton(self)
        gains = automaton.occurring + automaton.pending.clip(min=0)
        return float(gains.max(initial=0) - automaton.pending.min(initial=0))

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        return torch.full((1, num_rows), ROOT, dtype=torch.int64, device=device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        tables = _tables(self, states.device)
        leads = _lead_on(tables, states) & (tables.tokens[tables.columns] == tokens[..., None])
        return tables.children.where(leads, ROOT).amax(dim=-1)

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return torch.ones_like(tokens, dtype=torch.bool)

    def boosts(self, states: torch.Tensor, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor:
        """See `Constraint`."""
        tables = _tables(self, states.device)
        leads = _lead_on(tables, states)
        # By token that is in a phrase: the node that it leads to. Of several the one with the highest number is that of
        # the longest beginning; where there is none, it is the root.
        nodes = states.new_full((*states.shape, len(tables.tokens)), ROOT)
        nodes.scatter_reduce_(-1, tables.columns.expand(leads.shape), tables.children.where(leads, ROOT), "amax")
        gains = tables.occurring[nodes] if is_end else (tables.occurring + tables.pending)[nodes]
        lost = -tables.pending[states][..., None]
        boosts = lost.expand(*states.shape, logprobs.shape[-1]).clone()
        boosts[..., tables.tokens] = gains + lost
        return boosts


@lru_cache(maxsize=64)
def _boosts(phrases: tuple[Phrase, ...]) -> PhraseBoosts:
    """One object for equal phrases: steps look it up, and compare it, without a look at the phrases."""
    return PhraseBoosts(phrases)


def _as_ways(tokens: Sequence[int] | Sequence[Sequence[int]]) -> tuple[Tokens, ...]:
    ways = [tokens] if isinstance(tokens[0], int) else tokens
    return tuple(dict.fromkeys(tuple(way) for way in ways))  # type: ignore[arg-type]


class _Automaton(NamedTuple, Generic[Array]):
    """Which beginning of a phrase is the longest that a hypothesis ends in: a node, the root for none.

    Nodes are numbered by layer. On the host, weights are float64; on a device, float32.
    """

    parents: Array  # [edges]
    columns: Array  # [edges] place of the token among `tokens`
    depths: Array  # [edges] of the parents
    children: Array  # [edges]
    tokens: Array  # those of all edges, each once, ascending
    suffixes: Array  # [nodes, layers]: by layer the node of a suffix of the node's tokens, itself among them
    occurring: Array  # [nodes] weights of the phrases that end there
    pending: Array  # [nodes]


@lru_cache(maxsize=64)
def _automaton(boosts: PhraseBoosts) -> _Automaton[np.ndarray]:
    phrases = boosts.phrases
    beginnings = sorted({way[:length] for phrase in phrases for way in phrase.ways for length in range(len(way) + 1)})
    beginnings.sort(key=len)
    nodes = {tokens: node for node, tokens in enumerate(beginnings)}
    ends = [set[int]() for _ in beginnings]  # which phrases end there
    shares = [-np.inf] * len(beginnings)  # the largest share of those that go on
    for number, (ways, weight) in enumerate(phrases):
        for way in ways:
            ends[nodes[way]].add(number)
            for length in range(1, len(way)):
                node = nodes[way[:length]]
                shares[node] = max(shares[node], weight * length / len(way))

    suffix_of = [NOWHERE]  # the longest proper one that is a node
    suffixes = np.full((len(beginnings), len(beginnings[-1])), NOWHERE)
    suffixes[ROOT, 0] = ROOT
    occurring, pending = np.zeros((2, len(beginnings)))
    for node, tokens in enumerate(beginnings[1:], start=1):
        longest = suffix_of[nodes[tokens[:-1]]]
        while longest != NOWHERE and (*beginnings[longest], tokens[-1]) not in nodes:
            longest = suffix_of[longest]
        suffix = ROOT if longest == NOWHERE else nodes[*beginnings[longest], tokens[-1]]
        suffix_of.append(suffix)
        ends[node] |= ends[suffix]
        shares[node] = max(shares[node], shares[suffix])
        occurring[node] = sum(phrases[number].weight for number in sorted(ends[node]))
        pending[node] = shares[node] if shares[node] > -np.inf else 0.0
        suffixes[node] = suffixes[suffix]
        if len(tokens) < suffixes.shape[1]:
            suffixes[node, len(tokens)] = node
    parents = np.array([nodes[tokens[:-1]] for tokens in beginnings[1:]])
    depths = np.array([len(tokens) - 1 for tokens in beginnings[1:]])
    of_all, columns = np.unique([tokens[-1] for tokens in beginnings[1:]], return_inverse=True)
    return _Automaton(parents, columns, depths, np.arange(1, len(nodes)), of_all, suffixes, occurring, pending)


@lru_cache(maxsize=64)
def _tables(boosts: PhraseBoosts, device: torch.device) -> _Automaton[torch.Tensor]:
    tables = _Automaton(*(uploaded(array, device) for array in _automaton(boosts)))
    return tables._replace(occurring=tables.occurring.float(), pending=tables.pending.float())


def _lead_on(tables: _Automaton[torch.Tensor], nodes: torch.Tensor) -> torch.Tensor:
    """[..., edges] bool, which edges lead on from nodes [...], or from suffixes of them."""
    return tables.suffixes[nodes][..., tables.depths] == tables.parents
