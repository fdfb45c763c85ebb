"""Beam groups as rows of vLLM's batch: expand a group's one entry into b rows, and permute them.

Row 0 keeps the request's id, the others are `"{id}#{k}"`. Within a step vLLM's runner treats them as
ordinary requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_trie.messages import GroupStep, Resumed, RowBlocks, group_steps
from vllm_trie.search.stop_strings import CONTEXT
from vllm_trie.worker.kv_blocks import KVBlocks
from vllm_trie.worker.row_options import row_params, stop_strings_of


@dataclass(slots=True)
class GroupRows:
    """The rows of one group."""

    row_ids: list[str]
    scores: np.ndarray  # [rows] float32, cumulative log-probability
    tokens: np.ndarray  # [b] newest token of each beam
    num_drafted: int = 0  # tokens of each row that the draft model has computed, if there is one
    spare_ids: list[str] = field(default_factory=list)  # of rows that last one step


class BeamRows:
    """The rows of all groups in one runner's batch."""

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self.stop_strings = stop_strings_of(runner.model_config)
        self.groups: dict[str, GroupRows] = {}
        self.steps: dict[str, GroupStep] = {}  # of the present step

    # From one entry to b rows.

    def expand(self, output: SchedulerOutput) -> SchedulerOutput:
        """The scheduler's message as the stock runner must see it, with b entries per decoding group.

        The original may be shared with the scheduler; it is not changed.
        """
        self.steps = group_steps(output)
        if not self.steps and not self.groups:
            return output
        finished = set(output.finished_req_ids)
        for group in self.groups.values():
            finished.update(group.spare_ids)
            group.spare_ids.clear()
        for group_id in output.finished_req_ids & self.groups.keys():
            finished.update(self.groups.pop(group_id).row_ids)
        for group_id in self.groups.keys() - self.steps.keys():
            self._settle(self.groups[group_id])

        cached = output.scheduled_cached_reqs
        position = {request_id: i for i, request_id in enumerate(cached.req_ids)}
        request_ids, new_block_ids = list(cached.req_ids), list(cached.new_block_ids)
        num_computed, num_output = list(cached.num_computed_tokens), list(cached.num_output_tokens)
        num_scheduled: dict[str, int] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            num_scheduled[request_id] = num_tokens
            step = self.steps.get(request_id)
            if step is None:
                continue
            if not step.decodes:
                if request_id in self.groups:  # preempted
                    finished.update(self.groups[request_id].row_ids[1:])
                if step.settled is not None:
                    self._runner.requests[request_id].output_token_ids[:] = step.settled
                self.groups[request_id] = GroupRows([request_id], np.zeros(1, np.float32), np.zeros(1, np.int64))
                continue
            group, at = self.groups[request_id], position[request_id]
            if step.rows is not None:
                self._widen(group, step.rows, step.resumed)
            num_output[at] = len(self._runner.requests[request_id].output_token_ids)
            new_block_ids[at] = None if step.new_blocks is None else step.new_blocks[0]
            for row, row_id in enumerate(group.row_ids[1:], start=1):
                request_ids.append(row_id)
                new_block_ids.append(None if step.new_blocks is None else step.new_blocks[row])
                num_computed.append(num_computed[at])
                num_output.append(num_output[at])
                num_scheduled[row_id] = num_tokens

        new_requests = [
            replace(new, sampling_params=row_params(new.sampling_params)) if new.req_id in self.steps else new
            for new in output.scheduled_new_reqs
        ]
        return replace(
            output,
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=CachedRequestData(
                req_ids=request_ids,
                resumed_req_ids=cached.resumed_req_ids,
                new_token_ids=cached.new_token_ids,
                all_token_ids=cached.all_token_ids,
                new_block_ids=new_block_ids,
                num_computed_tokens=num_computed,
                num_output_tokens=num_output,
            ),
            num_scheduled_tokens=num_scheduled,
            total_num_scheduled_tokens=sum(num_scheduled.values()),
            finished_req_ids=finished,
        )

    def _widen(self, group: GroupRows, rows: list[RowBlocks], resumed: Resumed | None) -> None:
        """Give vLLM's runner a request per beam; it takes them into its batch as if they had been there all along."""
        requests = self._runner.requests
        (first_id,) = group.row_ids
        first = requests[first_id]
        self._runner.input_batch.remove_request(first_id)
        if resumed is not None:
            histories = resumed.histories
            group.scores = np.array(resumed.scores, dtype=np.float32)
            group.tokens = np.array([history[-1] for history in histories])
        else:
            histories = [[token] for token in group.tokens.tolist()]
        group.row_ids = [first_id, *(f"{first_id}#{row}" for row in range(1, len(rows)))]
        group.num_drafted = first.num_computed_tokens
        for row_id, blocks, history in zip(group.row_ids, rows, histories, strict=True):
            requests[row_id] = CachedRequestState(
                req_id=row_id,
                prompt_token_ids=first.prompt_token_ids,
                mm_features=[],
                sampling_params=first.sampling_params,
                generator=None,
                block_ids=blocks,
                num_computed_tokens=first.num_computed_tokens,
                output_token_ids=history,
                lora_request=first.lora_request,
            )

    def _settle(self, group: GroupRows) -> None:
        """Before rows leave the batch: write what only the batch knows into vLLM's per-request state.

        `permute` moves histories within the batch's arrays alone, which is all that a row in the
        batch needs.
        """
        batch, requests = self._runner.input_batch, self._runner.requests
        for row_id in group.row_ids:
            index = batch.req_id_to_index.get(row_id)
            if index is None:
                continue
            state = requests[row_id]
            history = slice(state.num_prompt_tokens, state.num_tokens)
            state.output_token_ids[:] = batch.token_ids_cpu[index, history].tolist()
            for block_ids, table in zip(state.block_ids, batch.block_table.block_tables, strict=True):
                block_ids[:] = table.block_table.np[index, : table.num_blocks_per_row[index]].tolist()

    # Within the batch.

    def move_to_the_end(self) -> int:
        """Let the rows of decoding groups be the last of the batch. Returns how many come before them."""
        batch = self._runner.input_batch
        decoding = [group_id for group_id, step in self.steps.items() if step.decodes]
        moving = {row_id for group_id in decoding for row_id in self.groups[group_id].row_ids}
        count = batch.num_reqs - len(moving)
        strays = [index for index in range(count) if batch.req_ids[index] in moving]
        holes = [index for index in range(count, batch.num_reqs) if batch.req_ids[index] not in moving]
        for stray, hole in zip(strays, holes, strict=True):
            batch.swap_states(stray, hole)
        return count

    def indices(self, group_ids: list[str]) -> np.ndarray:
        """Where in the batch the rows of groups of equal width are: [G, rows]."""
        index_of = self._runner.input_batch.req_id_to_index
        index = [index_of[row_id] for group_id in group_ids for row_id in self.groups[group_id].row_ids]
        return np.array(index).reshape(len(group_ids), -1)

    def history(self, group_id: str, row: int) -> tuple[list[int], list[int]]:
        """The last few tokens of the prompt, and what the row has generated before this step."""
        batch = self._runner.input_batch
        index = batch.req_id_to_index[self.groups[group_id].row_ids[row]]
        num_prompt, num_tokens = int(batch.num_prompt_tokens[index]), batch.num_tokens_no_spec[index]
        tokens = batch.token_ids_cpu[index, max(num_prompt - CONTEXT, 0) : num_tokens].tolist()
        return tokens[: min(num_prompt, CONTEXT)], tokens[min(num_prompt, CONTEXT) :]

    def temperatures(self) -> np.ndarray:
        """[R, 1] float32: what divides the logits of each row of the batch, 1 for ordinary requests."""
        temperatures = np.ones((self._runner.input_batch.num_reqs, 1), dtype=np.float32)
        for group_id, step in self.steps.items():
            if step.selects:
                temperatures[self.indices([group_id])] = step.rules.warping.temperature
        return temperatures

    def copy_output_tokens(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Before `permute`, for rows under controls: these read vLLM's lists of tokens, not the batch's arrays."""
        outputs = self._runner.input_batch.req_output_token_ids
        for destination, tokens in zip(destinations.tolist(), [outputs[s][:] for s in sources.tolist()], strict=True):
            outputs[destination][:] = tokens

    def permute(self, sources: np.ndarray, destinations: np.ndarray) -> None:
        """Let each destination row continue the history of its source row.

        Full blocks are taken over by reference; the tail block's content is copied into the
        destination's own tail block. No row is both source and destination.

        Args:
            sources, destinations: [forks] indices of rows in the batch.
        """
        batch = self._runner.input_batch
        num_tokens = batch.num_tokens_no_spec[sources]  # all of them computed, the newest by this step's forward
        longest = num_tokens.max()
        batch.token_ids_cpu[destinations, :longest] = batch.token_ids_cpu[sources, :longest]
        for table in batch.block_table.block_tables:
            full, partial = np.divmod(num_tokens, table.block_size)
            blocks = table.block_table.np
            own_tails, columns = blocks[destinations, full], full.max() + 1
            blocks[destinations, :columns] = blocks[sources, :columns]
            with_tail = partial > 0
            blocks[destinations[with_tail], full[with_tail]] = own_tails[with_tail]
            if with_tail.any():
                self.kv_blocks.copy(blocks[sources, full][with_tail], own_tails[with_tail])

    def adopt(
        self,
        index: np.ndarray,
        sources: np.ndarray,
        num_tokens: int,
        full_blocks: np.ndarray,
        tail_blocks: np.ndarray,
        num_blocks: int,
    ) -> None:
        """Let rows continue the histories of others, with these blocks. There is one KV cache group.

        Args:
            index, sources: [b] places in the batch.
            num_tokens: Of the histories.
            full_blocks: [b, columns] the first blocks of each row.
            tail_blocks: [b] those that follow. What comes after them is in place.
            num_blocks: How many blocks each row has then.
        """
        batch = self._runner.input_batch
        batch.token_ids_cpu[index, :num_tokens] = batch.token_ids_cpu[sources, :num_tokens]
        table, columns = batch.block_table[0], full_blocks.shape[1]
        table.block_table.np[index, :columns] = full_blocks
        table.block_table.np[index, columns] = tail_blocks
        table.num_blocks_per_row[index] = num_blocks

    @cached_property
    def kv_blocks(self) -> KVBlocks:
        """The runner's KV caches, a draft model's among them."""
        return KVBlocks(self._runner.kv_caches, self._runner.kv_cache_config.num_blocks)
