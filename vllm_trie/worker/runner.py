"""vLLM's model runner with beam groups: where their steps hook into vLLM's.

The hooks run in this order: `execute_model` expands groups to b rows each; `update_pp_decode_requests` lets rows of a
pipeline's earlier stages continue what the last stage selected; `add_requests` gives new rows what only the device
knows; `update_requests` drafts for groups that speculate; `prepare_attn` announces which rows share blocks;
`sample` selects, or verifies, where vLLM would sample; `sample_tokens` sends the decisions to the host.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.gpu_sync_debug import gpu_sync_allowed
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_trie.compat.at_rest import RestsWithoutBeams
from vllm_trie.messages import BEAM_GROUPS, attach_result_messages, catalog_change_message, row_mask_message
from vllm_trie.search.devices import is_searched_on_host, uploaded_for_search
from vllm_trie.search.step import is_narrow_search_step
from vllm_trie.speculative_config import load_speculation_class
from vllm_trie.supported_engines import engine_has_logits_processors, plugin_config_of
from vllm_trie.worker import launches
from vllm_trie.worker.announce_shared_rows import announce_shared_rows, runner_reads_shared_blocks_once
from vllm_trie.worker.attention.check_attention import check_demanded_attention_layers
from vllm_trie.worker.expand import expand
from vllm_trie.worker.rows.catalogs import RowCatalogs
from vllm_trie.worker.rows.new_rows import may_copy_rows, refuse_own_row_state
from vllm_trie.worker.rows.rows import GroupRows, Rows
from vllm_trie.worker.rows.sub_batch import put_sampled_rows, scatter_row_logprobs, sub_batch_of_rows
from vllm_trie.worker.select.narrow import NarrowSelectionHead, SelectionLogits
from vllm_trie.worker.select.select import Selector
from vllm_trie.worker.speculation import RunnerSpeculation
from vllm_trie.worker.step_context import RunnerStepContext

if TYPE_CHECKING:
    from vllm_trie.worker.pipeline import PipelineStages
    from vllm_trie.worker.rank_check import WorkerRankCheck
    from vllm_trie.worker.select.amateur import SelectionAmateur

SPECULATION = "worker.tree_speculation:TreeSpeculation"


class BeamModelRunner(RestsWithoutBeams, GPUModelRunner):
    """Expands groups before the stock runner sees the step, and selects where it would sample.

    It rests in steps without groups, as in everything that the runner does to warm up.
    """

    hooks = (
        *("update_pp_decode_requests", "finish_requests", "add_requests", "update_requests", "gather_batch_req_state"),
        *("prepare_inputs", "prepare_attn", "sample", "sample_tokens"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.groups: dict[str, GroupRows] = {}
        self.step = RunnerStepContext()
        self.rank_check: WorkerRankCheck | None = None
        self.stages: PipelineStages | None = None
        # Of the last step: by group its rows, and how many tokens they share; and the rows of the batch, if each one
        # decodes one token. Then what `runner_reads_shared_blocks_once` finds of these.
        self._sharing: tuple[tuple[dict[str, tuple[int, list[int]]], int], bool, int | None] = ({}, 0), False, None
        self._sets_rows_apart = False  # in this step's attention, see `announce_shared_rows`
        self.catalogs: RowCatalogs
        self.rows: Rows
        self.selector: Selector
        self.narrow_head: NarrowSelectionHead
        self.speculation = RunnerSpeculation()
        self.amateur: SelectionAmateur | None = None

    @cached_property
    def _has_own_processors(self) -> bool:
        """A user's logits processors, which may write something in any step."""
        return engine_has_logits_processors(self.vllm_config)

    @cached_property
    def _copies_rows(self) -> bool:
        return may_copy_rows(self) and not self._has_own_processors

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.speculator is not None:
            self.speculation = load_speculation_class(SPECULATION)(self)
        super().load_model(*args, **kwargs)
        refuse_own_row_state(self.model_state)
        self.rows = Rows(self)
        self._make_what_few_need()
        config, device = plugin_config_of(self.vllm_config), None if self.sampler is None else self.device
        self.catalogs = RowCatalogs(device, config.request_tables_bytes, config.catalogs.values())
        if self.sampler is None:
            return
        together = self.max_num_reqs
        if not is_searched_on_host(self.device):
            widest_steps = launches.worker_module_for_gpus("worker.startup.widest_steps")
            together = widest_steps.most_rows_measured_together(self.model_config.get_vocab_size())
        self.selector = Selector(self, self.groups, self.rows, self.catalogs, together)
        sampler: Any = self.sampler
        self.narrow_head = NarrowSelectionHead(self.model, self.vllm_config, sampler.compute_nans)
        if (
            launches.worker_runs_kernels_on(self.device)
            and self.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        ):
            graphs = launches.worker_module_for_gpus("worker.select.selection_graphs")
            copying = [self.output_copy_stream]
            if self.pp_handler is not None:
                copying.append(self.pp_handler.broadcast_stream)
            most_logits = self.max_num_reqs * self.model_config.get_vocab_size()
            capture = graphs.SelectionGraphCapture(copying)
            self.selector.use(graphs.SelectionGraphs(self.rows, self.model_config.dtype, capture, most_logits))
        self.speculation.attach()

    def _make_what_few_need(self) -> None:
        """Makes the parts that few engines have, and imports them only for these."""
        if plugin_config_of(self.vllm_config).debug_rank_check:
            from vllm_trie.worker.rank_check import worker_rank_check

            self.rank_check = worker_rank_check(self.vllm_config)
        if self.pp_handler is not None:
            from vllm_trie.worker.pipeline import PipelineStages

            self.stages = PipelineStages(self.pp_handler, self.groups, self.rows, self.max_num_reqs)
        if isinstance(self.speculator, StandaloneARSpeculator):
            from vllm_trie.worker.select.amateur import SelectionAmateur

            self.amateur = SelectionAmateur(self, self.speculator)

    def initialize_kv_cache(self, *args: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, is_profiling=is_profiling, **kwargs)
        check_demanded_attention_layers(self.vllm_config, [*chain(*self.attn_groups)])
        if launches.worker_runs_kernels_on(self.device):
            launches.worker_module_for_gpus("worker.startup.layer_bytes").set_measured_layer_bytes(self)
            launches.worker_module_for_gpus("worker.startup.plain_step_graphs").capture_plain_step_graphs(
                self.cudagraph_manager
            )
            launches.worker_module_for_gpus("worker.startup.shared_step_graphs").capture_shared_step_graphs(self)
        if not is_profiling:
            self.speculation.begin()

    def profile_run(self, *args: Any, **kwargs: Any) -> None:
        """vLLM sizes the KV cache by the memory that this takes."""
        graphs = None if self.sampler is None else self.selector.graphs
        # Held until everything else has been allocated, too.
        held = self.catalogs.room(), None if graphs is None else graphs.room()
        super().profile_run(*args, **kwargs)
        del held

    def _dummy_sampler_run(self, hidden_states: torch.Tensor, **kwargs: Any) -> None:
        super()._dummy_sampler_run(hidden_states, **kwargs)
        if is_searched_on_host(self.device):
            return
        logits = self.model.compute_logits(hidden_states)
        self.narrow_head.most_tokens(hidden_states)  # now, because it takes memory
        self.speculation.take_memory()
        widest_steps = launches.worker_module_for_gpus("worker.startup.widest_steps")
        num_heavy = widest_steps.most_heavy_rows_measured(self.vllm_config)
        vocab_size, most = logits.shape[1], self.model_config.max_logprobs  # -1: all
        widest_steps.take_widest_startup_steps(logits, num_heavy, vocab_size if most < 0 else most)

    def execute_model(
        self, scheduler_output: SchedulerOutput, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> Any:
        if dummy_run or not (self.groups or BEAM_GROUPS in vars(scheduler_output)):
            if not self.is_at_rest:
                self.rest()
        else:
            if self.is_at_rest:
                self.wake()
            for changes in catalog_change_message(scheduler_output):
                with gpu_sync_allowed():
                    self.catalogs.apply(changes)
            scheduler_output, self.step = expand(scheduler_output, self.groups, self.device, self._copies_rows)
            if self.sampler is not None and not self.step.steps:
                self.selector.forget()
        output = super().execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)
        if self.speculator is not None and not dummy_run and self.execute_model_state is not None:
            self.speculation.keep(self.execute_model_state)
        return output

    def rest(self) -> None:
        self.step = RunnerStepContext()
        super().rest()

    def update_pp_decode_requests(self, *args: Any, **kwargs: Any) -> None:
        if self.stages is not None:
            self.stages.continue_histories(self.step)
        super().update_pp_decode_requests(*args, **kwargs)

    def finish_requests(self, scheduler_output: SchedulerOutput, **kwargs: Any) -> None:
        if scheduler_output.kv_connector_metadata is not None and self.step.copies_tails:
            # vLLM calls it right before the forward pass, when rows that fan out have already been written.
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        if self.step.left:  # a KV connector does not know these rows
            finished = scheduler_output.finished_req_ids.union(self.step.left)
            scheduler_output = replace(scheduler_output, finished_req_ids=finished)
        super().finish_requests(scheduler_output, **kwargs)

    def add_requests(self, scheduler_output: SchedulerOutput, **kwargs: Any) -> None:
        if scheduler_output.scheduled_new_reqs or self._has_own_processors:  # otherwise the stock runner writes nothing
            step, groups = self.step, self.groups
            self.rows.add_copies([(groups[group_id], step.steps[group_id]) for group_id in step.copied])
            super().add_requests(scheduler_output, **kwargs)
            for group_id in step.entered:
                groups[group_id].slots = self.rows.slots_of(groups[group_id].row_ids)
            for group_id in step.new_tokens_unknown:
                self.rows.write_first_tokens(groups[group_id], groups[group_id].rules.is_controlled)
            if self.sampler is not None:  # only the last stage of a pipeline has it
                self.selector.begin(step)

    def update_requests(self, scheduler_output: SchedulerOutput, **kwargs: Any) -> None:
        super().update_requests(scheduler_output, **kwargs)
        if self.step.gets_blocks:
            self.rows.add_blocks(self.step.steps, self.groups)
        if self.speculator is not None:
            self.speculation.propose(self.step, self.groups, scheduler_output)

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        state, uniform_token_count = super().gather_batch_req_state(*args, **kwargs)
        sharing = {group_id: (len(self.groups[group_id].slots), num) for group_id, num in self.step.num_shared.items()}
        asked = sharing, len(state.req_ids) if uniform_token_count == 1 and not state.has_prefill else 0
        if asked != self._sharing[0]:
            self._sharing = asked, *runner_reads_shared_blocks_once(self, sharing.values(), asked[1])
        self._sets_rows_apart = self._sharing[1] or bool(self.step.forests)
        # Full graphs of other decoding steps contain vLLM's attention.
        return state, self._sharing[2] if self._sets_rows_apart else uniform_token_count

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        if not self.step.forests:
            return super().prepare_inputs(*args, **kwargs)
        with self.speculation.in_place():
            return super().prepare_inputs(*args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch, **kwargs: Any) -> Any:
        if self._sets_rows_apart:
            announce_shared_rows(self, self.step, self.groups, input_batch, self._sharing[0][1])
        prepared = super().prepare_attn(input_batch, **kwargs)
        if self.step.forests:
            self.speculation.place(input_batch, prepared[1])
        return prepared

    def sample(
        self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        step = self.step
        if not step.steps:
            return super().sample(hidden_states, input_batch, grammar_output, *args, **kwargs)
        stock: tuple[Any, Any] = self.sampler, self.rejection_sampler  # type: ignore[has-type]
        model: Any = self.model  # type: ignore[has-type]
        of_groups = [(group_id, self.groups[group_id].rules) for group_id in step.steps]
        narrow = {id_: rules for id_, rules in of_groups if rules.constraints and is_narrow_search_step(rules)}
        # A grammar masks the logits of a batch by their places, and forests look theirs up.
        if narrow and grammar_output is None and not step.forests:
            most = self.narrow_head.most_tokens(hidden_states)
            step.narrow = self.catalogs.with_small_levels(narrow, most)
            if (plan := self.selector.plan(step, input_batch)).narrow:
                project = partial(self.narrow_head.project, plan, self.selector.levels(plan))
                self.model = SimpleNamespace(compute_logits=project)
        self.sampler = self.rejection_sampler = partial(self._sample_all_rows, *stock)  # one of them is called
        try:
            sampled = super().sample(hidden_states, input_batch, grammar_output, *args, **kwargs)
        finally:
            self.sampler, self.rejection_sampler = stock
            self.model = model
        if self.stages is not None:
            self.stages.send(self.step)
        return sampled

    def _sample_all_rows(
        self,
        sampler: Any,
        rejection_sampler: Any,
        selection_logits: torch.Tensor | SelectionLogits,
        batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Replaces vLLM's sampling from logits [N, V]: the search gives beam rows their tokens, vLLM the others."""
        step, plan = self.step, self.selector.plan(self.step, batch)
        logits = selection_logits.whole if isinstance(selection_logits, SelectionLogits) else selection_logits
        rows, ordinary, num_sampled, of_ordinary = plan.rows, plan.ordinary, plan.num_sampled, None
        is_planned = not (len(ordinary) or step.forests)
        if not is_planned:  # the counts of other rows are written into the copy
            num_sampled = num_sampled.copy()
        if len(ordinary):
            smaller = sub_batch_of_rows(batch, ordinary)
            at = plan.among_on_device[smaller.logits] if plan.narrow else smaller.logits
            if smaller.batch.num_draft_tokens:
                invalid = None if invalid_drafts is None else invalid_drafts[smaller.logits]
                of_ordinary = rejection_sampler(logits[at], smaller.batch, draft_logits, invalid)
            else:
                of_ordinary = sampler(logits[at] if plan.narrow else smaller.of(logits), smaller.batch)
            if of_ordinary.logprobs_tensors is not None:
                of_ordinary.logprobs_tensors = scatter_row_logprobs(of_ordinary.logprobs_tensors, smaller.logits, batch)

        of_others = 1 if of_ordinary is None else of_ordinary.sampled_token_ids.shape[1]
        sampled = self.selector.begin_step(batch.num_reqs, max(step.most_steps, of_others))
        amateur = None
        if self.amateur is not None and plan.contrasts:
            amateur = self.amateur.of_step(step.steps, self.groups, rows)
        with gpu_sync_allowed() if step.forests or plan.waits or self.rank_check is not None else nullcontext():
            step.selected = self.selector.select(step, plan, selection_logits, sampled, amateur)
            if step.forests:
                step.decided = self.speculation.accept(rows, logits, sampled, num_sampled)
            if self.rank_check is not None:
                decided = step.results([selected.packed.cpu().numpy() for selected in step.selected])
                arrays = {group_id: of_group.as_arrays() for group_id, of_group in decided.items()}
                self.rank_check.compare("beams", arrays)
        counts = plan.counts if is_planned else uploaded_for_search(num_sampled, self.device)
        counts, rejected = counts[:, : batch.num_reqs]
        step.decided_at.record()
        num_nans = get_num_nans(logits[batch.cu_num_logits[:-1].long()]) if sampler.compute_nans else None
        if of_ordinary is None:
            return SamplerOutput(sampled, None, num_nans, counts, rejected)
        own = of_ordinary.sampled_token_ids, of_ordinary.num_sampled, of_ordinary.num_rejected
        put = (
            launches.worker_module_for_gpus("worker.kernels.ordinary_rows").launch_put_sampled
            if launches.worker_runs_kernels_on(self.device)
            else put_sampled_rows
        )
        put(smaller.rows, own, sampled, counts, rejected)
        return SamplerOutput(sampled, of_ordinary.logprobs_tensors, num_nans, counts, rejected)

    def sample_tokens(self, grammar_output: GrammarOutput | None, *args: Any, **kwargs: Any) -> Any:
        if grammar_output is not None and (masks := row_mask_message(grammar_output)) is not None:
            bits = uploaded_for_search(masks.bits, self.device)
            self.step.masks = {group_id: bits[place] for group_id, place in masks.places.items()}
        if self.stages is not None and not self.is_last_pp_rank and self.execute_model_state is not None:
            self.stages.receive(self.step, self.execute_model_state.input_batch)
        output, step = super().sample_tokens(grammar_output, *args, **kwargs), self.step
        if not (step.selected or step.decided):
            return output
        return BeamRunnerOutput(output, step, self.main_stream, self.output_copy_stream)


class BeamRunnerOutput(AsyncModelRunnerOutput):
    """A step's output and its decisions for groups, on their way to the host with vLLM's own output.

    Args:
        stock: vLLM's output of the same step.
        step: The step's context, with its decisions.
        main_stream: The stream that computes them.
        copy_stream: The stream that copies them.
    """

    def __init__(self, stock: Any, step: RunnerStepContext, main_stream: Any, copy_stream: Any) -> None:
        self._stock, self._step = stock, step  # keeps the copies' sources alive
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with stream(copy_stream, main_stream):
            copy_stream.wait_event(step.decided_at)  # and not for the drafts that vLLM has computed since
            self._packed: list[np.ndarray] = [async_copy_to_np(selected.packed) for selected in step.selected]
            self._event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Waits for the copies, and attaches the decisions to vLLM's output."""
        output = self._stock.get_output()
        self._event.synchronize()
        attach_result_messages(output, self._step.results(self._packed))
        return output

    def get_kv_connector_output(self) -> Any:
        """The output of vLLM's KV connector, unchanged."""
        return self._stock.get_kv_connector_output()
