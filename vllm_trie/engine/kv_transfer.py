"""KV connectors in an engine with beam groups: what they see of a group, and what happens to it when a load fails.

To a connector, a group is a request that computes its prompt, is then no longer scheduled, and ends as a request that
holds its prompt. After a preemption it computes, with its prompt, what all its beams have in common. The rows of beams
belong to no request: a connector neither saves nor awaits them, but is told which blocks they write.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.engine.prefix_publishing import GroupPrefixCache
from vllm_trie.messages import FORK


class GroupKVTransfers(Scheduler):
    """The part of `BeamScheduler` that deals with KV connectors."""

    kv_cache_manager: BeamKVCacheManager

    def _begin_groups(self, answers: GroupPrefixCache) -> None:
        """Set up the state of groups. With a connector, blocks are freed late, and those that rows take are recorded.

        Args:
            answers: Enters the best hypotheses into the prefix cache.
        """
        self.groups: dict[str, BeamGroup] = {}  # by the request that stands for the group
        self._failed: dict[str, str] = {}  # group id -> why it cannot go on
        self._answers = answers
        if self.connector is not None:
            self.kv_cache_manager.record_taken_blocks()
            self.kv_cache_manager.free_written = self._free_written

    def _free_written(self, request: Request, blocks: list[KVCacheBlock]) -> None:
        """Free blocks of a request, in this order: at once, or once no running step may write them."""
        if self._request_blocks_can_be_freed(request):
            self.kv_cache_manager.block_pool.free_blocks(blocks)
        elif blocks:
            self.deferred_frees.append((self.sched_step_seq, blocks[::-1]))

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: SchedulerOutput, **kwargs: Any) -> Any:
        running = (request.request_id for request in self.running)
        searching = {id_ for id_ in running if self.kv_cache_manager.has_fanned_out(id_)}
        taken, shown = self.kv_cache_manager.pop_taken_blocks(), scheduler_output
        # In engines that draft, vLLM pads the tokens of groups; the padding is not computed.
        padding = {id_: len(ids) for id_, ids in shown.scheduled_spec_decode_tokens.items() if id_ in self.groups}
        if searching or taken or padding:
            shown = _without_group_rows(shown, searching, taken, padding)
        metadata = super()._build_kv_connector_meta(connector, shown, **kwargs)
        scheduler_output.new_block_ids_to_zero = shown.new_block_ids_to_zero  # the one field that connectors may set
        return metadata

    def _connector_finished(self, request: Request, **kwargs: Any) -> Any:
        if self.connector is None:
            return False, None
        if request.request_id in self.groups:
            self._end_as_prompt(request)
        keeps_blocks, params = super()._connector_finished(request, **kwargs)
        if keeps_blocks and (extra_args := request.sampling_params and request.sampling_params.extra_args):
            # Blocks freed late could be held for a candidate that has already gone on, and then forever.
            request.sampling_params.extra_args = {key: value for key, value in extra_args.items() if key != FORK}
        return keeps_blocks, params

    def _end_as_prompt(self, request: Request) -> None:
        """Turn a group that ends into a request that has computed its prompt and generated nothing."""
        if self.kv_cache_manager.has_fanned_out(request.request_id):
            self._free_written(request, self.kv_cache_manager.leave_prompt(request))
        rewrite_group_request(request, [])
        self._answers.rehash(request)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)

    # Loads that fail.

    def _handle_failed_recving(self, failed_req_ids: set[str], **kwargs: Any) -> set[str]:
        return self._fail_loading_groups(super()._handle_failed_recving(failed_req_ids, **kwargs))

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> set[str]:
        return self._fail_loading_groups(super()._handle_invalid_blocks(*args, **kwargs))

    def _fail_loading_groups(self, request_ids: set[str]) -> set[str]:
        """Record why the groups among these requests, whose loads have failed, end."""
        if not self.recompute_kv_load_failures:
            name = self.vllm_config.kv_transfer_config.kv_connector
            for group_id in self.groups.keys() & request_ids:
                self._failed[group_id] = (
                    f"{name} could not load the KV of its prompt; send it again, or start the engine with "
                    "kv_load_failure_policy='recompute' in kv_transfer_config"
                )
        return request_ids

    def _update_requests_with_invalid_blocks(
        self,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int],
        evict_blocks: bool = True,
        **kwargs: Any,
    ) -> tuple[set[str], int, set[int]]:
        requests = list(requests)
        # Groups that wait for a load are like other requests: nothing was computed from what failed.
        computing = [request for request in requests if evict_blocks and request.request_id in self.groups]
        others = [request for request in requests if request not in computing]
        affected, num_tokens, blocks = super()._update_requests_with_invalid_blocks(
            others, invalid_block_ids, num_scheduled_tokens, evict_blocks, **kwargs
        )
        for request in computing:
            held = self.kv_cache_manager.block_ids_of(request.request_id)
            if held.isdisjoint(invalid_block_ids):
                continue
            affected.add(request.request_id)
            num_tokens += request.num_computed_tokens
            blocks |= held
            if self.recompute_kv_load_failures:
                self._compute_group_again(request, held)
        return affected, num_tokens, blocks

    def _compute_group_again(self, request: Request, held: set[int]) -> None:
        """Preempt a running group whose load failed, so that it computes all its KV; none of its steps was replayed."""
        self.kv_cache_manager.evict_blocks(held)
        request.skip_reading_prefix_cache = True  # also keeps vLLM from asking the connector again
        self.running.remove(request)
        self._preempt_request(request, time.monotonic(), drop_stale_output=True)

    # Waiting for a connector.

    def _forget_who_was_held_back(self) -> None:
        """Before a step: remove groups from `deferred_waiting`, which is to hold those held back in this step only."""
        self.deferred_waiting -= {request for request in self.deferred_waiting if request.request_id in self.groups}

    def _waits_for_connector(self, request: Request) -> bool:
        """Whether a request that gets no blocks now may get some later, or was held back in this step."""
        if self.connector is None:
            return False
        num_running, num_waiting = self.get_request_counts()
        is_sending = len(self.requests) > num_running + num_waiting
        return is_sending or bool(self.deferred_frees) or request in self.deferred_waiting


def rewrite_group_request(request: Request, generated: list[int]) -> None:
    """Set the tokens that vLLM considers generated by a request."""
    request._output_token_ids[:] = generated
    request._all_token_ids[request.num_prompt_tokens :] = generated


def is_group_session(request: Request) -> bool:
    """Whether a waiting request with KV blocks keeps its row, as a streaming session does between inputs."""
    return request.resumable and request.status != RequestStatus.WAITING_FOR_REMOTE_KVS


def _without_group_rows(
    output: SchedulerOutput, searching: set[str], taken: list[int], padding: dict[str, int]
) -> SchedulerOutput:
    """A step as a connector sees it.

    Args:
        output: Of the scheduler.
        searching: Groups that have fanned out: they are left out.
        taken: Blocks that rows have taken and will write. They are shown as destinations of copies, as a connector may
            still be reading them for their previous owner.
        padding: Scheduled tokens of groups that are not computed.
    """
    counts = output.num_scheduled_tokens
    scheduled = {id_: count - padding.get(id_, 0) for id_, count in counts.items() if id_ not in searching}
    drafts = output.scheduled_spec_decode_tokens
    state = output.kv_connector_block_state
    written = [KVCacheBlockCopy(block_id, block_id) for block_id in taken]
    return replace(
        output,
        scheduled_cached_reqs=_without_groups(output.scheduled_cached_reqs, searching),
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_spec_decode_tokens={id_: ids for id_, ids in drafts.items() if id_ not in padding},
        kv_cache_block_copies=[*(output.kv_cache_block_copies or ()), *written] or None,
        kv_connector_block_state=replace(state, req_ids=state.req_ids - searching),
    )


def _without_groups(cached: CachedRequestData, searching: set[str]) -> CachedRequestData:
    places = [place for place, request_id in enumerate(cached.req_ids) if request_id not in searching]
    return replace(
        cached,
        req_ids=[cached.req_ids[place] for place in places],
        new_block_ids=[cached.new_block_ids[place] for place in places],
        num_computed_tokens=[cached.num_computed_tokens[place] for place in places],
        num_output_tokens=[cached.num_output_tokens[place] for place in places],
    )
