"""Between forward and sampling: every group's next beams, groups with equal rules together."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

import numpy as np
import torch

from vllm_trie.messages import Decided
from vllm_trie.search.step import best_of
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.selection import Selection


def select(rows: BeamRows, logits: torch.Tensor, controlled: torch.Tensor, sampled: torch.Tensor) -> dict[str, Decided]:
    """Take one step of every group that has reached the end of its prompt and does not speculate.

    Args:
        rows: The groups; their scores, newest tokens and places in the batch are updated.
        logits: [R, V], one row per row of the batch, unprocessed.
        controlled: The same with penalties, biases and the like applied; `logits` itself if no group has any.
        sampled: [R, ...], receives the newest token of every row of a group.

    Returns:
        What was decided, by group.
    """
    alike = defaultdict(list)
    for group_id, step in rows.steps.items():
        if step.selects and step.grant is None:
            alike[step.rules, step.decodes, group_id if step.rules.law is not None else ""].append(group_id)

    decided: dict[str, Decided] = {}
    sources, destinations = [], []
    for (rules, decodes, _), group_ids in alike.items():
        groups = [rows.groups[group_id] for group_id in group_ids]
        index = rows.indices(group_ids)
        places = torch.from_numpy(index).to(logits.device)
        scores = torch.from_numpy(np.concatenate([group.scores for group in groups]).reshape(index.shape))
        selection = Selection(
            rules,
            scores.to(logits.device),
            partial(_history, rows, group_ids),
            rows.stop_strings(rules.stop_strings, rules.skip_special_tokens) if rules.stop_strings else None,
            [rows.steps[group_id].draw for group_id in group_ids],
        )
        taken = selection.step((controlled if rules.is_controlled else logits)[places])
        for position, (group_id, group) in enumerate(zip(group_ids, groups, strict=True)):
            one = taken.group(position, selection.tops(position))
            one = best_of(one) if rules.law is not None and rules.law.keeps_one else one
            decided[group_id] = Decided([one])
            group.scores, group.tokens = one.scores, one.tokens
        newest = np.stack([decided[group_id].steps[0].tokens[: index.shape[1]] for group_id in group_ids])
        sampled[places, 0] = torch.from_numpy(newest.astype(np.int32)).to(logits.device)
        if decodes and index.shape[1] > 1:
            forked = taken.parents != np.arange(rules.width)
            sources.append(index[np.arange(len(groups))[:, None], taken.parents][forked])
            destinations.append(index[forked])
            if rules.is_controlled:
                rows.copy_output_tokens(sources[-1], destinations[-1])
    if any(map(len, sources)):
        rows.permute(np.concatenate(sources), np.concatenate(destinations))
    return decided


def _history(rows: BeamRows, group_ids: list[str], group: int, row: int) -> tuple[list[int], list[int]]:
    return rows.history(group_ids[group], row)
