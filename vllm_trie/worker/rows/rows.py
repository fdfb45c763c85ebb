"""The rows of beam groups, and everything of them that is written into vLLM's arrays by slot.

That is tokens, block tables, counts and contents of KV blocks. To vLLM's runner, a row of a group is a request with its
own slot and place in the batch. vLLM takes in one request after the other, and uploads the tokens of each. The rows of
a group differ only in their blocks and generated tokens: so the first one comes in as vLLM's requests do, and the
others become copies of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.v1.kv_cache_interface import CrossAttentionSpec
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

from vllm_trie.messages import GroupStep
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.devices import is_searched_on_host, uploaded_for_search, uploaded_together_for_search
from vllm_trie.search.rules import SearchPhase, SearchRules
from vllm_trie.worker import launches
from vllm_trie.worker.attention.tree_layers import attention_by_token
from vllm_trie.worker.kv.kv_caches import KVCaches, KVTable, TokenStates
from vllm_trie.worker.kv.kv_moves import KVFork, KVMoves, fork_kv, move_kv
from vllm_trie.worker.rows.new_rows import row_arrays_by_slot

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData
    from vllm.v1.worker.gpu.input_batch import InputBatch


class NextBeams(NamedTuple):
    """What the last stage of a pipeline has selected for a group, as an earlier one receives it."""

    parents: torch.Tensor  # [b] int32, on the device
    tokens: torch.Tensor  # [b] int32, on the device
    num_tokens: int  # of the group's rows then, all of them computed
    have_rows: bool  # already; otherwise they get them in their next step
    received: Any  # the event of the receiving stream after which the tensors are valid


@dataclass(slots=True, eq=False)
class GroupRows:
    """The rows of one group, each a request with its own slot to vLLM's runner."""

    request: NewRequestData  # as vLLM sent it
    search: SearchRules  # how they select, whatever the phase
    row_ids: list[str]
    batch: SearchBeams  # what the rows carry, among those of other groups that selected with them
    tokens: torch.Tensor  # [rows of the next step] int64 on the device, the newest token of each beam
    slots: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [rows], once the runner has them
    num_drafted: int = 0  # tokens of each row that the draft model has computed, if there is one
    next_beams: NextBeams | None = None  # on an earlier stage of a pipeline, until the next step
    prompt_index: Any = None  # for looking up drafts
    place: int = 0  # the group's index in `batch`
    phase: SearchPhase | None = None  # of their present step
    rules: SearchRules = field(init=False)  # how they select in this phase; the same object until the phase changes
    held: Any = None  # where CUDA graphs of steps write what rows carry, once one has taken a step of this group
    roots: Any = None  # the rows after speculation; `tables`: by KV cache group [b, columns] int32, their blocks

    def __post_init__(self) -> None:
        self.rules = self.search

    @property
    def beams(self) -> SearchBeams:
        """What they carry, as a batch of one group."""
        return self.batch.at(self.place)

    @beams.setter
    def beams(self, beams: SearchBeams) -> None:
        self.batch, self.place = beams, 0

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt, as the runner has them: 0 where it has embeddings instead."""
        request = self.request
        if request.prompt_embeds is None:
            return request.prompt_token_ids or []
        assert request.prefill_token_ids is not None
        return request.prefill_token_ids[: request.prompt_len]


def beams_of_rows(groups: Sequence[GroupRows]) -> SearchBeams:
    """What the rows of groups carry, which are equally wide and have equal constraints."""
    beams, are_together = groups[0].batch, True  # usually they have selected together before
    for place, group in enumerate(groups):
        are_together &= group.batch is beams and group.place == place
    if are_together and len(beams.scores) == len(groups):
        return beams
    return SearchBeams.join([group.beams for group in groups])


class BatchRows:
    """Where the rows of groups are in the present batch.

    Args:
        batch: vLLM's.
        max_num_reqs: Slots of the runner.
    """

    def __init__(self, batch: InputBatch, max_num_reqs: int) -> None:
        self.batch = batch
        self._place_of_slot = np.full(max_num_reqs, -1)
        self._place_of_slot[batch.idx_mapping_np] = np.arange(batch.num_reqs)

    def places(self, slots: np.ndarray) -> np.ndarray:
        """Indices in the batch of the rows in these slots; any shape."""
        return self._place_of_slot[slots]

    def num_tokens(self, places: np.ndarray) -> np.ndarray:
        """Tokens of these rows, including this step's; any shape."""
        return self.batch.seq_lens_cpu_upper_bound.numpy()[places]

    def first_logits(self, places: np.ndarray) -> np.ndarray:
        """Where the logits of these rows begin; any shape."""
        return self.batch.cu_num_logits_np[places]

    def num_logits(self, places: np.ndarray) -> np.ndarray:
        """How many logits these rows have; any shape."""
        return np.diff(self.batch.cu_num_logits_np)[places]


def row_rope_state(runner: GPUModelRunner) -> RopeState | None:
    """A runner's state of M-RoPE positions, if its model has them."""
    state = runner.model_state
    return state.rope_state if isinstance(state, DefaultModelState) else None


class Rows:
    """The rows of one runner, once its model is loaded.

    Args:
        runner: vLLM's.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        self._runner = runner
        self._sampler = runner.sampler  # None on the earlier stages of a pipeline
        self.device = runner.device
        self.all_tokens = runner.req_states.all_token_ids.gpu  # [slots, length] int32; arbitrary after their ends
        self.token_states: TokenStates | None = None  # states stored by token besides the KV caches, if any

    @cached_property
    def kv(self) -> KVCaches:
        """The runner's KV caches, including a draft model's, `token_states`, and the tables of their blocks.

        Tables that are equal for all rows of a group are left out.
        """
        runner, own = self._runner, [] if self.token_states is None else [self.token_states.by_token.contents]
        config, tables = runner.kv_cache_config, runner.block_tables
        differing = [
            KVTable(tables.block_tables[number].gpu, tables.block_sizes[number], number)
            for number, group in enumerate(config.kv_cache_groups)
            if not isinstance(group.kv_cache_spec, CrossAttentionSpec)
        ]
        by_token = attention_by_token(runner, self.token_states)
        return KVCaches([*runner.kv_caches, *own], config.num_blocks, by_token, differing)

    def upload(self, values: Any, dtype: type[np.integer[Any]] = np.int64) -> torch.Tensor:
        """Integers from the host, on the device; nobody waits for the copy."""
        return uploaded_for_search(np.asarray(values, dtype), self.device)

    @property
    def block_tables(self) -> BlockTables:
        """The runner's block tables."""
        return self._runner.block_tables

    def tokens(self, slots: np.ndarray, start: int, end: int) -> torch.Tensor:
        """[..., end - start] int32, tokens of the rows in `slots`, of any shape."""
        return self.all_tokens[self.upload(slots), start:end]

    def generated(
        self, groups: Sequence[GroupRows], num_tokens: np.ndarray
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """What rows of G groups have generated; each row of a group has `num_tokens` [G] tokens.

        Returns:
            int32 tokens on the device, the rows' indices [G, r] in them, and [G] where generated tokens begin. To save
            copies, they may include tokens of other rows, and of prompts.
        """
        tokens, slots = self.all_tokens, np.array([group.slots for group in groups])
        starts = np.array([len(group.prompt) for group in groups])
        if is_searched_on_host(self.device):
            return tokens, slots, starts
        columns = starts[:, None] + np.arange(max((num_tokens - starts).max(), 1))
        rows, at = uploaded_together_for_search([slots, np.minimum(columns, tokens.shape[1] - 1)], self.device)
        of_groups = tokens[rows[:, :, None], at[:, None]].flatten(0, 1)
        return of_groups, np.arange(slots.size).reshape(slots.shape), np.zeros_like(starts)

    def num_computed(self, group: GroupRows) -> int:
        """Computed tokens of each row."""
        return int(self._runner.req_states.num_computed_tokens_np[group.slots[0]])

    def slots_of(self, row_ids: Sequence[str]) -> np.ndarray:
        """The slots of rows."""
        return np.array([self._runner.req_states.req_id_to_index[row_id] for row_id in row_ids], dtype=np.int64)

    def add_copies(self, fanning_out: Sequence[tuple[GroupRows, GroupStep]]) -> None:
        """Gives slots to the further rows of groups that fan out, with copies of the first row's contents.

        To be called before vLLM takes in requests: afterwards it uploads its host arrays.
        """
        arrays = [*row_arrays_by_slot(self._runner)] if fanning_out else []
        for group, step in fanning_out:
            self._add_copies(group, step, arrays)

    def _add_copies(self, group: GroupRows, step: GroupStep, arrays: Sequence[np.ndarray]) -> None:
        runner, states, request = self._runner, self._runner.req_states, group.request
        assert step.rows is not None
        first_id, *others = group.row_ids
        first = states.req_id_to_index[first_id]
        slots = np.array([states.free_indices.pop() for _ in others], np.int64)
        states.req_id_to_index.update(zip(others, slots.tolist(), strict=True))
        states.index_to_req_id.update(zip(slots.tolist(), others, strict=True))
        for array in arrays:
            array[slots] = array[first]
        if runner.encoder_cache is not None:  # as vLLM takes in a request; encoder outputs are found by content
            for row_id in others:
                runner.encoder_cache.add_request(row_id, request.mm_features)
        if request.lora_request is not None:
            runner.lora_state.lora_requests.update(dict.fromkeys(others, request.lora_request))
        resumed, num_prompt = step.resumed, len(group.prompt)
        length = num_prompt + (0 if resumed is None else resumed.histories.shape[1])
        at = self.upload(slots)
        self._write_counts(slots, at, length, group.num_drafted)
        tokens = self.all_tokens
        tokens[at, :num_prompt] = tokens[first, :num_prompt].clone()  # read once, where tokens are in host memory
        if resumed is not None:
            tokens[at, num_prompt:length] = self.upload(resumed.histories[1:], np.int32)
        self._write_rope_positions(first, slots, at, num_prompt, length)
        self._write_tables(slots, at, [table[1:] for table in step.rows.tables])

    def _write_counts(self, slots: np.ndarray, at: torch.Tensor, length: int, num_computed: int) -> None:
        """Writes numbers of tokens: of those computed, and of those that a preempted group computes again."""
        states = self._runner.req_states
        states.prefill_len.np[slots] = length
        states.num_computed_prefill_tokens[slots] = states.num_computed_tokens_np[slots] = num_computed
        states.total_len.gpu.index_fill_(0, at, length)
        states.num_computed_tokens.gpu.index_fill_(0, at, num_computed)
        states.draft_tokens.index_fill_(0, at, 0)
        if isinstance(cached := self._runner.model_state, MambaHybridModelState) and cached._align_mode:
            column = (num_computed - 1) // cached.cache_config.mamba_block_size
            cached._mamba_state_idx_gpu.index_fill_(0, at, column)
            cached.num_accepted_tokens_gpu.index_fill_(0, at, 1)

    def _write_rope_positions(
        self, first: int, slots: np.ndarray, at: torch.Tensor, num_prompt: int, length: int
    ) -> None:
        """Writes M-RoPE positions: the prompt's, which depend on its images, then increasing by one."""
        rope = row_rope_state(self._runner)
        if rope is None:
            return
        delta = int(rope.prefill_delta.np[first])
        rope.prefill_delta.np[slots] = delta
        positions = rope.prefill_positions.gpu.view(rope.max_num_reqs, rope.num_dims, -1)
        positions[at, :, :num_prompt] = positions[first, :, :num_prompt]
        following = torch.arange(num_prompt + delta, length + delta, device=self.device, dtype=torch.int32)
        positions[at, :, num_prompt:length] = following

    def _write_tables(self, slots: np.ndarray, at: torch.Tensor, tables: Sequence[np.ndarray]) -> None:
        """Writes, by KV cache group, blocks [rows, columns] of the rows in `slots`, which are `at` on the device."""
        block_tables = self._runner.block_tables
        for number, table in enumerate(tables):
            block_tables.block_tables[number].gpu[at, : table.shape[1]] = self.upload(table, np.int32)
            block_tables.num_blocks.np[number, slots] = table.shape[1]

    def write_first_tokens(self, group: GroupRows, is_controlled: bool) -> None:
        """Writes what only the device knows of rows that have just fanned out: the first token of each."""
        states, at, length = self._runner.req_states, self.upload(group.slots), len(group.prompt)
        states.last_sampled_tokens[at, 0] = group.tokens
        self.all_tokens[at, length] = group.tokens.int()
        states.total_len.gpu.index_fill_(0, at, length + 1)  # an assignment would wait for the device
        if is_controlled and self._sampler is not None:
            self._sampler.penalties_state.output_bin_counts[at, group.tokens] += 1

    def add_blocks(self, steps: Mapping[str, GroupStep], groups: Mapping[str, GroupRows]) -> None:
        """Appends the next block of each row at a block boundary; fills the tails of rows that fan out."""
        tables = self._runner.block_tables
        for number, table in enumerate(tables.block_tables):
            growing = {
                group_id: blocks[number]
                for group_id, step in steps.items()
                if (blocks := step.new_blocks) is not None and len(blocks[number])
            }
            if growing:
                slots = np.concatenate([groups[group_id].slots for group_id in growing])
                columns = tables.num_blocks.np[number, slots]
                at, to, blocks = self.upload(np.stack([slots, columns, np.concatenate([*growing.values()])]))
                table.gpu[at, to] = blocks.int()
                tables.num_blocks.np[number, slots] += 1
            for group_id, of_rows in growing.items():
                if (roots := groups[group_id].roots) is not None:
                    roots.tables[number] = np.column_stack([roots.tables[number], of_rows])
        copies = [rows.copies for step in steps.values() if (rows := step.rows) is not None and len(rows.copies)]
        if copies:
            move_kv(KVMoves(np.concatenate(copies)), self.kv)

    def fork(self, moved: KVFork, is_controlled: bool = False) -> None:
        """Lets rows continue the histories of others and, if `is_controlled`, the state of their logits processors."""
        fork_kv(moved, self.all_tokens, self.kv)
        if is_controlled:
            self._reorder_controls(moved)

    def _reorder_controls(self, rows: KVFork) -> None:
        """Lets rows take over the state of logits processors from those that they continue."""
        if not launches.worker_runs_kernels_on(self.device):
            self.take_over_controls(rows.rows[0], rows.sources)
            return
        launches.worker_module_for_gpus("worker.kernels.controls").launch_reorder_counts(rows, self._counts)
        for take_over in self._of_processors:
            take_over(rows.rows[0], rows.sources)

    def take_over_controls(self, slots: torch.Tensor, sources: torch.Tensor) -> None:
        """Lets slots [R] take over the state of logits processors from others [R]."""
        self._counts[slots] = self._counts[sources]
        for take_over in self._of_processors:
            take_over(slots, sources)

    @property
    def _counts(self) -> torch.Tensor:
        """[slots, V] int32, how often each token has occurred."""
        assert self._sampler is not None
        return self._sampler.penalties_state.output_bin_counts

    @property
    def has_processors(self) -> bool:
        """Whether any logits processor has state by slot."""
        return bool(self._of_processors)

    @property
    def _of_processors(self) -> list[Callable[[torch.Tensor, torch.Tensor], None]]:
        """For each logits processor with state by slot: lets slots [R] take over that of others [R]."""
        assert self._sampler is not None  # `reorder_rows` is our extension, not vLLM's
        found = (getattr(processor, "reorder_rows", None) for processor in self._sampler.logits_processors)
        return [take_over for take_over in found if take_over is not None]
