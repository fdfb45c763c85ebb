"""Contextual biasing: phrases that occur in a hypothesis add their weights to its score.

Source: the context graphs of speech recognisers, e.g. icefall's `ContextGraph`: an Aho-Corasick automaton (1975).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, Generic, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import SearchCache, uploaded_for_search
from vllm_trie.search.rank import Array

ROOT, NOWHERE = 0, -1
# Of a node in a layer, of a node, and of an edge of `_ConstraintAutomaton`.
SUFFIX_BYTES, WEIGHT_BYTES, EDGE_BYTES = 4, 2 * 8, 4 + 4 * 8
AUTOMATA_BYTES = 64 << 20  # of automata cached on the host, and of their keys
PHRASE_BYTES, TOKEN_BYTES = 250, 40  # of a phrase in a key, with its cache entry; of a token, a number in a tuple

Tokens = tuple[int, ...]


class ConstraintPhrase(NamedTuple):
    """A phrase, which occurs wherever one of its spellings, `ways`, ends."""

    ways: tuple[Tokens, ...]
    weight: float


@dataclass(frozen=True)
class PhraseBoostConstraint(Constraint):
    """Each phrase adds its weight as often as it occurs, and a share of it where a hypothesis ends in its beginning.

    The pending share is the largest weight * k / n over the ways of n tokens whose first k tokens, 1 <= k < n, are the
    hypothesis' last k; a finished hypothesis has none. The states [G, r] are nodes of an automaton.
    """

    phrases: tuple[ConstraintPhrase, ...]

    @classmethod
    def of(cls, phrases: Sequence[Sequence[Any]]) -> PhraseBoostConstraint:
        """From phrases as the option has them once their tokens are known: pairs (token ids or ways, weight)."""
        return _known_boost_constraint(
            tuple(ConstraintPhrase(_ways_of_constraint_phrase(tokens), float(weight)) for tokens, weight in phrases)
        )

    def on(self, tries: Mapping[str, Any], stop_token_ids: tuple[int, ...]) -> PhraseBoostConstraint:
        """See `Constraint`: the key of rows' states, one object for equal phrases, which also has device tables."""
        if (carried := _carried.get(self)) is None:
            carried = _carried[self] = PhraseBoostConstraint(self.phrases)
            vars(carried).update(_hash=self._hash, automaton=self.automaton)
        return carried

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return _known_boost_constraint, (self.phrases,)

    @cached_property
    def _hash(self) -> int:
        return hash(self.phrases)

    @cached_property
    def automaton(self) -> _ConstraintAutomaton[np.ndarray]:
        """The automaton on the host."""
        return _automata.get(self.phrases, partial(_new_constraint_automaton, self.phrases), self._bytes_on_host)

    def _bytes_on_host(self, automaton: _ConstraintAutomaton[np.ndarray]) -> int:
        ways = chain.from_iterable(ways for ways, _ in self.phrases)
        return sum(array.nbytes for array in automaton) + sum(PHRASE_BYTES + TOKEN_BYTES * len(way) for way in ways)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tables on a device, at most."""
        return sum(array.nbytes for array in self.automaton)

    @cached_property
    def most_boost(self) -> float:  # type: ignore[override]
        """See `Constraint`."""
        gains = self.automaton.occurring + self.automaton.pending.clip(min=0)
        return float(gains.max(initial=0) - self.automaton.pending.min(initial=0))

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        return torch.full((1, num_rows), ROOT, dtype=torch.int64, device=device)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        tables = self._tables(states.device)
        leads = _constraint_edges_lead_on(tables, states) & (tables.tokens[tables.columns] == tokens[..., None])
        return tables.children.where(leads, ROOT).amax(dim=-1)

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        return torch.ones_like(tokens, dtype=torch.bool)

    def boosts(self, states: torch.Tensor, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor:
        """See `Constraint`."""
        tables = self._tables(states.device)
        nodes = _next_constraint_nodes(tables, states)
        gains = tables.occurring[nodes] if is_end else (tables.occurring + tables.pending)[nodes]
        lost = -tables.pending[states][..., None]
        boosts = lost.expand(*states.shape, logprobs.shape[-1]).clone()
        boosts[..., tables.tokens] = gains + lost
        return boosts

    def pending(self, states: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        tables = self._tables(states.device)
        num_tokens = len(tables.tokens)
        nodes = _next_constraint_nodes(tables, states)  # per row, because there are more continuations than rows
        columns = torch.searchsorted(tables.tokens, tokens).clamp(max=num_tokens - 1)
        after = nodes.flatten(1).gather(1, parents * num_tokens + columns)
        return tables.pending[after.where(tables.tokens[columns] == tokens, ROOT)]

    def _tables(self, device: torch.device) -> _ConstraintAutomaton[torch.Tensor]:
        if (tables := self._on_devices.get(device)) is None:
            tables = _ConstraintAutomaton(*(uploaded_for_search(array, device) for array in self.automaton))
            tables = tables._replace(occurring=tables.occurring.float(), pending=tables.pending.float())
            self._on_devices[device] = tables
        return tables

    @cached_property
    def _on_devices(self) -> dict[torch.device, _ConstraintAutomaton[torch.Tensor]]:
        return {}


# Entries live as long as somebody holds their values. For `_carried` see `PhraseBoostConstraint.on`.
_known: WeakValueDictionary[tuple[ConstraintPhrase, ...], PhraseBoostConstraint] = WeakValueDictionary()
_carried: WeakValueDictionary[PhraseBoostConstraint, PhraseBoostConstraint] = WeakValueDictionary()


def _known_boost_constraint(phrases: tuple[ConstraintPhrase, ...]) -> PhraseBoostConstraint:
    """One object for equal phrases, so that steps look it up and compare it without comparing phrases."""
    if (boosts := _known.get(phrases)) is None:
        boosts = _known[phrases] = PhraseBoostConstraint(phrases)
    return boosts


def _ways_of_constraint_phrase(tokens: Sequence[int] | Sequence[Sequence[int]]) -> tuple[Tokens, ...]:
    ways = [tokens] if isinstance(tokens[0], int) else tokens
    return tuple(dict.fromkeys(tuple(way) for way in ways))  # type: ignore[arg-type]


class _ConstraintAutomaton(NamedTuple, Generic[Array]):
    """Maps a hypothesis to the longest beginning of a phrase that it ends in: a node, the root for none.

    Nodes are numbered by layer. Weights are float64 on the host, float32 on a device.
    """

    parents: Array  # [edges]
    columns: Array  # [edges], index of the token in `tokens`
    depths: Array  # [edges], depths of the parents
    children: Array  # [edges]
    tokens: Array  # of all edges, each once, ascending
    suffixes: Array  # [nodes, layers], by layer the suffix of the node's tokens that is a node, itself included
    occurring: Array  # [nodes], weights of the phrases that end at the node
    pending: Array  # [nodes], the pending share


# Requests often repeat their phrases; building those of 10,000 tokens takes 50 ms.
_automata = SearchCache[_ConstraintAutomaton[np.ndarray]](AUTOMATA_BYTES)


def most_constraint_bytes(ways: Iterable[Sequence[int]]) -> int:
    """Bytes of the tables, on a device, of phrases with these ways, if no two begin alike: an upper bound."""
    lengths = [len(way) for way in ways]
    num_edges = sum(lengths)
    return (1 + num_edges) * (SUFFIX_BYTES * max(lengths) + WEIGHT_BYTES) + num_edges * EDGE_BYTES


def _new_constraint_automaton(phrases: tuple[ConstraintPhrase, ...]) -> _ConstraintAutomaton[np.ndarray]:
    beginnings = sorted({way[:length] for phrase in phrases for way in phrase.ways for length in range(len(way) + 1)})
    beginnings.sort(key=len)
    nodes = {tokens: node for node, tokens in enumerate(beginnings)}
    ends = [set[int]() for _ in beginnings]  # by node, the phrases that end at it
    shares = [-np.inf] * len(beginnings)  # by node, the largest pending share
    for number, (ways, weight) in enumerate(phrases):
        for way in ways:
            ends[nodes[way]].add(number)
            for length in range(1, len(way)):
                node = nodes[way[:length]]
                shares[node] = max(shares[node], weight * length / len(way))

    suffix_of = [NOWHERE]  # by node, its longest proper suffix that is a node
    suffixes = np.full((len(beginnings), len(beginnings[-1])), NOWHERE, np.int32)
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
    parents = np.array([nodes[tokens[:-1]] for tokens in beginnings[1:]], np.int32)
    depths = np.array([len(tokens) - 1 for tokens in beginnings[1:]])
    of_all, columns = np.unique([tokens[-1] for tokens in beginnings[1:]], return_inverse=True)
    return _ConstraintAutomaton(
        parents, columns, depths, np.arange(1, len(nodes)), of_all, suffixes, occurring, pending
    )


def _constraint_edges_lead_on(tables: _ConstraintAutomaton[torch.Tensor], nodes: torch.Tensor) -> torch.Tensor:
    """[..., edges] bool, which edges lead on from nodes [...] or from their suffixes."""
    return tables.suffixes[nodes][..., tables.depths] == tables.parents


def _next_constraint_nodes(tables: _ConstraintAutomaton[torch.Tensor], nodes: torch.Tensor) -> torch.Tensor:
    """[G, r, n], the nodes to which each token of `tables.tokens` leads from nodes [G, r]; the root where none does."""
    leads = _constraint_edges_lead_on(tables, nodes)
    found = nodes.new_full((*nodes.shape, len(tables.tokens)), ROOT)
    # Of several nodes, the one with the highest number has the longest beginning.
    return found.scatter_reduce_(-1, tables.columns.expand(leads.shape), tables.children.where(leads, ROOT), "amax")
