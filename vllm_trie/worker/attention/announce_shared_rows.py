"""Tells attention, before it prepares for a batch, which of its rows share blocks."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.attention.shared_rows import SharedRows, SharesPrefixes
from vllm_trie.worker.group_rows import BatchRows, GroupRows
from vllm_trie.worker.step_context import StepContext


def announce_shared_rows(
    runner: GPUModelRunner, context: StepContext, groups: Mapping[str, GroupRows], batch: InputBatch
) -> None:
    """Hand the rows of all decoding groups, those of forests included, to the builders of the target model's layers."""
    decoding = context.decoding
    if not decoding:
        return
    rows = BatchRows(batch, runner.max_num_reqs)
    places = {group_id: rows.places((context.forests.get(group_id) or groups[group_id]).slots) for group_id in decoding}
    for number, attn_groups in enumerate(runner.attn_groups):
        sharing = [
            SharedRows(places[group_id], shared[number])
            for group_id in decoding
            if (shared := context.steps[group_id].num_shared) is not None
        ]
        for attn_group in attn_groups:
            builder = attn_group.get_metadata_builder(0)
            if isinstance(builder, SharesPrefixes):
                builder.groups = [rows for rows in sharing if builder.takes(len(rows.places), rows.num_shared)]


def reads_shared_blocks_once(runner: GPUModelRunner, context: StepContext, groups: Mapping[str, GroupRows]) -> bool:
    """Whether any layer will do that in this step, known before there is a batch."""
    for group_id in context.decoding:
        rows = (context.forests.get(group_id) or groups[group_id]).slots
        if (shared := context.steps[group_id].num_shared) is None:
            continue
        for attn_groups, num_shared in zip(runner.attn_groups, shared, strict=True):
            for attn_group in attn_groups:
                builder = attn_group.get_metadata_builder(0)
                if isinstance(builder, SharesPrefixes) and builder.takes(len(rows), num_shared):
                    return True
    return False
