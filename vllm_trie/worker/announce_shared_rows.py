"""Tells attention, before it prepares for a batch, which of its rows share blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.attention.shared_rows import SharedRows, SharesPrefixes
from vllm_trie.worker.rows.group_rows import BatchRows, GroupRows
from vllm_trie.worker.step_context import StepContext


def announce_shared_rows(
    runner: GPUModelRunner, context: StepContext, groups: Mapping[str, GroupRows], batch: InputBatch
) -> None:
    """Hand the rows of all decoding groups, and their trees, to the builders of the target model's layers."""
    if not context.decoding:
        return
    rows = BatchRows(batch, runner.max_num_reqs)
    places = {group_id: rows.places(groups[group_id].slots) for group_id in context.decoding}
    trees = {group_id: forest_step.trees(rows) for group_id, forest_step in context.forests.items()}
    for builder, shared in _builders(runner, context):
        sharing = [SharedRows(places[group_id], num, trees.get(group_id)) for group_id, num in shared.items()]
        takes = builder.takes([(len(rows.places), rows.num_shared) for rows in sharing])
        builder.announce([rows for rows, takes_it in zip(sharing, takes, strict=True) if rows.trees or takes_it])


def reads_shared_blocks_once(runner: GPUModelRunner, context: StepContext, groups: Mapping[str, GroupRows]) -> bool:
    """Whether any layer will do that in this step, known before there is a batch."""
    return any(
        any(builder.takes([(len(groups[group_id].slots), num_shared) for group_id, num_shared in shared.items()]))
        for builder, shared in _builders(runner, context)
    )


def _builders(runner: GPUModelRunner, context: StepContext) -> Iterator[tuple[SharesPrefixes, dict[str, int]]]:
    """Those that may make use of it, with the number of first tokens that the rows of each decoding group share."""
    shared = {key: step.num_shared for key, step in context.steps.items() if step.decodes and step.num_shared}
    for number, attn_groups in enumerate(runner.attn_groups if shared else ()):
        of_tables = {group_id: counts[number] for group_id, counts in shared.items()}
        for attn_group in attn_groups:
            if isinstance(builder := attn_group.get_metadata_builder(0), SharesPrefixes):
                yield builder, of_tables
