"""Where a beam is in a catalog, and how it may go on: a trie of items as compressed rows, on the search's device.

A beam's state is one integer, which follows forks as its score does. What is looked up are the children of its node,
not the vocabulary, so a step costs the same however many items there are. Source: STATIC (arXiv 2602.22647).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

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
    targets: torch.Tensor  # int64, what they lead to, see `ItemTrie.outcomes`
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

    def begin(self, rules: ItemRules, num_rows: int) -> torch.Tensor:
        """[rows] int64, the states of hypotheses without a token."""
        state = 0 if rules.after is None else BEFORE
        return torch.full((num_rows,), state, dtype=torch.int64, device=self.tokens.device)

    def ways(
        self, rules: ItemRules, states: torch.Tensor, stops: tuple[int, ...], vocab_size: int, length: int | None = None
    ) -> Ways:
        """How rows may go on.

        Args:
            rules: Theirs.
            states: [G, r].
            stops: Stop tokens, of which one follows the last item if `rules.ends_with_stop`, and none comes before.
            vocab_size: Tokens that there are.
            length: Of these hypotheses, if they are equally long, in tokens.
        """
        of_item, node, device = states // self.num_nodes * self.num_nodes, states % self.num_nodes, states.device
        start, end = self.first_child[node][..., None], self.first_child[node + 1][..., None]
        is_before = (states == BEFORE)[..., None]
        every = numbers(self._most(rules, states, start, end, vocab_size, length), device)
        nodes = start + every.int()
        exist = nodes < end
        nodes = nodes.clamp_(max=self.num_nodes - 1).long()
        tokens, targets = self.tokens[nodes].long(), nodes + of_item[..., None]
        if rules.after is not None:
            is_stop = torch.isin(every, constant(stops, device))
            tokens, exist = torch.where(is_before, every, tokens), torch.where(is_before, ~is_stop, exist)
            targets = torch.where(is_before, torch.where(every == rules.after, 0, BEFORE), targets)
        if not rules.ends_with_stop:
            return Ways(tokens, targets, exist)
        may_stop = self.outcomes(rules, states).is_complete[..., None].expand(*states.shape, len(stops))
        stopped = Ways(
            constant(stops, device).expand_as(may_stop), torch.full_like(may_stop, STOPPED, dtype=torch.int64), may_stop
        )
        return Ways(*(torch.cat(pair, dim=-1) for pair in zip(Ways(tokens, targets, exist), stopped, strict=True)))

    def outcomes(self, rules: ItemRules, targets: torch.Tensor) -> Outcomes:
        """What ways lead to."""
        node, is_within = targets % self.num_nodes, targets >= 0
        is_last = targets >= (rules.num_items - 1) * self.num_nodes
        is_item = self.is_item[node] & is_within
        is_stopped = targets == STOPPED
        is_complete = (is_item & is_last) | is_stopped
        goes_on = (self.first_child[node] < self.first_child[node + 1]) & is_within
        states = targets
        if rules.num_items > 1:
            states = torch.where(is_item & ~is_last, (targets // self.num_nodes + 1) * self.num_nodes, targets)
            goes_on = goes_on | (is_item & ~is_last)
        if rules.after is not None:
            goes_on = goes_on | (targets == BEFORE)
        if rules.ends_with_stop:
            return Outcomes(states, is_complete, is_stopped, goes_on | (is_item & is_last))
        return Outcomes(states, is_complete, is_complete, goes_on)

    def _most(
        self,
        rules: ItemRules,
        states: torch.Tensor,
        start: torch.Tensor,
        end: torch.Tensor,
        vocab_size: int,
        length: int | None,
    ) -> int:
        """How many children any of these rows has, or a bound that needs no look at the device."""
        looks = sees(states.device)
        if rules.after is not None and not (looks and bool((states != BEFORE).all())):
            return vocab_size
        if looks:
            return max(int((end - start).max()), 1)
        one_depth = length is not None and rules.num_items == 1 and rules.after is None
        if not one_depth or length is None:
            return max(self.most_children)
        # Behind the leaves, where a stop token may follow, or a step that is scheduled before the host knows the end.
        return self.most_children[length] if length < len(self.most_children) else 1

    def advance(self, rules: ItemRules, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after one more token each; of any shape. Where a token is not possible, any state."""
        of_item, node = states // self.num_nodes * self.num_nodes, states % self.num_nodes
        low, high = self.first_child[node].long(), self.first_child[node + 1].long()
        for _ in range(max(self.most_children).bit_length()):
            middle = ((low + high) // 2).clamp(max=self.num_nodes - 1)
            is_right = self.tokens[middle] < tokens
            low, high = torch.where(is_right, middle + 1, low), torch.where(is_right, high, middle)
        targets = low.clamp(max=self.num_nodes - 1) + of_item
        if rules.after is not None:
            targets = torch.where(states == BEFORE, torch.where(tokens == rules.after, 0, BEFORE), targets)
        return self.outcomes(rules, targets).states

    def lead_on(
        self, rules: ItemRules, states: torch.Tensor, tokens: torch.Tensor, stops: tuple[int, ...], vocab_size: int
    ) -> torch.Tensor:
        """[rows] bool, whether a token is possible there and something comes after it.

        Args:
            states, tokens: [rows].
        """
        ways = self.ways(rules, states, stops, vocab_size)
        goes_on = ways.exist & self.outcomes(rules, ways.targets).goes_on
        return ((ways.tokens == tokens[:, None]) & goes_on).any(dim=-1)

    def masked(
        self, rules: ItemRules, states: torch.Tensor, logprobs: torch.Tensor, stops: tuple[int, ...]
    ) -> torch.Tensor:
        """Log-probabilities [rows, V] with -inf for what leads nowhere: to no item, or to no token after it.

        Args:
            states: [rows].
        """
        ways = self.ways(rules, states, stops, logprobs.shape[-1])
        leads_on = ways.exist & self.outcomes(rules, ways.targets).goes_on
        kept = logprobs.gather(-1, ways.tokens).where(leads_on, NEVER)
        return torch.full_like(logprobs, NEVER).scatter_reduce(-1, ways.tokens, kept, "amax")


class Items(NamedTuple):
    """What a step needs of a catalog."""

    trie: ItemTrie
    states: torch.Tensor  # [G, r] int64, of rows
    length: int | None = None  # tokens of all hypotheses before the step, if the host knows that they are equally many


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
