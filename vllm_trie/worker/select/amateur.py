"""The draft model's logits for groups that contrast it with the target, see `search.constraints.contrast`.

For these rows it computes the tokens that the target computes, in the same steps: prompts, what is computed again after
a preemption, and the newest token of each beam. Its KV uses the same blocks: it follows forks, and is part of cached
prefixes. vLLM's own drafting leaves these rows out.

That drafting computes all other rows, but only after their next tokens are sampled. So where a row of these groups
finds in the prefix cache what others compute in the same step, these are computed here as well, in one forward pass, as
the target computes all rows. Such others are prompts, and what is computed again: for other rows the draft model has
computed the newest token in the step that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_trie.messages import GroupStep
from vllm_trie.search.devices import uploaded_for_search, uploaded_once_for_search
from vllm_trie.worker.rows.rows import BatchRows, GroupRows
from vllm_trie.worker.rows.sub_batch import sub_batch_of_rows
from vllm_trie.worker.rows.sub_forward import row_metadata_by_layer


class SelectionAmateurLogits(NamedTuple):
    """The draft model's logits for R rows of a batch."""

    logits: torch.Tensor  # [R, V], after the newest token of each
    rows: np.ndarray  # [R], their indices in the batch, ascending

    def of(self, places: np.ndarray) -> torch.Tensor:
        """[..., V] of the rows at these indices of the batch."""
        at = uploaded_once_for_search(np.searchsorted(self.rows, places.ravel()), self.logits.device)
        return self.logits[at].view(*places.shape, -1)


class SelectionAmateur:
    """The draft model of a runner, as the amateur.

    Args:
        runner: vLLM's.
        speculator: The runner's, which has the model.
    """

    def __init__(self, runner: GPUModelRunner, speculator: StandaloneARSpeculator) -> None:
        self._runner = runner
        self._speculator = speculator

    def logits(self, batch: InputBatch, places: np.ndarray, read: np.ndarray) -> SelectionAmateurLogits:
        """Computes tokens, writes their KV, and returns the logits after the last one of each row.

        Args:
            batch: vLLM's, after its forward pass.
            places: [R], the rows' indices in it.
            read: [n], of other rows, whose tokens are computed with them because they read these.
        """
        rows, speculator = np.sort(places), self._speculator
        computed = np.union1d(rows, read) if len(read) else rows
        smaller = sub_batch_of_rows(batch, computed).batch
        metadata, slots = row_metadata_by_layer(self._runner, smaller, speculator.attn_groups)
        hidden = speculator._run_model(smaller.input_ids, smaller.positions, metadata, slots, None)
        last = smaller.logits_indices
        if len(read):
            last = last[uploaded_for_search(smaller.cu_num_logits_np[np.searchsorted(computed, rows)], last.device)]
        return SelectionAmateurLogits(speculator.model.compute_logits(hidden[last]), rows)

    def of_step(
        self, steps: Mapping[str, GroupStep], groups: Mapping[str, GroupRows], rows: BatchRows
    ) -> SelectionAmateurLogits:
        """The logits for a step's groups that contrast; computes what the target has computed of their rows.

        Args:
            steps: Of all groups in this step.
            groups: The runner's.
            rows: The batch's rows.
        """
        group_ids = contrasting_selections(steps, groups)
        places = rows.places(_selection_slots(groups, group_ids))
        read = np.zeros(0, np.int64)
        if any(steps[group_id].has_new_prefix for group_id in group_ids):
            decoding = [group_id for group_id, step in steps.items() if step.decodes]
            left_out = np.concatenate([places, rows.places(_selection_slots(groups, decoding))])
            read = np.setdiff1d(rows.batch.is_prefilling_np.nonzero()[0], left_out)
        return self.logits(rows.batch, places, read)


def contrasting_selections(steps: Mapping[str, GroupStep], groups: Mapping[str, GroupRows]) -> list[str]:
    """The groups of a step that contrast, whose rows the draft model computes."""
    return [group_id for group_id in steps if groups[group_id].rules.contrasts]


def _selection_slots(groups: Mapping[str, GroupRows], group_ids: Sequence[str]) -> np.ndarray:
    """[R], the slots of the rows of groups."""
    return np.concatenate([np.zeros(0, np.int64), *(groups[group_id].slots for group_id in group_ids)])
