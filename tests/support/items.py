"""Items for beams to go along, and what transformers must be told of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_trie.catalog import Catalog
from vllm_trie.engine.catalog_exclusion import Exclusion
from vllm_trie.search.constraints.catalog import ConstraintAlongItems, ConstraintTrie, ItemConstraint

EOS = 1
EXCLUDED = "excluded"
Item = tuple[int, ...]


def random_items(count: int, lengths: Sequence[int], seed: int = 0, tokens: tuple[int, int] = (2, 300)) -> list[Item]:
    """Different ones. A few first tokens begin many of them."""
    choose, items = random.Random(seed), set[Item]()
    while len(items) < count:
        rest = (choose.randrange(*tokens) for _ in range(choose.choice(lengths) - 1))
        items.add((choose.randrange(tokens[0], tokens[0] + 40), *rest))
    return sorted(items)


def along_of(
    items: Sequence[Item],
    rules: ItemConstraint,
    stops: tuple[int, ...] = (),
    device: str = "cpu",
    excluded: Sequence[Item] = (),
) -> ConstraintAlongItems:
    """The constraint that holds rows to them, on a device, but for those that are excluded if `rules` say so."""
    catalog = Catalog.from_sequences(items)
    arrays = (torch.tensor(array, device=device) for array in (catalog.first_child, catalog.tokens, catalog.is_item))
    trie = ConstraintTrie(*arrays, catalog.most_children, catalog.tokens_by_depth())
    if rules.excludes:
        index = {item: number for number, item in reversed([*enumerate(items)])}
        for name, some in (("others", items[:1]), (EXCLUDED, excluded)):
            ids = np.array(sorted({index[item] for item in some}), np.int64)
            trie.closed.add(name, Exclusion.of(catalog, ids).nodes)
    return ConstraintAlongItems(rules, trie, stops)


def first_states_of(along: ConstraintAlongItems, states: torch.Tensor | None = None) -> torch.Tensor:
    """[1, 1] of a hypothesis without a token, or other states, where what `along_of` was given is closed."""
    states = along.begin(1, along.trie.tokens.device) if states is None else states
    return along.closing(states, along.trie.closed.part(EXCLUDED)) if along.rules.excludes else states


def along(items: Sequence[Item], prompt: list[int], ends: int | None = EOS) -> Callable[[int, torch.Tensor], list[int]]:
    """What transformers' `generate` asks for: the tokens that may follow."""
    children: dict[Item, set[int]] = {}
    for item in items:
        for length, token in enumerate(item):
            children.setdefault(item[:length], set()).add(token)
        children.setdefault(item, set()).update([] if ends is None else [ends])
    return lambda _, tokens: sorted(children.get(tuple(tokens[len(prompt) :].tolist()), {EOS})) or [EOS]
