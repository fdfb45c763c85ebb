"""Constrains beams to a catalog: a trie of items in compressed rows (CSR), on the search's device.

A beam's state is one integer, which forks with the beam as its score does. A step looks up the children of the beam's
node, not the vocabulary, so its cost does not depend on the number of items. Source: STATIC (arXiv 2602.22647).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_trie.search.constraints.closed_nodes import (
    IS_CLOSED,
    KIND_BITS,
    NO_ITEM_ENDS,
    NO_WAY_ON,
    ClosedNodes,
)
from vllm_trie.search.constraints.constraint import ConstrainedContinuations, Constraint, ConstraintOutcomes
from vllm_trie.search.devices import NEVER, is_searched_on_host, search_arange, uploaded_for_search
from vllm_trie.search.parts import in_search_parts
from vllm_trie.search.token_tables import MOST_TOKENS, search_token_columns

NOT_STARTED = -1  # the state of a hypothesis whose items have not begun
STOPPED = -2  # the state of a hypothesis that a stop token has ended
LEAST_PLACE = STOPPED
LEVEL_UNIT = 64  # tokens: a level's logits are aligned if their number is a multiple of this
# Bits of a state of a search that excludes items: the row's place, what is closed there (of targets), and the part at
# which the closed nodes of its search begin.
PLACE_BITS = 42
PART_BITS = PLACE_BITS + KIND_BITS
MOST_PLACES = (1 << PLACE_BITS) + LEAST_PLACE  # nodes times items of a hypothesis


@dataclass(frozen=True)
class ItemConstraint(Constraint):
    """How the hypotheses of a search follow a catalog.

    Args:
        catalog: Digest of the catalog.
        num_items: Items of a hypothesis, one after the other.
        after: The token after which the items begin; None: a hypothesis is nothing but items.
        ends_with_stop: A stop token follows the last item; otherwise that item ends the hypothesis.
        renormalizes: Each row's log-probabilities are renormalised over what the row may take.
        excludes: The search excludes some items.
    """

    catalog: str
    num_items: int = 1
    after: int | None = None
    ends_with_stop: bool = False
    renormalizes: bool = False
    excludes: bool = False

    is_sparse = True

    @property
    def is_plain(self) -> bool:
        """Whether each hypothesis is exactly one item, scored by the model's own probabilities."""
        return self == ItemConstraint(self.catalog, excludes=self.excludes)

    @property
    def needs_level_alone(self) -> bool:
        """Whether each hypothesis is exactly one item, and tokens that no item has at a depth do not count."""
        return self == ItemConstraint(self.catalog, renormalizes=True, excludes=self.excludes)

    def on(self, tries: Mapping[str, ConstraintTrie], stop_token_ids: tuple[int, ...]) -> ConstraintAlongItems:
        """See `Constraint`."""
        return ConstraintAlongItems(self, tries[self.catalog], stop_token_ids)


class ConstraintTrie:
    """A set of token sequences, see `vllm_trie.catalog.Catalog`, as tensors; node 0 is the root.

    Args:
        first_child: [nodes + 1] int32; the children of node s are first_child[s] to first_child[s + 1] - 1.
        tokens: [nodes] int32, the token that leads to each node; ascending among siblings.
        is_item: [nodes] bool, whether an item ends at the node.
        most_children: By depth, the most children of a node.
        levels: By depth, the tokens that lead on from any node, see `Catalog.tokens_by_depth`; empty if not needed.
        closed: The nodes that searches on this device exclude.
    """

    def __init__(
        self,
        first_child: torch.Tensor,
        tokens: torch.Tensor,
        is_item: torch.Tensor,
        most_children: list[int],
        levels: Sequence[np.ndarray] = (),
        closed: ClosedNodes | None = None,
    ) -> None:
        self.first_child, self.tokens, self.is_item = first_child, tokens, is_item
        self.most_children = most_children
        self.num_nodes = len(tokens)
        self.most_in_level = max(map(len, levels), default=0)
        self._levels, self._level_at = levels, dict[int, torch.Tensor]()
        self.closed = closed or ClosedNodes(tokens.device)

    def level(self, length: int) -> torch.Tensor:
        """[K] int64, ascending: all tokens that may follow `length` tokens, the last one repeated to fill a LEVEL_UNIT.

        Nothing follows the leaves: beyond them it is any level.
        """
        depth = length if length < len(self._levels) else 0
        if depth not in self._level_at:
            tokens = np.pad(self._levels[depth], (0, -len(self._levels[depth]) % LEVEL_UNIT), mode="edge")
            self._level_at[depth] = uploaded_for_search(tokens.astype(np.int64), self.tokens.device)
        return self._level_at[depth]


@dataclass(frozen=True)
class ConstraintAlongItems(Constraint):
    """Rows that follow a catalog. The states [G, r] int64 are nodes, plus the number of nodes per completed item.

    Where items are excluded, a state also has where the closed nodes of its search begin.

    Args:
        rules: How hypotheses follow the catalog.
        trie: The catalog's trie, on the search's device.
        stops: Stop tokens. If `rules.ends_with_stop`, one of them follows the last item; none comes earlier.
    """

    rules: ItemConstraint
    trie: ConstraintTrie
    stops: tuple[int, ...]

    is_sparse = True

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        state = 0 if self.rules.after is None else NOT_STARTED
        return torch.full((1, num_rows), state, dtype=torch.int64, device=device)

    def closing(self, states: torch.Tensor, part: int) -> torch.Tensor:
        """First states of a search whose closed nodes begin at `part`, see `ClosedNodes.part`."""
        return states + (part << PART_BITS)

    def _places(self, states: torch.Tensor) -> torch.Tensor:
        """The places of states or targets in the trie."""
        if not self.rules.excludes:
            return states
        return (states - LEAST_PLACE).bitwise_and_((1 << PLACE_BITS) - 1).add_(LEAST_PLACE)

    def _parts(self, states: torch.Tensor) -> torch.Tensor:
        """The parts at which the closed nodes of their searches begin."""
        return (states - LEAST_PLACE) >> PART_BITS

    def _closes(self, kind: int, targets: torch.Tensor) -> torch.Tensor:
        """Whether targets have this kind closed."""
        return (targets - LEAST_PLACE).bitwise_and_(kind << PLACE_BITS) != 0

    def _with_parts_of(self, states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """`places` as states or targets of the same searches as `states`; unchanged where nothing is excluded."""
        return places if not self.rules.excludes else places + (self._parts(states) << PART_BITS)

    @property
    def num_ends(self) -> int:
        """See `Constraint`."""
        return len(self.stops) if self.rules.ends_with_stop else 0

    def most_continuations(self, states: torch.Tensor, vocab_size: int, length: int | None = None) -> int:
        """See `Constraint`; without the stop tokens that follow an item."""
        trie, looks, after = self.trie, is_searched_on_host(states.device), self.rules.after
        places = self._places(states) if looks else states
        if after is not None and not (looks and bool((places != NOT_STARTED).all())):
            return vocab_size
        if looks:
            node = places % trie.num_nodes
            return max(int((trie.first_child[node + 1] - trie.first_child[node]).max()), 1)
        return self.most_children(length)

    def most_children(self, length: int | None) -> int:
        """The most children of any row's node after `length` tokens; None: after any number.

        After the leaves it is one: a stop token, or a step scheduled before the host knows that the search has ended.
        """
        most = self.trie.most_children
        if length is None or self.rules.num_items > 1 or self.rules.after is not None:
            return max(most)
        return most[length] if length < len(most) else 1

    def continuations(self, states: torch.Tensor, most: int) -> ConstrainedContinuations:
        """See `Constraint`."""
        trie, rules, device, places = self.trie, self.rules, states.device, self._places(states)
        of_item, node = places // trie.num_nodes * trie.num_nodes, places % trie.num_nodes
        start, end = trie.first_child[node][..., None], trie.first_child[node + 1][..., None]
        is_before = (places == NOT_STARTED)[..., None]
        every = search_arange(most, device)
        nodes = start + every.int()
        exist = nodes < end
        nodes = nodes.clamp_(max=trie.num_nodes - 1).long()
        tokens, targets = trie.tokens[nodes].long(), nodes + of_item[..., None]
        del nodes  # frees memory
        if rules.excludes:
            closed = trie.closed.kinds_of_children(self._parts(states), start[..., 0].long(), most)
            targets += closed.long().bitwise_left_shift_(PLACE_BITS)
            exist &= closed != IS_CLOSED
        if rules.after is not None:
            is_stop = torch.zeros(most, dtype=torch.bool, device=device).index_fill_(
                0, self._columns(most, device), True
            )
            tokens, exist = torch.where(is_before, every, tokens), torch.where(is_before, ~is_stop, exist)
            targets = torch.where(is_before, torch.where(every == rules.after, 0, NOT_STARTED), targets)
        if rules.excludes:
            targets += self._with_parts_of(states, torch.zeros_like(states))[..., None]
        if not rules.ends_with_stop:
            return ConstrainedContinuations(tokens, targets, exist)
        if rules.excludes:
            states = states + (trie.closed.kinds(self._parts(states), node) << PLACE_BITS)
        ended = self.outcomes(states).is_complete
        may_stop = ended[..., None].expand(*states.shape, len(self.stops))
        stop_tokens = self._columns(MOST_TOKENS, device).expand_as(may_stop)
        stopped = stop_tokens, torch.full_like(may_stop, STOPPED, dtype=torch.int64), may_stop
        return ConstrainedContinuations(
            *(torch.cat(pair, dim=-1) for pair in zip((tokens, targets, exist), stopped, strict=True))
        )

    def outcomes(self, targets: torch.Tensor) -> ConstraintOutcomes:
        """See `Constraint`."""
        trie, rules, places = self.trie, self.rules, self._places(targets)
        is_item = self._is_item(targets, places % trie.num_nodes) & (places >= 0)
        is_last = places >= (rules.num_items - 1) * trie.num_nodes
        is_stopped = places == STOPPED
        is_complete = (is_item & is_last) | is_stopped
        after = places
        if rules.num_items > 1:
            after = torch.where(is_item & ~is_last, (places // trie.num_nodes + 1) * trie.num_nodes, places)
        ends = is_stopped if rules.ends_with_stop else is_complete
        return ConstraintOutcomes(self._with_parts_of(targets, after), is_complete, ends, self.go_on(targets))

    def go_on(self, targets: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        trie, rules, places = self.trie, self.rules, self._places(targets)
        node, is_there = places % trie.num_nodes, places >= 0
        is_before = None if rules.after is None else places == NOT_STARTED
        may_follow = places < (rules.num_items - 1) * trie.num_nodes if rules.num_items > 1 else None
        del places  # frees memory
        end = trie.first_child[node + 1]  # keeps no reference to `node + 1`
        goes_on = trie.first_child[node] < end
        if rules.excludes:
            goes_on &= ~self._closes(NO_WAY_ON, targets)
        if rules.ends_with_stop:
            goes_on |= self._is_item(targets, node)
        elif may_follow is not None:
            goes_on |= self._is_item(targets, node) & may_follow
        goes_on &= is_there
        return goes_on if is_before is None else goes_on | is_before

    def end(self, targets: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        places, num_nodes = self._places(targets), self.trie.num_nodes
        if self.rules.ends_with_stop:
            return places == STOPPED
        return self._is_item(targets, places % num_nodes) & (places >= (self.rules.num_items - 1) * num_nodes)

    def _is_item(self, targets: torch.Tensor, node: torch.Tensor) -> torch.Tensor:
        """Whether an item ends at the nodes of targets and is not closed."""
        is_item = self.trie.is_item[node]
        return is_item if not self.rules.excludes else is_item & ~self._closes(NO_ITEM_ENDS, targets)

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        targets, _ = self._targets(states, tokens)
        return self.outcomes(targets).states

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        targets, exist = self._targets(states, tokens)
        return exist & self.go_on(targets)

    def _targets(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets of tokens that are no stop tokens, and whether these exist; of any shape."""
        trie, places = self.trie, self._places(states)
        of_item, node = places // trie.num_nodes * trie.num_nodes, places % trie.num_nodes
        low, high = trie.first_child[node].long(), trie.first_child[node + 1].long()
        end = high
        for _ in range(max(trie.most_children).bit_length()):
            middle = ((low + high) // 2).clamp(max=trie.num_nodes - 1)
            is_right = trie.tokens[middle] < tokens
            low, high = torch.where(is_right, middle + 1, low), torch.where(is_right, high, middle)
        nodes = low.clamp(max=trie.num_nodes - 1)
        targets, exist = nodes + of_item, (low < end) & (trie.tokens[nodes] == tokens)
        if self.rules.excludes:
            closed = trie.closed.kinds(self._parts(states), nodes)
            targets, exist = targets + (closed << PLACE_BITS), exist & (closed != IS_CLOSED)
        if self.rules.after is not None:
            is_before = places == NOT_STARTED
            targets = torch.where(is_before, torch.where(tokens == self.rules.after, 0, NOT_STARTED), targets)
            exist = torch.where(is_before, ~torch.isin(tokens, self._columns(MOST_TOKENS, tokens.device)), exist)
        return self._with_parts_of(states, targets), exist

    def _columns(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """[n] int64, stop tokens below `vocab_size`."""
        return search_token_columns(self.stops, vocab_size, device)

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`: leaves out what leads to no item, or to no token after it.

        `best_strategy_continuations` skips this: it looks only at `continuations`, which are few.
        """
        most = self.most_continuations(states, logprobs.shape[-1])

        def of_rows(logprobs: torch.Tensor, states: torch.Tensor) -> tuple[torch.Tensor]:
            found = self.continuations(states, most)
            own = super(ConstraintAlongItems, self).logprobs_of(logprobs, found)
            kept = own.where(self.go_on(found.targets), NEVER)
            return (torch.full_like(logprobs, NEVER).scatter_reduce(-1, found.tokens, kept, "amax"),)

        (narrowed,) = in_search_parts(logprobs.shape, of_rows, logprobs, states)
        return narrowed

    def logprobs_of(self, logprobs: torch.Tensor, continuations: ConstrainedContinuations) -> torch.Tensor:
        """See `Constraint`."""
        own = super().logprobs_of(logprobs, continuations)
        if not self.rules.renormalizes:
            return own
        total = own.logsumexp(dim=-1, keepdim=True)
        return torch.where(own > NEVER, (own - total).clamp(max=0.0), own)
