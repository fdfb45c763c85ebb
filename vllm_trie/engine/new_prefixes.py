"""Finds groups whose cached prefix is computed in the same step as their first tokens.

vLLM caches blocks of a prompt when it schedules the step that fills them, so other requests of this step may find them.
The target model computes all rows of a step together. But the draft model computes groups that contrast with it before
the others, so it must compute these blocks first (`worker.select.amateur`).
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.messages import GroupStep


def mark_new_group_prefixes(
    steps: Mapping[str, GroupStep],
    groups: Mapping[str, BeamGroup],
    output: SchedulerOutput,
    requests: Mapping[str, Request],
    kv_cache_manager: BeamKVCacheManager,
) -> None:
    """Mark the steps of groups that contrast and read blocks which others fill in this step.

    Args:
        steps: Of the groups in this step, by request id.
        groups: All groups, by request id.
        output: vLLM's output for this step.
        requests: All requests, by id; the tokens of this step count as computed.
        kv_cache_manager: Knows their blocks.
    """
    contrasting = {group_id for group_id in steps if groups[group_id].plan.search.contrasts}
    begin = [new for new in output.scheduled_new_reqs if new.req_id in contrasting and new.num_computed_tokens]
    if not begin:
        return
    filled = set[int]()
    for request_id in output.num_scheduled_tokens.keys() - contrasting:
        end = requests[request_id].num_computed_tokens
        filled.update(kv_cache_manager.full_blocks(request_id, end - output.num_scheduled_tokens[request_id], end))
    for new in begin:
        found = kv_cache_manager.full_blocks(new.req_id, 0, new.num_computed_tokens)
        steps[new.req_id].has_new_prefix = not filled.isdisjoint(found)
