"""Speculation with draft trees in the worker: implements the seam `vllm_trie.worker.speculation`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.mm.rope import RopeState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_trie.messages import DecidedMessage
from vllm_trie.speculation.worker import draft_warm_up
from vllm_trie.speculation.worker.draft import Drafter, Forests
from vllm_trie.speculation.worker.draft_by_head import HeadDrafter
from vllm_trie.speculation.worker.draft_by_lookup import LookupDrafter
from vllm_trie.speculation.worker.draft_by_model import ModelDrafter
from vllm_trie.speculation.worker.draft_memory import take_widest_draft_move
from vllm_trie.speculation.worker.draft_model import draft_model_logits
from vllm_trie.speculation.worker.grown_forests import forests_grown_together
from vllm_trie.speculation.worker.hidden_states import DraftHiddenStates, leave_room_for_drafts
from vllm_trie.speculation.worker.stopwatch import DraftStopwatch
from vllm_trie.speculation.worker.tree_positions import DraftTreePositions, draft_tree_positions
from vllm_trie.speculation.worker.tree_rows import DraftTreeRows
from vllm_trie.speculation.worker.verify import verify_forests
from vllm_trie.speculative_config import speculative_config_shorter_length
from vllm_trie.worker.attention.tree_layers import attention_takes_trees
from vllm_trie.worker.kernels import KernelVariants
from vllm_trie.worker.rows.rows import BatchRows, GroupRows, row_rope_state
from vllm_trie.worker.rows.sub_batch import sub_batch_of_rows
from vllm_trie.worker.rows.sub_forward import sub_forward_of_rows
from vllm_trie.worker.select.amateur import contrasting_selections
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.step_context import RunnerStepContext

if TYPE_CHECKING:
    from vllm_trie.worker.runner import BeamModelRunner

DRAFTERS: dict[str, type[Drafter]] = {"ngram": LookupDrafter, "ngram_gpu": LookupDrafter, "eagle3": HeadDrafter}


class TreeSpeculation(RunnerSpeculation):
    """Forests of drafts by the speculator of a runner.

    Args:
        runner: A runner whose model is not loaded yet.
    """

    drafter: Drafter
    rows: DraftTreeRows
    _drafting: DraftStopwatch  # of this step

    def __init__(self, runner: BeamModelRunner) -> None:
        self._runner = runner
        self.takes_trees = True
        self._forests: Forests = {}  # of this step
        self._positions: DraftTreePositions | None = None  # of the nodes of forests that the host has made
        if isinstance(runner.speculator, DraftModelSpeculator):
            runner.speculator.load_draft_model = partial(self._load_draft_model, runner.speculator.load_draft_model)

    def _load_draft_model(self, stock: Any, *args: Any) -> Any:
        try:
            return stock(*args)
        except Exception as error:
            name = self._runner.speculative_config.model
            raise ValueError(
                f"the draft model {name!r} of speculative_config cannot be loaded: {error}; name another one, or start "
                f"vLLM without speculative_config"
            ) from error

    def attach(self) -> None:
        """See `RunnerSpeculation`."""
        runner = self._runner
        self.rows = DraftTreeRows(runner, runner.rows)
        kind = DRAFTERS.get(runner.speculative_config.method, ModelDrafter)
        self.drafter = kind(runner, runner.selector, self.rows, runner.rank_check)
        runner.speculator.propose = partial(self._propose_for_others, runner.speculator.propose)
        if (length := speculative_config_shorter_length(runner.vllm_config)) is not None:
            runner.speculator._run_model = partial(_run_within_length, runner.speculator._run_model, length)
        if (rope := row_rope_state(runner)) is not None:
            rope.prepare_positions = partial(self._prepare_rope_positions, rope.prepare_positions, rope)

    def take_memory(self) -> None:
        """See `RunnerSpeculation`."""
        take_widest_draft_move(self._runner)

    def leave_room(self, num_bytes: int) -> int:
        """See `RunnerSpeculation`."""
        return leave_room_for_drafts(self._runner, num_bytes)

    def begin(self) -> None:
        """See `RunnerSpeculation`."""
        self.takes_trees = attention_takes_trees(self._runner)
        if self.takes_trees and isinstance(self._runner.speculator, EagleSpeculator):
            self.rows.hidden_states = self._runner.rows.token_states = DraftHiddenStates(self._runner)

    def warm_up(self, serving: KernelVariants) -> None:
        """See `RunnerSpeculation`."""
        if not self.takes_trees:
            return
        # Only GPUs come here; others may have no Triton.
        from vllm_trie.speculation.worker.kernels import drafts, forest_growth, forest_layout
        from vllm_trie.worker.kv import copies

        serving = serving._replace(draft_logits=tuple(draft_model_logits(self._runner)))
        drafts.warm_up_draft_kernels(serving)
        forest_growth.warm_up_growth_kernels(serving)
        forest_layout.warm_up_forest_kernel(serving)
        copies.warm_up_kv_moves(self._runner.rows.kv)

    def warm_up_stock(self) -> None:
        """See `RunnerSpeculation`."""
        draft_warm_up.warm_up_draft_inputs(self._runner, self.rows.drafts if self.takes_trees else None)

    def propose(self, step: RunnerStepContext, groups: dict[str, GroupRows], output: SchedulerOutput) -> None:
        """See `RunnerSpeculation`."""
        self._forests, self._positions, step.cannot_draft = {}, None, not self.takes_trees
        if step.speculating and self.takes_trees:
            self._runner.block_tables.apply_staged_writes()  # the draft model reads the tables before the target does
            self._drafting = DraftStopwatch(self._runner.device)
            with gpu_sync_allowed():
                self._forests = self.drafter.draft(step, groups, output)
            self._drafting.stop()
            step.forests = self._forests

    def in_place(self) -> AbstractContextManager[None]:
        """See `RunnerSpeculation`."""
        return self.rows.in_place()

    def place(self, batch: InputBatch, slot_mappings: torch.Tensor) -> None:
        """See `RunnerSpeculation`."""
        rows = BatchRows(batch, self._runner.max_num_reqs)
        if (grown := forests_grown_together(self._forests.values())) is not None:
            grown.place(rows, slot_mappings)
        if made := [forest_step for forest_step in self._forests.values() if forest_step.grown is None]:
            self._positions = draft_tree_positions(made, rows)
            self._positions.write(batch.positions)

    def _prepare_rope_positions(self, stock: Any, rope: RopeState, *args: Any) -> None:
        """Wraps vLLM's preparation of M-RoPE positions of a batch. Such models only have n-gram drafts."""
        stock(*args)
        if self._positions is not None:
            self._positions.write(rope.positions, rope.prefill_delta.np)

    def keep(self, forward: Any) -> None:
        """See `RunnerSpeculation`."""
        if self.rows.hidden_states is not None:
            self.rows.hidden_states.keep(forward)

    def accept(
        self, rows: BatchRows, logits: torch.Tensor, sampled: torch.Tensor, num_sampled: np.ndarray
    ) -> dict[str, DecidedMessage]:
        """See `RunnerSpeculation`."""
        if (grown := forests_grown_together(self._forests.values())) is not None:
            grown.read()
            self.drafter.compare({key: one for key, one in self._forests.items() if one.grown is not None})
        seconds = self._drafting.seconds()
        paths, decided = verify_forests(self._runner.selector, self._forests, seconds, rows, logits, num_sampled)
        self.rows.accept(paths, rows.places(np.concatenate([path.slots for path in paths])), sampled)
        return decided

    def _propose_for_others(self, stock: Any, input_batch: InputBatch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Wraps vLLM's drafting: for ordinary requests, and for groups that are still one row, with their prompts."""
        runner, step, groups = self._runner, self._runner.step, self._runner.groups
        left_out = [*step.decoding, *contrasting_selections(step.steps, groups)]
        if isinstance(self.drafter, HeadDrafter) and self.takes_trees:
            beginning = [groups[group_id] for group_id in step.steps if group_id not in left_out]
            with gpu_sync_allowed():
                self.drafter.add_first_rows(beginning, BatchRows(input_batch, runner.max_num_reqs))
            left_out = [*step.steps]
        left_out_rows = {row_id for group_id in left_out for row_id in groups[group_id].row_ids}
        if not left_out_rows:
            return stock(input_batch, *args, **kwargs)
        # Metadata, slots and hidden states of the forward pass: a draft model and a lookup read none of these.
        *of_forward, num_sampled, num_rejected = args[:6]
        rows = [at for at, row_id in enumerate(input_batch.req_ids) if row_id not in left_out_rows]
        proposed = runner.req_states.draft_tokens.new_zeros(input_batch.num_reqs, runner.num_speculative_steps)
        if rows:
            smaller, at, tokens, *_ = sub_batch_of_rows(input_batch, np.array(rows))
            if isinstance(runner.speculator, EagleSpeculator):
                of_forward = [*sub_forward_of_rows(runner, smaller, tokens, *of_forward[2:])]
                kwargs["is_profile"] = True  # no graphs: these read the whole batch's buffers
            else:
                runner.block_tables.gather_block_tables(smaller.idx_mapping, smaller.num_reqs)  # as drafters read them
            proposed[at] = stock(smaller, *of_forward, num_sampled[at], num_rejected[at], *args[6:], **kwargs)
        return proposed


def _run_within_length(stock: Any, length: int, input_ids: torch.Tensor, positions: torch.Tensor, *args: Any) -> Any:
    """Wraps passes of a draft model that takes fewer tokens than the target: its embedding has `length` positions.

    vLLM drafts for requests of any length. What a draft model computes of tokens beyond its length means nothing, and
    no beam depends on it. It must compute those before, as shorter prompts find them in the prefix cache.
    """
    return stock(input_ids, positions.clamp(max=length - 1), *args)
