"""Beam groups as slots of vLLM's V2 runner: expand a group's one entry into b requests, and permute their slots.

Row 0 keeps the request's id, the others are `"{id}#{k}"`. To the stock runner each is a request with a slot of
its own, whose tokens and blocks lie on the device. What beams a group has, only the device knows: nothing here
waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep, Resumed, RowBlocks, group_steps
from vllm_trie.search.stop_strings import CONTEXT
from vllm_trie.worker.forks import Forks, RowForks, Tables, permute
from vllm_trie.worker.kv_blocks import KVBlocks
from vllm_trie.worker.row_options import row_params, stop_strings_of


@dataclass(slots=True)
class GroupSlots:
    """The rows of one group."""

    request: NewRequestData  # as vLLM sent it
    row_ids: list[str]
    scores: torch.Tensor  # [rows] float32 on the device, cumulative log-probability
    tokens: torch.Tensor  # [b] int64 on the device, newest token of each beam


class BeamSlots:
    """The rows of all groups in one runner's slots."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self.groups: dict[str, GroupSlots] = {}
        self.steps: dict[str, GroupStep] = {}  # of the present step
        self._widened: list[str] = []  # in the present step, without a history that the host knows
        self.stop_strings = stop_strings_of(runner.model_config)

    def clear_step(self) -> None:
        """Nothing is selected in this step."""
        self.steps, self._widened = {}, []

    def expand(self, output: SchedulerOutput) -> SchedulerOutput:
        """The scheduler's message as the stock runner must see it, with b entries per decoding group.

        The original may be shared with the scheduler; it is not changed.
        """
        self.steps, self._widened = group_steps(output), []
        if not self.steps and not self.groups:
            return output
        finished = self._with_their_rows(output.finished_req_ids)
        preempted = self._with_their_rows(output.preempted_req_ids or set())
        new_requests = []
        for request in output.scheduled_new_reqs:
            if request.req_id in self.steps:
                request = replace(request, sampling_params=row_params(request.sampling_params))
                zeros = torch.zeros(1, device=self._runner.device)
                self.groups[request.req_id] = GroupSlots(request, [request.req_id], zeros, zeros.long())
            new_requests.append(request)

        cached = output.scheduled_cached_reqs
        position = {request_id: i for i, request_id in enumerate(cached.req_ids)}
        request_ids, new_block_ids = list(cached.req_ids), list(cached.new_block_ids)
        num_computed, num_output = list(cached.num_computed_tokens), list(cached.num_output_tokens)
        num_scheduled: dict[str, int] = {}
        widening = set()
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            num_scheduled[request_id] = num_tokens
            step = self.steps.get(request_id)
            if step is None or not step.decodes:
                continue
            group, at = self.groups[request_id], position[request_id]
            if step.rows is not None:
                widening.add(at)
                new_requests += self._widen(group, step.rows, step.resumed, num_computed[at])
            else:
                new_block_ids[at] = None if step.new_blocks is None else step.new_blocks[0]
                for row, row_id in enumerate(group.row_ids[1:], start=1):
                    request_ids.append(row_id)
                    new_block_ids.append(None if step.new_blocks is None else step.new_blocks[row])
                    num_computed.append(num_computed[at])
                    num_output.append(num_output[at])
            num_scheduled |= dict.fromkeys(group.row_ids[1:], num_tokens)

        staying = [i for i in range(len(request_ids)) if i not in widening]
        return replace(
            output,
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request_ids[i] for i in staying],
                resumed_req_ids=cached.resumed_req_ids,
                new_token_ids=cached.new_token_ids,
                all_token_ids=cached.all_token_ids,
                new_block_ids=[new_block_ids[i] for i in staying],
                num_computed_tokens=[num_computed[i] for i in staying],
                num_output_tokens=[num_output[i] for i in staying],
            ),
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            finished_req_ids=finished,
            preempted_req_ids=preempted,
        )

    def _with_their_rows(self, request_ids: set[str]) -> set[str]:
        """These requests that leave, and all rows of those that are groups."""
        leaving = set(request_ids)
        for group_id in request_ids & self.groups.keys():
            leaving.update(self.groups.pop(group_id).row_ids)
        return leaving

    def _widen(
        self, group: GroupSlots, rows: list[RowBlocks], resumed: Resumed | None, num_computed_tokens: int
    ) -> list[NewRequestData]:
        """A request per beam, its first row anew among them."""
        first_id, prompt = group.request.req_id, group.request.prompt_token_ids
        assert prompt is not None
        group.row_ids = [first_id, *(f"{first_id}#{row}" for row in range(1, len(rows)))]
        if resumed is None:
            self._widened.append(first_id)
            histories: list[list[int]] = [[] for _ in rows]
        else:
            histories = resumed.histories
            group.scores = async_tensor_h2d(resumed.scores, device=self._runner.device, dtype=torch.float32)
        return [
            replace(
                group.request,
                req_id=row_id,
                prefill_token_ids=prompt + history,
                block_ids=blocks,
                num_computed_tokens=num_computed_tokens,
            )
            for row_id, blocks, history in zip(group.row_ids, rows, histories, strict=True)
        ]

    def write_first_tokens(self) -> None:
        """After the stock runner has taken in new rows: what the device alone knows of them, their first token."""
        states, sampler = self._runner.req_states, self._runner.sampler
        if self._runner.speculator is not None:
            self._hide_what_lies_behind()
        for group_id in self._widened:
            group = self.groups[group_id]
            slots, at = self.slots_of(group_id), len(group.request.prompt_token_ids or ())
            states.last_sampled_tokens[slots, 0] = group.tokens
            states.all_token_ids.gpu[slots, at] = group.tokens.int()
            states.total_len.gpu[slots] = at + 1
            if self.steps[group_id].rules.is_controlled:
                assert sampler is not None
                sampler.penalties_state.output_bin_counts[slots, group.tokens] += 1

    def _hide_what_lies_behind(self) -> None:
        """vLLM's drafter drafts for rows of the batch, asked or not, and writes behind what they hold.

        Let that be the null block, as the rows have no block there.
        """
        for group_id, step in self.steps.items():
            if step.rows is not None:
                for table in self._runner.block_tables.block_tables:
                    table.gpu[self.slots_of(group_id)] = 0

    def slots_of(self, group_id: str) -> torch.Tensor:
        """[rows] int64 on the device: the slots of a group's rows."""
        return async_tensor_h2d(self.slot_ids_of(group_id), device=self._runner.device, dtype=torch.int64)

    def slot_ids_of(self, group_id: str) -> list[int]:
        """The same for the host."""
        return [self._runner.req_states.req_id_to_index[row_id] for row_id in self.groups[group_id].row_ids]

    def history(self, group_id: str, row: int) -> tuple[list[int], list[int]]:
        """The last few tokens of the prompt, and what the row has generated before this step. Waits for the device."""
        states, group = self._runner.req_states, self.groups[group_id]
        slot = states.req_id_to_index[group.row_ids[row]]
        prompt = group.request.prompt_token_ids or []
        generated = states.all_token_ids.gpu[slot, len(prompt) : int(states.total_len.gpu[slot])]
        return prompt[-CONTEXT:], generated.tolist()

    def permute(self, forks: Forks) -> None:
        """Let each row continue the history of its source: its tokens, its full blocks, and its tail's content."""
        if not forks.slots:
            return
        runner, rows = self._runner, forks.rows()
        on_device = RowForks(
            async_tensor_h2d(rows, device=runner.device, dtype=torch.int64), torch.cat(forks.parents), rows[3]
        )
        permute(on_device, runner.req_states.all_token_ids.gpu, self.tables, self.kv_blocks)
        if any(forks.counts_tokens):
            assert runner.sampler is not None
            counts = runner.sampler.penalties_state.output_bin_counts
            counts[on_device.slots] = counts[on_device.sources]

    @cached_property
    def tables(self) -> Tables:
        """The runner's block tables."""
        tables = self._runner.block_tables
        return Tables.of([table.gpu for table in tables.block_tables], tables.block_sizes)

    @cached_property
    def kv_blocks(self) -> KVBlocks:
        """The runner's KV caches."""
        return KVBlocks(self._runner.kv_caches, self._runner.kv_cache_config.num_blocks)
