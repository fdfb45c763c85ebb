"""Groups that find in the prefix cache what is computed in the very step that they begin in.

vLLM enters blocks of a prompt when it schedules the step that fills them, so that others of the same step find them
there. The target computes all rows of a step together. The draft model computes groups that contrast it ahead of the
others: then it must compute these blocks first (`worker.select.amateur`).
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
        steps: Of the groups in it.
        groups: All that are known.
        output: vLLM's, of this step.
        requests: Likewise; of those in this step its tokens count as computed.
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
