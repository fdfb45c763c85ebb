"""Where a beam is in a catalog, and how it may go on: a trie of items as compressed rows, on the search's device.

A beam's state is one integer, which follows forks as its score does. What is looked up are the children of its node,
not the vocabulary, so a step costs the same however many items there are. Source: STATIC (arXiv 2602.22647).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER, constant, numbers, sees

BEFORE = -1  # the state of a hypothesis whose items have not begun
STOPPED = -2  # and of one that a stop token has ended


class ItemRules(NamedTuple):
    """How the hypotheses of a search go along a catalog."""

    catalog: str  # its digest
    num_items: int = 1  # in a hypothesis, one after the other
    after: int | None = None  # the token after which they begin; None: they are all there is
    ends_with_stop: bool = False  # a stop token follows the last item; else that item ends the hypothesis
    renormalizes: bool = False  # each row's log-probabilities are those among what it may take


class Ways(NamedTuple):
    """How rows may go on: [G, r, B] each; where a row has fewer than B ways, the others do not exist."""

    tokens: torch.Tensor  # int64, ascending, but for stop tokens, which come last
    targets: torch.Tensor  # int64, what they lead to, see `AlongItems.outcomes`
    exist: torch.Tensor  # bool


class Outcomes(NamedTuple):
    """What ways lead to, of any shape."""

    states: torch.Tensor  # int64
    is_complete: torch.Tensor  # bool, the last item is
    ends: torch.Tensor  # bool, so that the hypothesis is over
    goes_on: torch.Tensor  # bool, there are ways from there


class ItemTrie:
    """A set of token sequences, see `vllm_trie.catalog.Catalog`; node 0 is the root.

    Args:
        first_child: [nodes + 1] int32; the children of node s are first_child[s] to first_child[s + 1] - 1.
        tokens: [nodes] int32, by which each node is entered; ascending among siblings.
        is_item: [nodes] bool, an item ends here.
        most_children: By depth, how many a node there has at most.
    """

    def __init__(
        self, first_child: torch.Tensor, tokens: torch.Tensor, is_item: torch.Tensor, most_children: list[int]
    ) -> None:
        self.first_child, self.tokens, self.is_item = first_child, tokens, is_item
        self.most_children = most_children
        self.num_nodes = len(tokens)


@dataclass(frozen=True)
class AlongItems(Constraint):
    """Rows go along a catalog. The states [G, r] int64 are nodes, further by all nodes for each item that is complete.

    Args:
        rules: How.
        trie: The catalog's, on the search's device.
        stops: Stop tokens, of which one follows the last item if `rules.ends_with_stop`, and none comes before.
    """

    rules: ItemRules
    trie: ItemTrie
    stops: tuple[int, ...]

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """See `Constraint`."""
        return torch.full((1, num_rows), 0 if self.rules.after is None else BEFORE, dtype=torch.int64, device=device)

    def ways(self, states: torch.Tensor, vocab_size: int, length: int | None = None) -> Ways:
        """How rows may go on.

        Args:
            states: [G, r].
            vocab_size: Tokens that there are.
            length: Of these hypotheses, if they are equally long, in tokens.
        """
        trie, rules, device = self.trie, self.rules, states.device
        of_item, node = states // trie.num_nodes * trie.num_nodes, states % trie.num_nodes
        start, end = trie.first_child[node][..., None], trie.first_child[node + 1][..., None]
        is_before = (states == BEFORE)[..., None]
        every = numbers(self._most(is_before, end - start, vocab_size, length), device)
        nodes = start + every.int()
        exist = nodes < end
        nodes = nodes.clamp_(max=trie.num_nodes - 1).long()
        tokens, targets = trie.tokens[nodes].long(), nodes + of_item[..., None]
        if rules.after is not None:
            is_stop = torch.isin(every, constant(self.stops, device))
            tokens, exist = torch.where(is_before, every, tokens), torch.where(is_before, ~is_stop, exist)
            targets = torch.where(is_before, torch.where(every == rules.after, 0, BEFORE), targets)
        if not rules.ends_with_stop:
            return Ways(tokens, targets, exist)
        may_stop = self.outcomes(states).is_complete[..., None].expand(*states.shape, len(self.stops))
        stop_tokens = constant(self.stops, device).expand_as(may_stop)
        stopped = Ways(stop_tokens, torch.full_like(may_stop, STOPPED, dtype=torch.int64), may_stop)
        return Ways(*(torch.cat(pair, dim=-1) for pair in zip(Ways(tokens, targets, exist), stopped, strict=True)))

    def outcomes(self, targets: torch.Tensor) -> Outcomes:
        """What ways lead to."""
        trie, rules = self.trie, self.rules
        node, is_within = targets % trie.num_nodes, targets >= 0
        is_last = targets >= (rules.num_items - 1) * trie.num_nodes
        is_item = trie.is_item[node] & is_within
        is_stopped = targets == STOPPED
        is_complete = (is_item & is_last) | is_stopped
        goes_on = (trie.first_child[node] < trie.first_child[node + 1]) & is_within
        states = targets
        if rules.num_items > 1:
            states = torch.where(is_item & ~is_last, (targets // trie.num_nodes + 1) * trie.num_nodes, targets)
            goes_on = goes_on | (is_item & ~is_last)
        if rules.after is not None:
            goes_on = goes_on | (targets == BEFORE)
        if rules.ends_with_stop:
            return Outcomes(states, is_complete, is_stopped, goes_on | (is_item & is_last))
        return Outcomes(states, is_complete, is_complete, goes_on)

    def _most(self, is_before: torch.Tensor, num_children: torch.Tensor, vocab_size: int, length: int | None) -> int:
        """How many ways any of these rows has, stops aside, or a bound that needs no look at the device."""
        looks, most_children = sees(is_before.device), self.trie.most_children
        if self.rules.after is not None and not (looks and not bool(is_before.any())):
            return vocab_size
        if looks:
            return max(int(num_children.max()), 1)
        one_depth = length is not None and self.rules.num_items == 1 and self.rules.after is None
        if not one_depth or length is None:
            return max(most_children)
        # Behind the leaves, where a stop token may follow, or a step that is scheduled before the host knows the end.
        return most_children[length] if length < len(most_children) else 1

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        targets, _ = self._targets(states, tokens)
        return self.outcomes(targets).states

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """See `Constraint`."""
        targets, exist = self._targets(states, tokens)
        return exist & self.outcomes(targets).goes_on

    def _targets(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What tokens that are no stops lead to, and whether there is such a way; of any shape."""
        trie = self.trie
        of_item, node = states // trie.num_nodes * trie.num_nodes, states % trie.num_nodes
        low, high = trie.first_child[node].long(), trie.first_child[node + 1].long()
        end = high
        for _ in range(max(trie.most_children).bit_length()):
            middle = ((low + high) // 2).clamp(max=trie.num_nodes - 1)
            is_right = trie.tokens[middle] < tokens
            low, high = torch.where(is_right, middle + 1, low), torch.where(is_right, high, middle)
        nodes = low.clamp(max=trie.num_nodes - 1)
        targets, exist = nodes + of_item, (low < end) & (trie.tokens[nodes] == tokens)
        if self.rules.after is not None:
            is_before = states == BEFORE
            targets = torch.where(is_before, torch.where(tokens == self.rules.after, 0, BEFORE), targets)
            exist = torch.where(is_before, ~torch.isin(tokens, constant(self.stops, tokens.device)), exist)
        return targets, exist

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """See `Constraint`: what leads nowhere, to no item or to no token after it, is left out.

        Plain steps look at `ways` alone, which are few.
        """
        ways = self.ways(states, logprobs.shape[-1])
        leads_on = ways.exist & self.outcomes(ways.targets).goes_on
        kept = logprobs.gather(-1, ways.tokens).where(leads_on, NEVER)
        return torch.full_like(logprobs, NEVER).scatter_reduce(-1, ways.tokens, kept, "amax")


def log_probabilities_of(logprobs: torch.Tensor, ways: Ways, renormalizes: bool) -> torch.Tensor:
    """[G, r, B] of each row's ways, -inf where there is none.

    Args:
        logprobs: [G, r, V].
    """
    own = logprobs.gather(-1, ways.tokens).where(ways.exist, NEVER)
    if not renormalizes:
        return own
    total = own.logsumexp(dim=-1, keepdim=True)
    return torch.where(own > NEVER, (own - total).clamp(max=0.0), own)
