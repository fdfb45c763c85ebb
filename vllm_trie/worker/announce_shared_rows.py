"""Announces to attention, before it prepares for a batch, which of its rows share blocks; called by the runner."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.worker.attention.shared_rows import SHARES_BLOCKS, SharedRows, SharesAttentionPrefixes
from vllm_trie.worker.rows.rows import BatchRows, GroupRows
from vllm_trie.worker.step_context import RunnerStepContext


def announce_shared_rows(
    runner: GPUModelRunner,
    context: RunnerStepContext,
    groups: Mapping[str, GroupRows],
    batch: InputBatch,
    num_decoding: int,
) -> None:
    """Announces the rows of all decoding groups, and their trees, to the target's attention metadata builders.

    Args:
        runner: vLLM's.
        context: The step.
        groups: All groups.
        batch: The step's batch.
        num_decoding: See `SharesAttentionPrefixes.takes`.
    """
    if not (shared := context.num_shared):
        return
    rows = BatchRows(batch, runner.max_num_reqs)
    places = {group_id: rows.places(groups[group_id].slots) for group_id in shared}
    trees = {group_id: forest_step.trees(rows) for group_id, forest_step in context.forests.items()}
    for number, builder in builders_of_runner(runner):
        sharing = [SharedRows(places[id_], num[number], trees.get(id_)) for id_, num in shared.items()]
        takes = builder.takes([(len(rows.places), rows.num_shared) for rows in sharing], num_decoding)
        builder.announce([rows for rows, takes_it in zip(sharing, takes, strict=True) if rows.trees or takes_it])


def runner_reads_shared_blocks_once(
    runner: GPUModelRunner, sharing: Collection[tuple[int, list[int]]], num_decoding: int
) -> tuple[bool, int | None]:
    """Whether any layer will read shared blocks once in this step, known before there is a batch; and by which graphs.

    Args:
        runner: vLLM's.
        sharing: Of each decoding group: its rows, and by KV cache group how many first tokens they share.
        num_decoding: See `SharesAttentionPrefixes.takes`.

    Returns:
        Also the stand-in for vLLM's number of tokens per row: `SHARES_BLOCKS` or, without full graphs, None.
    """
    builders = [*builders_of_runner(runner)] if sharing else []
    takes_any = any(
        any(builder.takes([(num_rows, counts[number]) for num_rows, counts in sharing], num_decoding))
        for number, builder in builders
    )
    in_graphs = (takes_any and num_decoding > 0) and all(
        builder.holds_in_graphs(sum(counts[number] > 0 for _, counts in sharing)) for number, builder in builders
    )
    return takes_any, SHARES_BLOCKS if in_graphs else None


def builders_of_runner(runner: GPUModelRunner) -> Iterator[tuple[int, SharesAttentionPrefixes]]:
    """The builders that can share reads, each with its KV cache group's number."""
    for number, attn_groups in enumerate(runner.attn_groups):
        for attn_group in attn_groups:
            if isinstance(builder := attn_group.get_metadata_builder(0), SharesAttentionPrefixes):
                yield number, builder
