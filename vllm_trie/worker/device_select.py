"""Between forward and sampling on the V2 runner: every group's next beams, groups with equal rules together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_trie.messages import Decided, SelectRules
from vllm_trie.search.pruning import Pruning
from vllm_trie.search.step import best_of
from vllm_trie.worker.device_step import take_step, unpacked
from vllm_trie.worker.forks import Forks
from vllm_trie.worker.selection import Selection
from vllm_trie.worker.slots import BeamSlots


class InBatch(NamedTuple):
    """Where the rows of groups are in the present batch, and how many tokens they hold."""

    place: dict[str, int]  # by row id: its one row of the logits
    num_tokens: dict[str, int]  # by row id, this step's included


class Selected(NamedTuple):
    """What a step decided of all groups."""

    on_host: dict[str, Decided]  # by group
    on_device: list[tuple[list[str], torch.Tensor]]  # groups, and their `DeviceStep.packed`

    def decided(self, packed: Sequence[np.ndarray]) -> dict[str, Decided]:
        """All of it, by group. `packed`: copies of what is on the device."""
        decided = dict(self.on_host)
        for (group_ids, _), copied in zip(self.on_device, packed, strict=True):
            steps = unpacked(copied)
            decided |= {group_id: Decided([steps.group(at)]) for at, group_id in enumerate(group_ids)}
        return decided


def select(
    rows: BeamSlots, batch: InBatch, logits: torch.Tensor, controlled: torch.Tensor, sampled: torch.Tensor
) -> Selected:
    """Take one step of every group that has reached the end of its prompt.

    Args:
        rows: The groups; their scores, newest tokens and slots are updated.
        batch: Where their rows are.
        logits: [R, V], one row per row of the batch, unprocessed.
        controlled: The same with penalties, biases and the like applied.
        sampled: [R, ...], receives the newest token of every row of a group.
    """
    alike = defaultdict(list)
    for group_id, step in rows.steps.items():
        if step.selects:
            alike[step.rules, step.decodes, group_id if step.rules.law is not None else ""].append(group_id)

    selected, forks = Selected({}, []), Forks()
    for (rules, decodes, _), group_ids in alike.items():
        groups = [rows.groups[group_id] for group_id in group_ids]
        index = np.array([[batch.place[row_id] for row_id in group.row_ids] for group in groups])
        places = async_tensor_h2d(index, device=logits.device, dtype=torch.int64)
        scores = torch.stack([group.scores for group in groups])
        processed = controlled if rules.is_controlled else logits
        if logits.is_cuda and is_for_device(rules):  # on a CPU the host's ranking is quicker
            stop_token_ids = async_tensor_h2d(list(rules.stop_token_ids), device=logits.device, dtype=torch.int64)
            taken = take_step(rules, processed, places, scores, stop_token_ids)
            selected.on_device.append((group_ids, taken.packed))
            parents, tokens, scores = taken.parents, taken.tokens, taken.scores
        else:
            decided = _decide_on_host(rows, rules, group_ids, processed[places], scores)
            selected.on_host.update(zip(group_ids, decided, strict=True))
            steps = [of_group.steps[0] for of_group in decided]
            parents, tokens, scores = (
                torch.from_numpy(np.stack(fields)).to(logits.device)
                for fields in zip(*((step.parents, step.tokens, step.scores) for step in steps), strict=True)
            )
        for group, of_tokens, of_scores in zip(groups, tokens.long(), scores, strict=True):
            group.tokens, group.scores = of_tokens, of_scores
        sampled[places] = tokens[:, : index.shape[1]].to(sampled.dtype)
        if decodes and index.shape[1] > 1:
            forks.add(
                np.array([rows.slot_ids_of(group_id) for group_id in group_ids]),
                parents,
                [len(group.request.prompt_token_ids or ()) for group in groups],
                [batch.num_tokens[group_id] for group_id in group_ids],
                rules.is_controlled,
            )
    rows.permute(forks)
    return selected


def is_for_device(rules: SelectRules) -> bool:
    """Whether a step by these rules needs nothing that only the host has, such as text, or its random numbers."""
    return (
        rules.semantics == "hf"
        and not (rules.stop_strings or rules.samples)
        and rules.num_logprobs is None
        and rules.law is None
        and rules.pruning == Pruning()
    )


def _decide_on_host(
    rows: BeamSlots, rules: SelectRules, group_ids: list[str], logits: torch.Tensor, scores: torch.Tensor
) -> list[Decided]:
    """The same where the device must be waited for."""
    selection = Selection(
        rules,
        scores,
        partial(_history, rows, group_ids),
        rows.stop_strings(rules.stop_strings, rules.skip_special_tokens) if rules.stop_strings else None,
        [rows.steps[group_id].draw for group_id in group_ids],
    )
    taken = selection.step(logits)
    steps = [taken.group(position, selection.tops(position)) for position in range(len(group_ids))]
    return [Decided([best_of(step) if rules.law is not None and rules.law.keeps_one else step]) for step in steps]


def _history(rows: BeamSlots, group_ids: list[str], group: int, row: int) -> tuple[list[int], list[int]]:
    return rows.history(group_ids[group], row)
