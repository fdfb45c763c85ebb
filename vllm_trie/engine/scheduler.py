"""vLLM's scheduler with beam groups: a group is one request here, and b rows in the worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_trie.compat.at_rest import RestsWithoutBeams
from vllm_trie.compat.fingerprint import vllm_steps_to_check
from vllm_trie.compat.patch import VLLMPatch, wrap_vllm
from vllm_trie.engine.answer_prefix import AnswerChangedError
from vllm_trie.engine.catalogs import EngineCatalogs
from vllm_trie.engine.grammar import GrammarError, fill_group_grammar_masks, why_no_group_grammar
from vllm_trie.engine.group import BeamGroup
from vllm_trie.engine.known_caches import refuse_engine_kv_cache
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.engine.kv_transfer import GroupKVTransfers, is_group_session, rewrite_group_request
from vllm_trie.engine.new_group import is_group_request_unchecked, new_group
from vllm_trie.engine.new_prefixes import mark_new_group_prefixes
from vllm_trie.engine.outputs import (
    EngineOutbox,
    add_engine_answer,
    engine_answer_output,
    engine_error_output,
    engine_part_output,
    take_engine_output,
    take_group_prefill_stats,
)
from vllm_trie.engine.prefix_publishing import GroupPrefixCache
from vllm_trie.engine.speculation import DraftingCandidate, SchedulerBudgets
from vllm_trie.engine.stats import GroupTally, attach_group_stats
from vllm_trie.messages import (
    NOT_DRAFTED,
    DecidedMessage,
    GroupStep,
    GroupTicketMessage,
    attach_group_messages,
    attach_mask_message,
    group_result_messages,
    group_step_messages,
)
from vllm_trie.options import BeamParams
from vllm_trie.speculative_config import load_speculation_class, speculative_config_drafts
from vllm_trie.supported_engines import engine_has_logits_processors, plugin_config_of

logger = init_logger("vllm.trie_beam.scheduler")

NO_ADMISSION = -1
BUDGETS = "engine.speculation_budget:SpeculationBudgets"
ONE_ROW = np.zeros(1, np.int32)  # parents in a group of one row
UNCHECKED = (
    "its front end does not load the plugin, which checks beam requests; vLLM's Rust front end loads no plugins: unset "
    "VLLM_USE_RUST_FRONTEND"
)


@dataclass
class _StepState:
    """State of the scheduler that is reset in each step."""

    sessions: list[Request] = field(default_factory=list)  # sessions that waited at its beginning: they keep their rows
    held_back: list[Request] = field(default_factory=list)  # requests without rows or without room for their tables
    brings: bool = False  # a group with tables for the devices may have been admitted
    lacks_room: bool = False  # a group was held back as its tables did not fit
    last_preempted: Request | None = None
    has_released: bool = False  # held blocks were released: the next step tells the worker
    results: dict[str, DecidedMessage] = field(default_factory=dict)
    over: list[tuple[Request, BeamGroup]] = field(default_factory=list)


class BeamScheduler(GroupKVTransfers, RestsWithoutBeams, Scheduler):
    """Schedules beam groups among ordinary requests.

    To vLLM a group computes as many tokens as one of its rows, so vLLM's accounting stays correct. The token budget of
    the other rows is set aside before vLLM's loop runs, and admission counts rows. The scheduler rests once nothing of
    groups is left to schedule, send or report, until a group arrives.
    """

    hooks = (
        *("has_requests", "schedule", "get_grammar_bitmask", "_handle_blocked_waiting_request"),
        *("update_from_output", "_update_request_with_output"),
    )
    kv_cache_manager: BeamKVCacheManager
    max_num_active_reqs: int
    _is_async: ClassVar = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with VLLMPatch("vllm.v1.core.sched.scheduler", "KVCacheManager").applied(BeamKVCacheManager):
            super().__init__(*args, **kwargs)
        config, speculative = plugin_config_of(self.vllm_config), self.vllm_config.speculative_config
        refuse_engine_kv_cache(self.kv_cache_config, self.mamba_partial_cache_hit)
        self._steps_to_check = math.inf if config.check_invariants else vllm_steps_to_check(config.vllm_check)
        self._budgets: SchedulerBudgets | None = None
        if speculative is not None:
            self._budgets = load_speculation_class(BUDGETS)(speculative, self.kv_cache_manager)
        self.kv_cache_manager.reclaim_interval = config.reclaim_interval
        self.kv_cache_manager.num_lookahead_tokens = self.num_lookahead_tokens
        self.outbox = EngineOutbox()
        has_draft_kv = speculative_config_drafts(self.vllm_config) == "model"
        self._begin_groups(GroupPrefixCache(self.kv_cache_manager, has_draft_kv))
        self.tally = GroupTally()
        self.catalogs = EngineCatalogs(config.catalogs, config.request_tables_bytes, config.exclude)
        wrap_vllm("vllm_trie.engine.catalogs")
        wrap_vllm("vllm_trie.engine.core_step")
        self._now = _StepState()

    # Requests come and go.

    def add_request(self, request: Request, **kwargs: Any) -> None:
        ticket = GroupTicketMessage.of(request.sampling_params)
        if request.request_id in self.requests:  # further input of an ordinary streaming session
            super().add_request(request, **kwargs)
        elif ticket is not None:
            self.wake()
            self._open_group(request, BeamParams.model_construct(**ticket.options), ticket)
        elif is_group_request_unchecked(request):
            self.wake()
            logger.error("Beam request %s was refused: %s", request.request_id, UNCHECKED)
            self.outbox.post(request, engine_error_output(UNCHECKED))
        else:
            super().add_request(request, **kwargs)

    def _open_group(self, request: Request, params: BeamParams, ticket: GroupTicketMessage) -> None:
        catalog = self.catalogs.use(params, ticket)
        ticket = ticket.without_items(request.sampling_params)
        has_processors = engine_has_logits_processors(self.vllm_config)
        group = new_group(request, params, ticket, self.max_model_len, has_processors, catalog)
        if self._budgets is not None:
            group.forests = self._budgets.forests(params, group.plan.width)
        needed = self.kv_cache_manager.announce(request, group.paths_to_fan_out())
        usable, refusal = self.kv_cache_manager.num_usable_blocks, None
        if group.num_rows > self.max_num_running_reqs:
            refusal = f"exceeds max_num_seqs={self.max_num_running_reqs}; lower it, or raise --max-num-seqs"
        elif needed > usable:
            refusal = (
                f"with a prompt of {request.num_prompt_tokens} tokens needs {needed} KV blocks to start and the engine "
                f"has {usable}; lower it or give the KV cache more memory"
            )
        elif catalog.refusal is not None:
            refusal = catalog.refusal
        elif not self.catalogs.has_room(group.plan.brings):
            refusal = (
                f"has more excluded items or tables than fit in request_tables_bytes={self.catalogs.room:,} of each "
                "device; leave some out, or raise request_tables_bytes"
            )
        if refusal is not None:
            reason = f"{ticket.caller.width}={params.beam_width} {refusal}"
            logger.error("Beam group %s was refused: %s", request.request_id, reason)
            self._forget(group, "error")
            self.outbox.post(request, engine_error_output(reason))
            return
        self._answers.open(request)
        self.groups[request.request_id] = group
        super().add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus, **kwargs: Any
    ) -> list[Request]:
        keys, is_abort, answered = None, finished_status == RequestStatus.FINISHED_ABORTED, set[str]()
        asking: Iterable[str] = self.groups  # for what was found so far: all, or ids that are given twice
        if request_ids is not None:
            counts = Counter([request_ids] if isinstance(request_ids, str) else request_ids)
            keys, asking = list(counts), [request_id for request_id, count in counts.items() if count > 1]
        if is_abort:
            answered = self.groups.keys() & asking
            for group_id in answered:
                self._answer_aborted(self.requests[group_id], self.groups[group_id])
        elif finished_status == RequestStatus.FINISHED_ERROR:
            answered = self._failed.keys() & (keys or ())
            for group_id in answered:
                logger.error("Beam group %s ended: %s", group_id, self._failed[group_id])
                error = engine_error_output(self._failed[group_id])
                self._post_end(self.requests[group_id], self.groups[group_id], error)
        finished = super().finish_requests(keys, finished_status, **kwargs)
        if held := self.kv_cache_manager.held:  # held under keys that are aborted like request ids
            self.wake()
            self._now.has_released |= bool(held.release(keys) if keys is not None else held.release_all())
        for request in finished:
            if request.request_id in self.groups:
                self._close_group(request.request_id, "abort" if is_abort else "error")
        return [request for request in finished if request.request_id not in answered]  # the caller answers these

    def _answer_aborted(self, request: Request, group: BeamGroup) -> None:
        """Send what a group has found in the steps that were replayed."""
        plan = group.plan
        best = group.best_so_far(plan.num_hypotheses)
        rest = group.unsent_so_far(best)
        output = engine_answer_output(rest, plan.num_outputs, plan.eos_token_id, is_aborted=True)
        add_engine_answer(output, group, best, self.kv_cache_manager.token_block_size, is_aborted=True)
        self._post_end(request, group, output)

    def _post_end(self, request: Request, group: BeamGroup, output: EngineCoreOutput) -> None:
        """Send the last output of a group that does not end with a step."""
        if group.counts.target_forwards:  # its prompt was computed
            num_cached_tokens = self.kv_cache_manager.estimate_cached_tokens(request)
            output.prefill_stats = take_group_prefill_stats(request, num_cached_tokens)
        self.outbox.post(request, output)

    def _close_group(self, group_id: str, reason: str) -> None:
        self._forget(self.groups.pop(group_id), reason)
        self._failed.pop(group_id, None)

    def _forget(self, group: BeamGroup, reason: str) -> None:
        self.tally.finish(reason)
        self.kv_cache_manager.close_group(group.plan.request_id)
        group.plan.catalog.release()

    def has_requests(self, **kwargs: Any) -> bool:
        return super().has_requests(**kwargs) or bool(self.outbox) or self._now.has_released

    # One step: schedule.

    def schedule(self, throttle_prefills: bool = False, **kwargs: Any) -> SchedulerOutput:
        self._now = _StepState(sessions=[*filter(is_group_session, self.kv_holding_waiting)])
        if self.connector is not None:
            self._forget_who_was_held_back()
        budget_of_other_rows, admission_limit = self._plan_rows(), self.max_num_active_reqs
        self.max_num_scheduled_tokens -= budget_of_other_rows
        try:
            output = super().schedule(throttle_prefills, **kwargs)
        finally:
            self.max_num_scheduled_tokens += budget_of_other_rows
            self.max_num_active_reqs = admission_limit
            self.deferred_waiting.difference_update(self._now.held_back)
        if not (output.num_scheduled_tokens or self.running):
            self._give_up_on_a_group_that_starves_alone()
        if output.scheduled_spec_decode_tokens:
            self._drop_padding(output)
        if self._now.brings:
            self.catalogs.load(self._brought())
        steps = self._group_steps(output)
        if self._budgets is not None:
            num_tokens = self._num_tokens(output, steps)
            spare_tokens = self.max_num_scheduled_tokens - num_tokens
            num_rows = self._num_decoding_rows() if self._is_async else 0
            self._budgets.share_out([*self._growing(output, steps)], output, num_tokens, spare_tokens, num_rows)
        for group_id, step in steps.items():
            self.groups[group_id].num_pending += step.selects
            if self._is_async:
                _expect_pending_steps(self.requests[group_id], self.groups[group_id])
        has_changes = self.catalogs.changes is not None
        if steps or has_changes:
            attach_group_messages(output, steps, self.catalogs.take_changes() if has_changes else None)
        if self._steps_to_check > 0:
            self.check_invariants()
            num_rows, num_tokens = self._num_rows(), self._num_tokens(output, steps)
            assert num_rows <= self.max_num_running_reqs, f"{num_rows} rows in one step"
            assert num_tokens <= self.max_num_scheduled_tokens, f"{num_tokens} tokens in one step"
        return output

    def _drop_padding(self, output: SchedulerOutput) -> None:
        """Remove vLLM's padding of requests with cached prompts to the length of verified drafts from groups."""
        for group_id in output.scheduled_spec_decode_tokens.keys() & self.groups.keys():
            num_padding = len(output.scheduled_spec_decode_tokens.pop(group_id))
            output.num_scheduled_tokens[group_id] -= num_padding
            output.total_num_scheduled_tokens -= num_padding
            self.requests[group_id].num_computed_tokens -= num_padding
            self.requests[group_id].num_in_flight_tokens -= num_padding

    def _num_tokens(self, output: SchedulerOutput, steps: dict[str, GroupStep]) -> int:
        """The most tokens that the worker computes in this step."""
        num_tokens = output.total_num_scheduled_tokens
        for group_id, step in steps.items():
            if step.decodes:
                num_tokens += output.num_scheduled_tokens[group_id] * (self.groups[group_id].num_rows - 1)
            if step.budget is not None:
                num_tokens += step.budget.max_drafts
        return num_tokens

    def _growing(self, output: SchedulerOutput, steps: dict[str, GroupStep]) -> Iterator[DraftingCandidate]:
        """The groups whose rows compute one token each; after a preemption they compute more."""
        for group_id, step in steps.items():
            if step.decodes and step.selects and output.num_scheduled_tokens[group_id] == 1:
                yield DraftingCandidate(self.groups[group_id], self.requests[group_id], step)

    def _plan_rows(self) -> int:
        """Show vLLM's loop how many tokens a row of each group computes. Returns the token budget of all other rows.

        That is one token per row, except after a preemption: then rows recompute their histories, as many tokens at a
        time as the budget leaves after requests that run before them.
        """
        others = 0
        if not self.groups:
            return others
        # With pipeline stages, vLLM skips requests whose turn it is not; it counts this step only later.
        spare, running = self.max_num_scheduled_tokens, list[tuple[Request, BeamGroup | None]]()
        for request in self.running:
            group = self.groups.get(request.request_id)
            if group is not None:  # it has forests in place of vLLM's drafts
                request.spec_token_ids = []
            if request.next_decode_eligible_step <= self.current_step + 1:
                running.append((request, group))
                spare -= 1 if group is None else group.num_rows
        most = self.scheduler_config.long_prefill_token_threshold or self.max_num_scheduled_tokens
        for request, group in running:
            known = request.num_tokens_with_spec - request.num_computed_tokens
            if group is None or request.num_computed_tokens < request.num_prompt_tokens + group.num_common:
                spare -= min(max(min(known, most) - 1, 0), spare)
                continue
            if group.waits:  # it is not scheduled
                continue
            done = request.num_computed_tokens - request.num_prompt_tokens
            planned = min(group.planned_length - done, most, 1 + spare // group.num_rows)
            if request.num_output_tokens + group.num_pending != done + planned:
                rewrite_group_request(request, group.history(0)[: done + planned])
            spare -= (planned - 1) * group.num_rows
            others += planned * (group.num_rows - 1)
        return others

    def _group_steps(self, output: SchedulerOutput) -> dict[str, GroupStep]:
        steps = {}
        for group_id in output.num_scheduled_tokens:
            if (group := self.groups.get(group_id)) is None:
                continue
            request = self.requests[group_id]
            selects = request.num_computed_tokens == request.num_prompt_tokens + group.planned_length
            step = GroupStep(
                group.next_phase(), selects, sampling_key=group.next_sampling_key(), is_traced=group.traced is not None
            )
            if update := self.kv_cache_manager.take_update(group_id):
                step.decodes, step.rows, step.new_blocks = True, update.rows, update.new_blocks
                step.num_shared = update.num_shared
                if update.rows is not None:
                    step.resumed, step.excludes = group.resumed(), group.plan.catalog.excludes
            steps[group_id] = step
        for new in output.scheduled_new_reqs:  # new ones, and those resumed after a preemption
            if new.req_id in steps:
                plan, step = self.groups[new.req_id].plan, steps[new.req_id]
                step.search, step.excludes = plan.search, plan.catalog.excludes
        if self._budgets is not None:
            mark_new_group_prefixes(steps, self.groups, output, self.requests, self.kv_cache_manager)
        return steps

    def _rows(self, request: Request) -> int:
        group = self.groups.get(request.request_id)
        return group.num_rows if group is not None else 1

    def _num_rows(self) -> int:
        """Rows of the worker's batch that are occupied while a step is scheduled."""
        return sum(map(self._rows, self.running)) + self._num_sessions()

    def _num_decoding_rows(self) -> int:
        """Rows of ordinary requests, and of groups that have fanned out."""
        counted = (
            request
            for request in self.running
            if request.request_id not in self.groups or self.kv_cache_manager.has_fanned_out(request.request_id)
        )
        return sum(map(self._rows, counted))

    def _num_sessions(self) -> int:
        """Streaming sessions that are still waiting."""
        return sum(request.status != RequestStatus.RUNNING for request in self._now.sessions)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput, **kwargs: Any) -> GrammarOutput | None:
        if not scheduler_output.has_structured_output_requests:
            return super().get_grammar_bitmask(scheduler_output, **kwargs)
        steps = group_step_messages(scheduler_output)
        groups = ((group_id, self.groups.get(group_id)) for group_id in steps)
        matchers = {id_: group.matchers for id_, group in groups if group and group.matchers is not None}
        if not matchers:
            return super().get_grammar_bitmask(scheduler_output, **kwargs)
        others = {id_: n for id_, n in scheduler_output.num_scheduled_tokens.items() if id_ not in matchers}
        output = super().get_grammar_bitmask(replace(scheduler_output, num_scheduled_tokens=others), **kwargs)
        selecting = {id_: matchers for id_, matchers in matchers.items() if steps[id_].selects}
        if not selecting:
            return output
        assert all(self.groups[group_id].num_pending == 1 for group_id in selecting), "masks of a step not yet known"
        backend = self.structured_output_manager.backend
        assert backend is not None
        masks = fill_group_grammar_masks(backend, selecting)
        output = output or GrammarOutput([], masks.bits[:0], [])
        attach_mask_message(output, masks)
        return output

    def _handle_blocked_waiting_request(self, request: Request, **kwargs: Any) -> bool:
        grammar = request.structured_output_request if request.request_id in self.groups else None
        if grammar is not None:
            if (compiled := grammar.grammar) is None:  # not compiled yet
                return False
            if (why := why_no_group_grammar(compiled)) is not None:
                self._failed[request.request_id] = why
                return False
        group = self.groups.get(request.request_id)
        if group is not None and group.plan.brings and self._now.lacks_room:
            self._now.held_back.append(request)
            return False
        is_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        if is_loading and request.request_id not in self.finished_recving_kv_req_ids:
            return False
        needed = 0 if request in self._now.sessions else self._rows(request)
        if not self.groups or self._num_rows() + needed <= self.max_num_running_reqs:
            is_ready = super()._handle_blocked_waiting_request(request, **kwargs)
            return is_ready and (group is None or self._has_room_for(request, group))
        if self._num_sessions() + needed <= self.max_num_running_reqs:  # else others need not wait until clients leave
            # No rows are left: a limit that all requests exceed ends this step's admission; the queue keeps its order.
            self.max_num_active_reqs = NO_ADMISSION
        self._now.held_back.append(request)
        return False

    def _has_room_for(self, request: Request, group: BeamGroup) -> bool:
        """Whether the tables of a group fit on the devices together with those of running groups.

        If not, it waits, and so do later groups with tables, which could otherwise overtake it forever. Others go on.
        """
        if not group.plan.brings:
            return True
        if self.catalogs.has_room({**self._brought(), **group.plan.brings}):
            self._now.brings = True
            return True
        self._now.lacks_room = True
        self._now.held_back.append(request)
        return False

    def _brought(self) -> dict[Hashable, int]:
        """The tables of running groups on the devices: bytes by key."""
        groups = (self.groups.get(request.request_id) for request in self.running)
        return {key: size for group in groups if group is not None for key, size in group.plan.brings.items()}

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        if not self.is_at_rest:
            self._now.last_preempted = request
        group = self.groups.get(request.request_id)
        if group is None:
            return
        self.tally.stats.preemptions += 1
        if request.drop_stale_output:
            group.num_pending = 0
        if not group.num_pending:
            self._plan_to_resume(request, group)

    def _plan_to_resume(self, request: Request, group: BeamGroup) -> None:
        """Plan what a preempted group recomputes, once all its results are in."""
        group.preempt()
        prefix_length = request.num_prompt_tokens + group.num_common
        if not self.kv_cache_manager.can_resume(prefix_length, request.num_prompt_tokens + group.length):
            group.restart()
        rewrite_group_request(request, group.history(0)[: group.num_common])
        self._answers.rehash(request)
        needed = self.kv_cache_manager.announce(request, group.paths_to_fan_out())
        if needed > self.kv_cache_manager.num_usable_blocks:
            self._fail(group, needed)

    def _give_up_on_a_group_that_starves_alone(self) -> None:
        """End a group that cannot grow or start although nothing else runs: it would wait forever."""
        if self.kv_holding_waiting or not self.waiting:
            return
        if self.pause_state != PauseState.UNPAUSED or self.num_waiting_for_streaming_input:
            return
        # By priority, others may be first in the queue.
        request = self._now.last_preempted or self.waiting.peek_request()
        if request.num_stale_output_tokens or request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return
        if self._waits_for_connector(request):
            return
        group = self.groups.get(request.request_id)
        if group is not None and not group.num_pending and request.request_id not in self._failed:
            self._fail(group, self.kv_cache_manager.num_usable_blocks + 1)

    def _fail(self, group: BeamGroup, needed: int) -> None:
        group_id, width = group.plan.request_id, group.plan.params.beam_width
        what, usable = group.plan.caller.width, self.kv_cache_manager.num_usable_blocks
        self._failed[group_id] = (
            f"{what}={width} needs at least {needed} KV blocks after {group.length} tokens and the "
            f"engine has {usable}; lower it or max_tokens, or give the KV cache more memory"
        )

    def _fail_groups_of_other_images(self) -> None:
        """End groups with a UUID of other multimodal data with a reason, which vLLM would not give."""
        for group_id in self.groups.keys() & self.encoder_cache_mismatch_reqs:
            self.encoder_cache_mismatch_reqs.remove(group_id)
            what = self.groups[group_id].plan.caller.feature
            self._failed[group_id] = (
                f"{what}: one of multi_modal_uuids already belongs to other data; give each its own"
            )

    # One step: results.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput, **kwargs: Any
    ) -> dict[int, EngineCoreOutputs]:
        self._now.results = group_result_messages(model_runner_output)
        if self.encoder_cache_mismatch_reqs:
            self._fail_groups_of_other_images()
        if self._budgets is not None and scheduler_output.num_scheduled_tokens:
            self._budgets.finished(self._now.results.values())
        outputs = super().update_from_output(scheduler_output, model_runner_output, **kwargs)
        for request, group in self._now.over:
            self._end_group(request, group, outputs)
        self._now.over.clear()
        if self._failed:
            self.finish_requests([*self._failed], RequestStatus.FINISHED_ERROR)
        if self.outbox:
            self.outbox.empty_into(outputs, lists_finished=self.finished_req_ids_dict is not None)
        if self.log_stats and (self.groups or self.tally.has_news or self.catalogs.has_news):
            self._report(outputs)
        if self._steps_to_check > 0:
            self.check_invariants()
            self._steps_to_check -= bool(self._now.results)
        if not (self.groups or self._now.has_released or self.catalogs.changes or self._budgets):
            self.rest()
        return outputs

    def rest(self) -> None:
        self._now = _StepState()
        super().rest()
        if not self.kv_cache_manager.held:
            self.kv_cache_manager.rest()

    def _report(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        statistics = next((output.scheduler_stats for output in outputs.values() if output.scheduler_stats), None)
        if statistics is None:  # vLLM keeps none
            return
        running, manager = (request.request_id for request in self.running), self.kv_cache_manager
        widths = [self.groups[id_].num_rows for id_ in running if id_ in self.groups]
        blocks, peak, catalogs = manager.total_counts(), manager.peak_group_blocks, self.catalogs.counts()
        attach_group_stats(statistics, self.tally.report(widths, blocks, peak, catalogs))

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False, **kwargs: Any
    ) -> tuple[list[int], bool]:
        group = self.groups.get(request.request_id)
        if group is None:
            return super()._update_request_with_output(request, new_token_ids, is_stale, **kwargs)
        is_over = False
        if (decided := self._now.results.get(request.request_id)) is not None:  # else it computed known tokens
            is_over = self._replay(request, group, decided, is_stale)
        if self._is_async:
            _expect_pending_steps(request, group)
        return [], is_over

    def _replay(self, request: Request, group: BeamGroup, decided: DecidedMessage, is_stale: bool) -> bool:
        """Apply the worker's decisions to the tries. Returns whether the search is over.

        Args:
            request: Stands for the group in vLLM's scheduler.
            group: The group.
            decided: The steps of its search.
            is_stale: The group was preempted since; its rows are gone.
        """
        length, was_decoding = group.length, group.length > 0
        num_tokens = request.num_prompt_tokens + length  # tokens of each row, all computed
        group.num_pending -= 1
        if self._budgets is not None and (decided.drafted.is_forest or group.plan.search.contrasts):
            group.forests.drafted_length = length
        if group.traced and decided.drafted.forest:
            group.traced.add_forest(decided.drafted.forest)
        over, forks = False, []
        for step in decided.steps:
            try:
                over = group.advance(step)
            except GrammarError as error:
                self._failed[request.request_id] = str(error)
            forks.append(ONE_ROW if group.num_rows == 1 else step.parents)  # a single row does not fork
            # vLLM only counts these tokens, so any row's will do.
            request.append_output_token_ids(int(step.tokens[0]))
            if over:  # drop further steps: the worker does not know the pool
                break
        if not is_stale:  # otherwise its KV is gone
            request.num_computed_tokens += len(forks) - 1
        if self._budgets is not None and decided.drafted != NOT_DRAFTED and not over:
            self._budgets.learn(group, decided.drafted, len(forks))
        group.count_forward(decided, len(forks), not was_decoding, self.tally.stats)
        if group.stream is not None and not over and request.request_id not in self._failed:
            self._send_part(request, group)
        if was_decoding and not is_stale and group.best_end.length >= length:
            self._answers.enter(request, group, decided.steps, length)
        if over:
            ended_by_stops = group.num_steps_left > 0  # otherwise a connector hands over the prompt
            request.status = RequestStatus.FINISHED_STOPPED if ended_by_stops else RequestStatus.FINISHED_LENGTH_CAPPED
            self._now.over.append((request, group))
        elif is_stale:
            if not group.num_pending:
                self._plan_to_resume(request, group)
        elif was_decoding:
            self.kv_cache_manager.replay_forks(request.request_id, forks, num_tokens)
            if group.traced:
                group.traced.add_blocks(*self.kv_cache_manager.count_blocks(request.request_id))
        return over

    def _send_part(self, request: Request, group: BeamGroup) -> None:
        """Stream the next tokens of the answer, if any are certain."""
        try:
            part = group.next_part()
        except AnswerChangedError as error:
            self._failed[request.request_id] = str(error)
            return
        if part is not None:
            num_cached_tokens = self.kv_cache_manager.estimate_cached_tokens(request)
            self.outbox.post(request, engine_part_output(part, request, num_cached_tokens))

    def _end_group(self, request: Request, group: BeamGroup, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Replace vLLM's empty output for the group's request by one with the group's hypotheses."""
        group_id, plan = request.request_id, group.plan
        stock, reason = take_engine_output(group_id, outputs), "stop" if group.num_steps_left else "length"
        best = group.best(plan.num_hypotheses)
        try:
            output = engine_answer_output(group.unsent(best), plan.num_outputs, plan.eos_token_id)
        except AnswerChangedError as error:
            output, reason = engine_error_output(str(error)), "error"
        else:
            add_engine_answer(output, group, best, self.kv_cache_manager.token_block_size)
        output.events, output.prefill_stats = stock.events, stock.prefill_stats
        if stock.kv_transfer_params:
            output.kv_transfer_params = {**stock.kv_transfer_params, **(output.kv_transfer_params or {})}
        self.outbox.post(request, output)
        self._close_group(group_id, reason)

    def check_invariants(self) -> None:
        """Raise AssertionError unless tries, pool and vLLM's accounting agree."""
        self.kv_cache_manager.check_invariants()
        self.catalogs.check_invariants(self._brought())
        for group_id, group in self.groups.items():
            group.check_invariants()
            request = self.requests[group_id]
            assert request.num_output_tokens <= group.length, f"{request.num_output_tokens} > {group.length} tokens"
        num_sessions = sum(map(is_group_session, self.kv_holding_waiting))
        assert sum(map(self._rows, self.running)) + num_sessions <= self.max_num_running_reqs


class AsyncBeamScheduler(BeamScheduler, AsyncScheduler):
    """`BeamScheduler` that schedules the next step before the result of the last one is known.

    The parents chosen in a step are not needed to schedule the next: every step makes each row one token longer, and
    rows get new blocks whatever history they continue. The worker forks its rows itself, and the scheduler replays the
    forks on its tries one step later. vLLM counts tokens in flight as placeholders of a request; for a group these are
    its pending steps. A group that speculates waits for its result, while others go on: without placeholders it has
    nothing to compute.
    """

    _is_async = True


def _expect_pending_steps(request: Request, group: BeamGroup) -> None:
    """Set the pending steps of a group as its placeholders, by which vLLM counts tokens in flight."""
    is_running = request.status == RequestStatus.RUNNING
    request.num_output_placeholders = group.num_pending if is_running and not group.waits else 0
