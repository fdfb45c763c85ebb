"""The line that the log has of beam groups."""

from __future__ import annotations

from vllm_trie.engine.stats import GroupCounts, GroupStats
from vllm_trie.entrypoints.server.metrics import describe_server_metrics


def test_the_line_speaks_of_speculation_where_there_was_some() -> None:
    counts = GroupCounts(steps=10, target_forwards=5, prefill_forwards=2, drafted=50, accepted=20, beams=35)
    blocks = {"kv_blocks_peak": 9, "kv_blocks_shared": 1, "kv_blocks_copied": 2, "kv_blocks_reclaimed": 3}
    stats = GroupStats(**vars(counts), **blocks, groups_running=1, rows_running=4, preemptions=1)
    assert describe_server_metrics(stats) == (
        "Beam groups running: 1 in 4 rows, finished: 0, steps: 10, per forward pass: 2.67, drafted: 50, "
        "accepted: 20, mean width: 3.50, preemptions: 1, KV blocks shared: 1, copied: 2, reclaimed: 3, peak: 9"
    )
    stats.drafted = 0
    assert "steps: 10, preemptions: 1, KV blocks" in describe_server_metrics(stats)
