"""What an engine counts of its beam groups, and how that reaches the front end."""

from __future__ import annotations

from dataclasses import fields

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_trie.engine.catalogs import CatalogCounts
from vllm_trie.engine.stats import GroupCounts, GroupStats, GroupTally, attach_group_stats, take_group_stats
from vllm_trie.trie.blocks import TrieBlockCounts


@pytest.mark.parametrize(
    ("steps", "forwards", "prefill_forwards", "per_forward"),
    [(0, 0, 0, 1.0), (2, 2, 2, 1.0), (5, 5, 1, 1.0), (32, 11, 1, 3.1)],
)
def test_steps_per_forward_leave_prompts_out(
    steps: int, forwards: int, prefill_forwards: int, per_forward: float
) -> None:
    assert GroupCounts(steps, forwards, prefill_forwards).steps_per_forward == per_forward


def test_stats_survive_the_way_to_another_process_and_do_not_reach_vllms_loggers() -> None:
    numbers = [field.name for field in fields(GroupStats) if field.name != "groups_finished"]
    finished = {"stop": 1, "length": 2, "abort": 0, "error": 0}
    stats = GroupStats(**{name: 40 + i for i, name in enumerate(numbers)}, groups_finished=finished)
    carrier = SchedulerStats(num_running_reqs=2)
    attach_group_stats(carrier, stats)
    message = MsgpackEncoder().encode(EngineCoreOutputs(engine_index=1, scheduler_stats=carrier))
    arrived = MsgpackDecoder(EngineCoreOutputs).decode(message).scheduler_stats
    assert take_group_stats(arrived) == stats
    assert arrived == SchedulerStats(num_running_reqs=2)
    assert take_group_stats(arrived) is None


def test_stats_share_their_carrier_with_those_of_a_kv_connector() -> None:
    carrier = SchedulerStats(kv_connector_stats={"transfers": 3})
    attach_group_stats(carrier, GroupStats(steps=4))
    assert take_group_stats(carrier) == GroupStats(steps=4)
    assert carrier.kv_connector_stats == {"transfers": 3}
    assert take_group_stats(carrier) is None
    assert carrier.kv_connector_stats == {"transfers": 3}


def test_each_report_begins_where_the_last_one_ended() -> None:
    tally = GroupTally()
    tally.stats.add(GroupCounts(steps=3, target_forwards=2, prefill_forwards=1, drafted=9, accepted=4, beams=12))
    tally.stats.preemptions = 1
    tally.finish("stop")
    first = tally.report([4, 2], TrieBlockCounts(10, 20, 30), 50, CatalogCounts(7, 70, 1))
    finished = {"stop": 1, "length": 0, "abort": 0, "error": 0}
    assert first == GroupStats(
        **{"steps": 3, "target_forwards": 2, "prefill_forwards": 1, "drafted": 9, "accepted": 4, "beams": 12},
        **{"kv_blocks_shared": 10, "kv_blocks_copied": 20, "kv_blocks_reclaimed": 30, "kv_blocks_peak": 50},
        **{"groups_running": 2, "rows_running": 6, "preemptions": 1, "groups_finished": finished},
        **{"catalog_items": 7, "catalog_bytes": 70, "catalog_loads": 1},
    )
    assert not tally.has_news
    second = {"kv_blocks_shared": 1, "kv_blocks_copied": 2, "kv_blocks_reclaimed": 3, "kv_blocks_peak": 50}
    second |= {"catalog_items": 8, "catalog_bytes": 80, "catalog_loads": 2}
    assert tally.report([4], TrieBlockCounts(11, 22, 33), 50, CatalogCounts(8, 80, 3)) == GroupStats(
        groups_running=-1, rows_running=-2, **second
    )
