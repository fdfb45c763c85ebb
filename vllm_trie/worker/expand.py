"""Expands one entry per group to b rows: the scheduler's message as vLLM's runner must see it, and a step's context.

Row 0 keeps the request's id, the others are `"{id}#{k}"`. To the runner each is a request with its own slot, whose
tokens and blocks are on the device. Only the device knows a group's beams: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_trie.messages import CANNOT_DRAFT, NOT_DRAFTED, DecidedMessage, GroupStep, group_step_messages
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.search.step_result import SearchResultLayout, unpack_search_steps
from vllm_trie.worker.attention.shared_rows import RowTrees
from vllm_trie.worker.rows.row_params import row_params
from vllm_trie.worker.rows.rows import BatchRows, GroupRows


class DraftForest(Protocol):
    """The drafts of one group for one step: a tree in the row of each beam."""

    @property
    def num_layers(self) -> int:
        """Search steps that it may make possible besides the first."""

    def trees(self, rows: BatchRows) -> RowTrees:
        """The trees, for attention, in the batch of these rows."""


class PackedStep(NamedTuple):
    """The decision of a step of groups with equal rules, on the device."""

    group_ids: list[str]
    packed: torch.Tensor  # [G, n] int32
    layout: SearchResultLayout


@dataclass(slots=True)
class RunnerStepContext:
    """One step of the engine, from `execute_model` to `sample_tokens`: everything that one hook passes to another.

    For a step with groups, `decided_at` is the event in the device's stream after which everything is decided.
    """

    steps: dict[str, GroupStep] = field(default_factory=dict)  # of the step's groups, by id
    entered: list[str] = field(default_factory=list)  # groups with new rows: they begin, or fan out
    copied: list[str] = field(default_factory=list)  # of `entered`: whose further rows are copies of the first
    new_tokens_unknown: list[str] = field(default_factory=list)  # of `entered`: newest tokens only the device knows
    left: list[str] = field(default_factory=list)  # further rows of groups that ended or were preempted
    forests: Mapping[str, DraftForest] = field(default_factory=dict)  # of the groups that speculate
    cannot_draft: bool = False  # because of this engine's attention
    narrow: Collection[str] = ()  # groups for whose rows few logits are computed, see `worker.select.narrow`
    masks: dict[str, torch.Tensor] = field(default_factory=dict)  # [rows, V / 32], of groups with a grammar, packed
    selected: list[PackedStep] = field(default_factory=list)  # decided on the device
    decided: dict[str, DecidedMessage] = field(default_factory=dict)  # decided on the host: by forests
    decided_at: Any = None
    # By group that runs with all its rows: by KV cache group, how many first tokens these share.
    num_shared: dict[str, list[int]] = field(default_factory=dict)
    gets_blocks: bool = False  # rows of some of these groups get further blocks

    @property
    def copies_tails(self) -> bool:
        """Whether blocks are copied before the forward pass, for groups that fan out."""
        return any(step.rows is not None for step in self.steps.values())

    @property
    def decoding(self) -> list[str]:
        """Groups that run with all their rows."""
        return [group_id for group_id, step in self.steps.items() if step.decodes]

    @property
    def selecting(self) -> list[str]:
        """Groups whose next beams are selected in this step."""
        return [group_id for group_id, step in self.steps.items() if step.selects]

    @property
    def speculating(self) -> list[str]:
        """Groups that may draft in this step."""
        return [group_id for group_id, step in self.steps.items() if step.budget is not None]

    @property
    def most_steps(self) -> int:
        """The most search steps that any group can take."""
        if not self.forests:
            return 1
        return 1 + max(forest_step.num_layers for forest_step in self.forests.values())

    def results(self, packed: Sequence[np.ndarray]) -> dict[str, DecidedMessage]:
        """Everything that was decided, by group. `packed`: copies of what is on the device."""
        decided = dict(self.decided)
        for selected, on_host in zip(self.selected, packed, strict=True):
            steps = zip(selected.group_ids, unpack_search_steps(on_host, selected.layout), strict=True)
            for group_id, step in steps:
                asked_in_vain = self.cannot_draft and self.steps[group_id].budget is not None
                decided[group_id] = DecidedMessage([step], CANNOT_DRAFT if asked_in_vain else NOT_DRAFTED)
        return decided


def expand(
    output: SchedulerOutput, groups: dict[str, GroupRows], device: torch.device, copies_rows: bool = False
) -> tuple[SchedulerOutput, RunnerStepContext]:
    """The message with b entries per decoding group, and the step's context.

    The original may be shared with the scheduler, and is not changed.

    Args:
        output: The scheduler's, with one entry per group.
        groups: All groups of the runner; adds those that begin and removes those that end.
        device: Where their scores are.
        copies_rows: Rows of a group that fans out may become copies of the first one (see `new_rows`), unless vLLM
            counts or masks tokens for each.
    """
    steps = group_step_messages(output)
    context = RunnerStepContext(steps, decided_at=torch.cuda.Event())  # type: ignore[no-untyped-call]
    for group_id in groups.keys() & (output.finished_req_ids | (output.preempted_req_ids or set())):
        context.left += groups.pop(group_id).row_ids[1:]
    new_requests = []
    for request in output.scheduled_new_reqs:
        if request.req_id in steps:
            request = replace(request, sampling_params=row_params(request.sampling_params))
            zeros, search = torch.zeros(1, 1, device=device), steps[request.req_id].search
            assert search is not None
            groups[request.req_id] = GroupRows(request, search, [request.req_id], SearchBeams(zeros), zeros[0].long())
            context.entered.append(request.req_id)
        new_requests.append(request)

    cached = output.scheduled_cached_reqs
    fields = zip(cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    entries = dict(zip(cached.req_ids, fields, strict=True))
    num_scheduled: dict[str, int] = {}
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        num_scheduled[request_id] = num_tokens
        step = steps.get(request_id)
        if step is None:
            continue
        group = groups[request_id]
        if step.phase != group.phase:
            group.phase, group.rules = step.phase, group.search.in_phase(step.phase)
        if not step.decodes:
            continue
        context.gets_blocks |= step.rows is not None or step.new_blocks is not None
        if step.num_shared:
            context.num_shared[request_id] = step.num_shared
        _, num_computed, num_output = entries[request_id]
        if step.rows is not None:
            del entries[request_id]  # its rows are new requests
            context.entered.append(request_id)
            if step.resumed is None:
                context.new_tokens_unknown.append(request_id)
            num_rows = len(step.rows.tables[0])
            if copies_rows and num_rows > 1 and not group.rules.is_controlled:
                context.copied.append(request_id)
                num_rows = 1
            new_requests += _expand_first_beams(group, step, num_rows, num_computed, device)
        else:
            entries |= dict.fromkeys(group.row_ids, (None, num_computed, num_output))
        num_scheduled |= dict.fromkeys(group.row_ids[1:], num_tokens)

    expanded = replace(
        output,
        scheduled_new_reqs=new_requests,
        scheduled_cached_reqs=replace(
            cached,
            req_ids=[*entries],
            new_block_ids=[of_row for of_row, _, _ in entries.values()],
            num_computed_tokens=[num_computed for _, num_computed, _ in entries.values()],
            num_output_tokens=[num_output for _, _, num_output in entries.values()],
        ),
        num_scheduled_tokens=num_scheduled,
        total_num_scheduled_tokens=sum(num_scheduled.values()),
        scheduled_spec_decode_tokens=dict(output.scheduled_spec_decode_tokens),
    )
    return expanded, context


def _expand_first_beams(
    group: GroupRows, step: GroupStep, num_requests: int, num_computed_tokens: int, device: torch.device
) -> list[NewRequestData]:
    """The first beams as requests, including the group's first row again; records what is known of all beams."""
    assert step.rows is not None
    first_id, num_rows = group.request.req_id, len(step.rows.tables[0])
    group.row_ids = [first_id, *(f"{first_id}#{row}" for row in range(1, num_rows))]
    group.num_drafted, group.roots = num_computed_tokens, None
    histories: list[list[int]] = [[]] * num_rows
    if step.resumed is not None:
        histories = step.resumed.histories[:num_requests].tolist()
        known = [of_rows for of_rows in (step.resumed.scores, step.resumed.rank_scores) if of_rows is not None]
        group.beams = SearchBeams(*uploaded_for_search(np.stack(known).astype(np.float32), device)[:, None])
        group.tokens = uploaded_for_search(step.resumed.histories[:, -1].astype(np.int64), device)
    # All of the prompt is computed, including its embeddings.
    request = replace(
        group.request,
        num_computed_tokens=num_computed_tokens,
        prompt_token_ids=group.prompt,
        prompt_embeds=None,
        prompt_is_token_ids=None,
    )
    blocks = zip(*(table[:num_requests].tolist() for table in step.rows.tables), strict=True)
    return [
        replace(request, req_id=row_id, prefill_token_ids=group.prompt + history, block_ids=of_row)
        for row_id, of_row, history in zip(group.row_ids, blocks, histories, strict=False)
    ]
