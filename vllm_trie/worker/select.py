"""Between forward and sampling: every group's next beams, groups of equal width together."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from vllm_trie.search.ranking import rank_candidates
from vllm_trie.search.step import Step, beam_step, num_candidates
from vllm_trie.worker.rows import BeamRows


def select(rows: BeamRows, logits: torch.Tensor, sampled: torch.Tensor) -> dict[str, Step]:
    """Take one step of every group that has reached the end of its prompt.

    Args:
        rows: The groups; their scores, newest tokens and places in the batch are updated.
        logits: [R, V], one row per row of the batch, unprocessed.
        sampled: [R, 1], receives the newest token of every row of a group.

    Returns:
        What was decided, by group.
    """
    alike = defaultdict(list)
    for group_id, step in rows.steps.items():
        if step.selects:
            alike[step.width, step.decodes, step.stop_token_ids, step.masks_stops].append(group_id)

    decided: dict[str, Step] = {}
    sources, destinations = [], []
    for (width, decodes, stop_token_ids, masks_stops), group_ids in alike.items():
        index = np.stack([rows.indices(group_id) for group_id in group_ids])
        scores = np.stack([rows.groups[group_id].scores for group_id in group_ids])
        candidates = rank_candidates(
            logits[torch.from_numpy(index).to(logits.device)],
            torch.from_numpy(scores).to(logits.device),
            num_candidates(width, len(stop_token_ids)),
            stop_token_ids if masks_stops else (),
        )
        step = beam_step(candidates, width, stop_token_ids)
        for position, group_id in enumerate(group_ids):
            decided[group_id] = one = step.group(position)
            rows.groups[group_id].scores, rows.groups[group_id].tokens = one.scores, one.tokens
        num_rows = index.shape[1]
        newest = torch.from_numpy(step.tokens[:, :num_rows].astype(np.int32)).to(sampled.device)
        sampled[torch.from_numpy(index).to(sampled.device), 0] = newest.to(sampled.dtype)
        if decodes:
            forked = step.parents != np.arange(width)
            sources.append(np.take_along_axis(index, step.parents, axis=1)[forked])
            destinations.append(index[forked])
    if any(map(len, sources)):
        rows.permute(np.concatenate(sources), np.concatenate(destinations))
    return decided
