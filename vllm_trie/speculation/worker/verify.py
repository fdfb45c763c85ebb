"""Runs search steps on a verified forest until one needs a beam that was not drafted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch

from vllm_trie.messages import DecidedMessage, DraftedMessage
from vllm_trie.speculation.search.forest import Forest
from vllm_trie.speculation.worker.forest_nodes import VerifiedForestNodes
from vllm_trie.speculation.worker.forest_path import AcceptedPath, accepted_forest_path
from vllm_trie.speculation.worker.forest_step import ForestOutcome, ForestStep
from vllm_trie.speculation.worker.roots import forest_roots_after_path
from vllm_trie.trie.traced import NO_DRAFT, DraftedForest
from vllm_trie.worker.rows.rows import BatchRows
from vllm_trie.worker.select.select import Selector


def verify_forests(
    selector: Selector,
    forests: Mapping[str, ForestStep],
    seconds: float,
    rows: BatchRows,
    logits: torch.Tensor,
    num_sampled: np.ndarray,
) -> tuple[list[AcceptedPath], dict[str, DecidedMessage]]:
    """Takes as many steps as the forest allows for every group that speculates. Waits for the device.

    Args:
        selector: Takes the steps.
        forests: By group; updates the groups' scores and newest tokens.
        seconds: Time that drafting took.
        rows: The batch's rows.
        logits: [N, V], unprocessed, including those of all nodes.
        num_sampled: [2, R or more], receives how many new tokens each beam's row gets, and how many of the tokens
            that it computed are rejected.

    Returns:
        Where rows continue from, those with logits processors first, and what was decided, by group.
    """
    nodes = {
        group_id: VerifiedForestNodes(selector, rows, forest_step, logits) for group_id, forest_step in forests.items()
    }
    found = _search_verified_forests([*nodes.values()])
    paths, decided = list[AcceptedPath](), dict[str, DecidedMessage]()
    for group_id, forest_step in forests.items():
        steps, beams, accepted = found[nodes[group_id]][:3]
        paths.append(accepted_forest_path(forest_step, steps, beams))
        group = forest_step.group
        *_, group.tokens, group.batch, group.place = found[nodes[group_id]]
        group.roots = forest_roots_after_path(paths[-1], steps[-1])
        places = rows.places(group.slots)
        num_sampled[0, places], num_sampled[1, places] = len(steps), rows.num_logits(places) - len(steps)
        size = forest_step.forest.num_drafts, forest_step.num_layers, forest_step.budget.draft_width
        traced = verified_draft_forest(forest_step.forest, beams) if forest_step.step.is_traced else None
        num_computed = int(rows.num_logits(places).sum()) - len(places)
        drafted = DraftedMessage(*size, seconds, accepted, traced, num_computed)
        decided[group_id] = DecidedMessage(steps, drafted)
    paths.sort(key=lambda path: not path.is_controlled)
    return paths, decided


def _search_verified_forests(nodes: Sequence[VerifiedForestNodes]) -> dict[VerifiedForestNodes, ForestOutcome]:
    """The outcome for all groups; groups of one kind search together."""
    by_kind = defaultdict[type[ForestStep], list[VerifiedForestNodes]](list)
    for of_group in nodes:
        by_kind[type(of_group.forest_step)].append(of_group)
    searched = [zip(of_kind, kind.search(of_kind), strict=True) for kind, of_kind in by_kind.items()]
    return dict(chain(*searched))


def verified_draft_forest(forest: Forest, beams: list[list[int]]) -> DraftedForest:
    """A forest as a trace shows it.

    Args:
        forest: Its first nodes are the beams that it continues.
        beams: For each step, the nodes of its beams before it.
    """
    num_roots = len(forest.rows)
    parents = [node - num_roots if node >= num_roots else -1 - node for node in forest.parents[num_roots:]]
    accepted = [[max(node - num_roots, NO_DRAFT) for node in nodes] for nodes in beams[1:]]
    return DraftedForest(parents, forest.tokens[num_roots:], accepted)
