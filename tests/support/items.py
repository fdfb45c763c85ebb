"""Items for beams to go along, and what transformers must be told of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from vllm_trie.catalog import Catalog
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint

EOS = 1
Item = tuple[int, ...]


def random_items(count: int, lengths: Sequence[int], seed: int = 0, tokens: tuple[int, int] = (2, 300)) -> list[Item]:
    """Different ones. A few first tokens begin many of them."""
    choose, items = random.Random(seed), set[Item]()
    while len(items) < count:
        rest = (choose.randrange(*tokens) for _ in range(choose.choice(lengths) - 1))
        items.add((choose.randrange(tokens[0], tokens[0] + 40), *rest))
    return sorted(items)


def along_of(
    items: Sequence[Item], rules: ItemConstraint, stops: tuple[int, ...] = (), device: str = "cpu"
) -> ConstraintAlongItems:
    """The constraint that holds rows to them, on a device."""
    catalog = Catalog.from_sequences(items)
    arrays = (torch.tensor(array, device=device) for array in (catalog.first_child, catalog.tokens, catalog.is_item))
    trie = ConstraintTrie(*arrays, catalog.most_children, catalog.tokens_by_depth())
    return ConstraintAlongItems(rules, trie, stops)


def along(items: Sequence[Item], prompt: list[int], ends: int | None = EOS) -> Callable[[int, torch.Tensor], list[int]]:
    """What transformers' `generate` asks for: the tokens that may follow."""
    children: dict[Item, set[int]] = {}
    for item in items:
        for length, token in enumerate(item):
            children.setdefault(item[:length], set()).add(token)
        children.setdefault(item, set()).update([] if ends is None else [ends])
    return lambda _, tokens: sorted(children.get(tuple(tokens[len(prompt) :].tolist()), {EOS})) or [EOS]
