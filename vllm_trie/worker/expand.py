"""Expands one entry per group to b rows: the scheduler's message as vLLM's runner must see it.

Row 0 keeps the request's id, the others are `"{id}#{k}"`. To the runner each is a request with its own slot, whose
tokens and blocks are on the device. Only the device knows a group's beams: nothing here waits for it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from vllm_trie.messages import GroupStep, group_step_messages
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import uploaded_for_search
from vllm_trie.worker.rows.row_params import row_params
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.step_context import RunnerStepContext


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
