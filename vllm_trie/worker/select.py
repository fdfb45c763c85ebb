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
        groups = [rows.groups[group_id] for group_id in group_ids]
        index = rows.indices(group_ids)
        places = torch.from_numpy(index).to(logits.device)
        scores = torch.from_numpy(np.concatenate([group.scores for group in groups]).reshape(index.shape))
        candidates = rank_candidates(
            logits[places],
            scores.to(logits.device),
            num_candidates(width, len(stop_token_ids)),
            stop_token_ids if masks_stops else (),
        )
        taken = beam_step(candidates, width, stop_token_ids)
        for position, (group_id, group) in enumerate(zip(group_ids, groups, strict=True)):
            decided[group_id] = one = taken.group(position)
            group.scores, group.tokens = one.scores, one.tokens
        newest = taken.tokens[:, : index.shape[1]].astype(np.int32)
        sampled[places, 0] = torch.from_numpy(newest).to(logits.device)
        if decodes:
            forked = taken.parents != np.arange(width)
            sources.append(index[np.arange(len(groups))[:, None], taken.parents][forked])
            destinations.append(index[forked])
    if any(map(len, sources)):
        rows.permute(np.concatenate(sources), np.concatenate(destinations))
    return decided
