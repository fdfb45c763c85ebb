"""Where the nodes of grown forests lie in the batch that the target verifies: found on the device, without the host.

The host knows how many tokens a forest takes at most, and lets the rows of its group compute as many between them. They
are the forest's nodes in their order, in whichever rows' caches these lie. What is no node comes last, is computed for
nothing, and sees its forest's first root. `kernels.forest_layout` has the same as a kernel, `grown_forests` calls
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search import search_spans
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.speculation.worker.forest_growth import NO_NODE, ForestGrowthPlan, GrowingForests

PARENT_UNIT = 1 << 32  # of a key, which is a parent and a token
NO_CHILD = (1 << 63) - 1  # comes behind all keys
NUM_OF_FOREST = 4  # what a layout says of a forest before its layers


class TargetInputs(NamedTuple):
    """What the target reads of a batch."""

    tokens: torch.Tensor  # [tokens] int32
    positions: torch.Tensor  # [tokens] int64
    slots: torch.Tensor  # [KV cache groups, tokens or more] int64


class Laid(NamedTuple):
    """T tokens of G forests, as many of each as there may be nodes, one forest after the other.

    Nodes are known by their places among the S that a forest might have had, in which its roots come first.
    """

    tokens: torch.Tensor  # [T] int64, which tokens of the batch they are
    logits: torch.Tensor  # [T] int64, and which of its logits follow them
    places: torch.Tensor  # [rows of all forests] int64, where in the batch these are
    rows: torch.Tensor  # [T] int32, in which of the batch's rows each lies
    ends: torch.Tensor  # [T] int32, tokens of that row in the cache up to it, with it
    masks: torch.Tensor  # [T, words] int64, what each sees of its row's tree
    keys: torch.Tensor  # [G, S + 1] int64, of each draft its parent and its token; else `NO_CHILD`
    at: torch.Tensor  # [G, S + 1] int64, which logits follow each node; any for what is none


def forest_layout_of(plans: Sequence[ForestGrowthPlan]) -> np.ndarray:
    """[G, n] int32, what the kernel must know of each forest.

    Where it starts in the caches of its rows, its first token, how many it has, its first row; and by layer where its
    nodes are, and how many there may be.
    """
    ends = np.cumsum([plan.num_tokens for plan in plans])
    of_forests = [
        [plan.forest_step.start, end - plan.num_tokens, plan.num_tokens, plan.first_row, *np.ravel(plan.parts)]
        for plan, end in zip(plans, ends, strict=True)
    ]
    return np.array(of_forests, np.int32)


def lay_out_forest(
    growing: GrowingForests, plan: ForestGrowthPlan, first: int, inputs: TargetInputs, laid: Laid
) -> None:
    """Lay out one forest.

    Args:
        growing: All forests.
        plan: The forest's.
        first: Its first token among those of all forests.
        inputs: Written.
        laid: `tokens`, `logits` and `places` are read, what comes after them is written.
    """
    device, start, sizes = growing.words.device, plan.forest_step.start, plan.sizes
    depths, starts = np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    before = np.append(0, starts)[depths]  # where the nodes of the layer before each begin among the forest's own
    of_nodes = search_spans(np.array([part.first for part in plan.parts]), np.array(sizes)), start + depths, before
    at, positions, before_there = uploaded_for_search(np.stack(of_nodes).astype(np.int64), device)
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
    keys[: len(at)] = ((before_there + parents) * PARENT_UNIT + tokens).where(is_draft, NO_CHILD)
    logits[chosen] = laid.logits[own]
