"""Ranks the draft model's tokens after the nodes of a layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_trie.search.beams import SearchBeams, States
from vllm_trie.search.step import search_logprobs_of_draft
from vllm_trie.speculation.search.forest import BestTokens
from vllm_trie.speculation.worker.forest_step import ForestStep


def best_drafts_of_layer(
    forest_steps: Sequence[ForestStep], values: torch.Tensor, rows: Sequence[np.ndarray], number: int
) -> list[BestTokens]:
    """The best tokens of layer `number` for each group, as many as it may draft; for host-readable devices.

    Args:
        forest_steps: The groups' forests.
        values: [N, V] logits of the draft model.
        rows: For each group, which of these follow the nodes of its newest layer; consecutive.
        number: From 1 on.
    """
    best = []
    for forest_step, of_group in zip(forest_steps, rows, strict=True):
        logits = values[int(of_group[0]) : int(of_group[-1]) + 1]
        ranked = rank_drafts_after_nodes(forest_step, logits, forest_step.states_at(forest_step.layer.nodes), number)
        best.append(BestTokens(*(field.numpy() for field in ranked)))
    return best


def rank_drafts_after_nodes(
    forest_step: ForestStep, logits: torch.Tensor, states: States, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[nodes, n] float32 and int64, the best log-probabilities after each node and their tokens, the best first.

    Args:
        forest_step: The group's forest.
        logits: [nodes, V] of the draft model.
        states: [1, nodes, ...], by constraint.
        number: The layer that is drafted.
    """
    before = SearchBeams(logits[None, :, 0], states=states)  # the scores do not matter
    (logprobs,) = search_logprobs_of_draft(forest_step.rules[number - 1], logits[None], before)
    return torch.topk(logprobs, min(forest_step.budget.draft_width, logprobs.shape[1]), dim=-1)
