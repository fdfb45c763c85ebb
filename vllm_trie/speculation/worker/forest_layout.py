"""Places the nodes of grown forests in the batch that the target verifies, on the device, without the host.

The host knows the most tokens of a forest, and lets the rows of its group compute that many between them: the forest's
nodes in order, whichever rows' caches they are in. Unused entries come last, are computed in vain, and see their
forest's first root. `kernels.forest_layout` has the same as a kernel; `grown_forests` calls either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search import search_spans
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.speculation.worker.forest_growth import NO_NODE, ForestGrowthPlan, GrowingForests

PARENT_UNIT = 1 << 32  # of a key, which is made of a parent and a token
NO_CHILD = (1 << 63) - 1  # sorts after all keys
NUM_OF_FOREST = 4  # columns of a forest's layout before its layers


class TargetInputs(NamedTuple):
    """The inputs of the target for a batch."""

    tokens: torch.Tensor  # [tokens] int32
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [KV cache groups, tokens or more] int64


class ForestPlaces(NamedTuple):
    """T tokens of G forests, as many of each as it may have nodes, one forest after the other.

    A node is known by its place among the S entries of its forest, the roots first.
    """

    tokens: torch.Tensor  # [T] int64, their indices in the batch
    logits: torch.Tensor  # [T] int64, the indices of the logits that follow them
    places: torch.Tensor  # [rows of all forests] int64, the rows' indices in the batch
    rows: torch.Tensor  # [T] int32, the batch row of each
    ends: torch.Tensor  # [T] int32, tokens of that row in the cache up to and including it
    masks: torch.Tensor  # [T, words] int64, what each sees of its row's tree
    keys: torch.Tensor  # [G, S + 1] int64, made of each draft's parent and token; `NO_CHILD` otherwise
    at: torch.Tensor  # [G, S + 1] int64, the logits that follow each node; arbitrary for unused entries


def forest_layout_of(plans: Sequence[ForestGrowthPlan]) -> np.ndarray:
    """[G, n] int32, what the kernel must know of each forest.

    Its start in the caches of its rows, its first token, its number of tokens, its first row; and by layer, the first
    node entry and the number of entries.
    """
    ends = np.cumsum([plan.num_tokens for plan in plans])
    of_forests = [
        [plan.forest_step.start, end - plan.num_tokens, plan.num_tokens, plan.first_row, *np.ravel(plan.parts)]
        for plan, end in zip(plans, ends, strict=True)
    ]
    return np.array(of_forests, np.int32)


def lay_out_forest(
    growing: GrowingForests, plan: ForestGrowthPlan, first: int, inputs: TargetInputs, laid: ForestPlaces
) -> None:
    """Lays out one forest.

    Args:
        growing: All forests.
        plan: The forest's plan.
        first: Its first token among those of all forests.
        inputs: Written.
        laid: Reads `tokens`, `logits` and `places`, writes the fields after them.
    """
    device, start, sizes = growing.words.device, plan.forest_step.start, plan.sizes
    depths, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    before = np.append(0, starts)[depths]  # where the previous layer of each node begins among the forest's entries
    of_nodes = search_spans(np.array([part.first for part in plan.parts]), np.array(sizes)), start + depths, before
    at, positions, before = uploaded_for_search(np.stack(of_nodes).astype(np.int64), device)
    parents, tokens, num_roots = growing.parents[at].long(), growing.tokens[at], sizes[0]
    is_draft = parents != NO_NODE
    is_node = is_draft.clone()
    is_node[:num_roots] = True
    chosen = is_node.logical_not().byte().argsort(stable=True)[: plan.num_tokens]
    nodes, own = at[chosen], slice(first, first + plan.num_tokens)
    to = laid.tokens[own]
    inputs.tokens[to] = growing.tokens[nodes]
    inputs.positions[to] = positions[chosen].where(is_node[chosen], start)
    inputs.slots[:, to] = growing.slots[:, nodes]
    laid.rows[own] = laid.places[growing.rows[nodes].long()].int()
    laid.ends[own], laid.masks[own] = growing.ends[nodes], growing.masks[nodes]
    keys, logits = laid.keys[plan.place], laid.at[plan.place]
    keys[len(at) :], logits[:] = NO_CHILD, laid.logits[first]
    keys[: len(at)] = ((before + parents) * PARENT_UNIT + tokens).where(is_draft, NO_CHILD)
    logits[chosen] = laid.logits[own]
