"""Rows that are new to vLLM's runner, and blocks that are new to rows: all of a group at once.

vLLM takes in one request after the other, and uploads the tokens of each. The rows of a group differ in their blocks
alone, and in what each has generated: so the first one comes in as vLLM's requests do, the others become what it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.encoder_decoder import EncoderDecoderModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_trie.messages import GroupStep
from vllm_trie.worker.kv_blocks import KVBlocks
from vllm_trie.worker.row_beams import RowBeams
from vllm_trie.worker.rows import GroupRows
from vllm_trie.worker.step_context import StepContext


def refuse_own_state(model_state: ModelState) -> None:
    """Refuse a model that brings a state of its own: what it holds of a row, nobody here lets others continue.

    Raises:
        ValueError: naming it.
    """
    kind = type(model_state)
    if kind not in (DefaultModelState, EncoderDecoderModelState):
        raise ValueError(
            f"trie_beam does not support models with a state of their own, as this one has ({kind.__name__}); start "
            "vLLM without the plugin"
        )


def may_copy_rows(runner: GPUModelRunner) -> bool:
    """Whether all that a runner holds of a request is what `add_copies` copies."""
    model_state, sampler = runner.model_state, runner.sampler
    if runner.adaptive_verification is not None or (sampler is not None and sampler.thinking_budget_state.enabled):
        return False
    # That of an encoder-decoder model holds nothing of a request.
    return type(model_state) is EncoderDecoderModelState or model_state.prompt_embeds_state is None


def add_copies(runner: GPUModelRunner, context: StepContext, groups: dict[str, GroupRows]) -> None:
    """Give slots to the further rows of groups that fan out, and let these hold what that of the first row holds.

    To be called before vLLM takes in requests: afterwards it uploads what it holds on the host.
    """
    arrays = [*_arrays_by_slot(runner)] if context.copied else []
    for group_id in context.copied:
        group, step, states = groups[group_id], context.steps[group_id], runner.req_states
        first, others = states.req_id_to_index[group_id], group.row_ids[1:]
        slots = np.array([states.free_indices.pop() for _ in others], np.int64)
        states.req_id_to_index.update(zip(others, slots.tolist(), strict=True))
        states.index_to_req_id.update(zip(slots.tolist(), others, strict=True))
        for array in arrays:
            array[slots] = array[first]
        if runner.encoder_cache is not None:  # as vLLM takes in a request; what is encoded, it finds by content
            for row_id in others:
                runner.encoder_cache.add_request(row_id, group.request.mm_features)
        if group.request.lora_request is not None:
            runner.lora_state.lora_requests.update(dict.fromkeys(others, group.request.lora_request))
        _write_histories(runner, group, step, first, slots)
        _write_rope_positions(runner, group, first, slots)
        _write_tables(runner, step, slots)


def _arrays_by_slot(runner: GPUModelRunner) -> Iterator[np.ndarray]:
    """What vLLM, whatever its version, holds of each slot on the host: what is asked of sampling, numbers of tokens."""
    sampler, num_slots = runner.sampler, runner.max_num_reqs
    of_sampler = () if sampler is None else (sampler, *sampler.logits_processors, *vars(sampler).values())
    for owner in (*of_sampler, runner.req_states, runner.prompt_logprobs_worker, runner.lora_state):
        values = vars(owner).values() if type(owner).__module__.startswith("vllm.v1.worker.gpu.") else ()
        for value in values:
            array = value.np if isinstance(value, UvaBackedTensor) else value
            if isinstance(array, np.ndarray) and array.shape[:1] == (num_slots,):
                yield array


def _write_histories(runner: GPUModelRunner, group: GroupRows, step: GroupStep, first: int, slots: np.ndarray) -> None:
    """Tokens, and how many there are: what is computed, and what a preempted group has to compute again."""
    states, num_prompt = runner.req_states, len(group.prompt)
    histories = np.zeros((len(slots), 0), np.int32)
    if step.resumed is not None:
        histories = np.array(step.resumed.histories, np.int32)[1:]
    length, num_computed = num_prompt + histories.shape[1], group.num_drafted
    states.prefill_len.np[slots] = length
    states.num_computed_prefill_tokens[slots] = states.num_computed_tokens_np[slots] = num_computed
    at = async_tensor_h2d(slots, device=runner.device, dtype=torch.int64)
    states.total_len.gpu.index_fill_(0, at, length)
    states.num_computed_tokens.gpu.index_fill_(0, at, num_computed)
    states.draft_tokens.index_fill_(0, at, 0)
    tokens = states.all_token_ids.gpu
    tokens[at, :num_prompt] = tokens[first, :num_prompt]
    if step.resumed is not None:
        tokens[at, num_prompt:length] = async_tensor_h2d(histories, device=runner.device, dtype=torch.int32)


def _write_rope_positions(runner: GPUModelRunner, group: GroupRows, first: int, slots: np.ndarray) -> None:
    """M-RoPE positions: those of the prompt, which depend on its images, and after it one more for each token."""
    state = runner.model_state
    rope = state.rope_state if isinstance(state, DefaultModelState) else None
    if rope is None:
        return
    delta, num_prompt = int(rope.prefill_delta.np[first]), len(group.prompt)
    length = int(runner.req_states.prefill_len.np[slots[0]])
    rope.prefill_delta.np[slots] = delta
    at = async_tensor_h2d(slots, device=runner.device, dtype=torch.int64)
    positions = rope.prefill_positions.gpu.view(rope.max_num_reqs, rope.num_dims, -1)
    positions[at, :, :num_prompt] = positions[first, :, :num_prompt]
    following = torch.arange(num_prompt + delta, length + delta, device=runner.device, dtype=torch.int32)
    positions[at, :, num_prompt:length] = following


def _write_tables(runner: GPUModelRunner, step: GroupStep, slots: np.ndarray) -> None:
    assert step.rows is not None
    tables, at = runner.block_tables, async_tensor_h2d(slots, device=runner.device, dtype=torch.int64)
    for number, table in enumerate(step.rows.tables):
        blocks = async_tensor_h2d(table[1:], device=runner.device, dtype=torch.int32)
        tables.block_tables[number].gpu[at, : table.shape[1]] = blocks
        tables.num_blocks.np[number, slots] = table.shape[1]


def take_in_rows(
    runner: GPUModelRunner, context: StepContext, groups: dict[str, GroupRows], row_beams: RowBeams
) -> None:
    """After vLLM has taken in new requests: note the slots of new rows, and write what the device alone knows.

    That is the first token of each row of a group that was one row until now.
    """
    states, sampler = runner.req_states, runner.sampler
    for group_id in context.entered:
        group = groups[group_id]
        group.slots = np.array([states.req_id_to_index[row_id] for row_id in group.row_ids])
        if group_id not in context.new_tokens_unknown and sampler is not None:  # earlier stages select nothing
            step = context.steps[group_id]
            group.beams = group.beams._replace(states=row_beams.begin(step.rules, step.resumed))
    for group_id in context.new_tokens_unknown:
        group = groups[group_id]
        slots, at = async_tensor_h2d(group.slots, device=runner.device, dtype=torch.int64), len(group.prompt)
        states.last_sampled_tokens[slots, 0] = group.tokens
        states.all_token_ids.gpu[slots, at] = group.tokens.int()
        states.total_len.gpu.index_fill_(0, slots, at + 1)  # where an assignment would wait for the device
        if context.steps[group_id].rules.is_controlled and sampler is not None:
            sampler.penalties_state.output_bin_counts[slots, group.tokens] += 1


def add_blocks(runner: GPUModelRunner, context: StepContext, groups: dict[str, GroupRows], kv_blocks: KVBlocks) -> None:
    """Append the next block of each row at a block boundary; fill the tails of rows that fan out."""
    tables, steps = runner.block_tables, context.steps
    for number, table in enumerate(tables.block_tables):
        growing = {
            group_id: blocks[number]
            for group_id, step in steps.items()
            if (blocks := step.new_blocks) is not None and len(blocks[number])
        }
        if growing:
            slots = np.concatenate([groups[group_id].slots for group_id in growing])
            places = np.stack([slots, tables.num_blocks.np[number, slots], np.concatenate([*growing.values()])])
            at, columns, blocks = async_tensor_h2d(places, device=runner.device, dtype=torch.int64)
            table.gpu[at, columns] = blocks.int()
            tables.num_blocks.np[number, slots] += 1
    copies = [rows.copies for step in steps.values() if (rows := step.rows) is not None and len(rows.copies)]
    if copies:
        kv_blocks.copy_to_others(*async_tensor_h2d(np.concatenate(copies).T, device=runner.device, dtype=torch.int64))
