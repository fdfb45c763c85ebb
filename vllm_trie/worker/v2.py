"""vLLM's V2 model runner with beam groups."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_trie.messages import attach_results
from vllm_trie.worker.device_select import InBatch, Selected, select
from vllm_trie.worker.rank_check import rank_check
from vllm_trie.worker.slots import BeamSlots

NOTHING = Selected({}, [])


class BeamModelRunnerV2(GPUModelRunner):
    """Expands groups before the stock runner sees the step, and selects where it would sample.

    Without groups in a step, as in all that the runner does to warm up, it is the stock runner.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beam_slots = BeamSlots(self)
        self._batch: InputBatch | None = None
        self._selected = NOTHING
        self._rank_check = rank_check(self.vllm_config)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        assert self.sampler is not None
        self.sampler.sample = partial(self._sample, self.sampler.sample)
        verifier: Any = self.rejection_sampler  # type: ignore[has-type]
        if verifier is not None:
            self.rejection_sampler = partial(self._verify, verifier)

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: Any = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Any:
        if dummy_run:
            self.beam_slots.clear_step()
        else:
            scheduler_output = self.beam_slots.expand(scheduler_output)
        return super().execute_model(scheduler_output, intermediate_tensors, dummy_run, **kwargs)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        self.beam_slots.write_first_tokens()

    def sample(self, hidden_states: torch.Tensor, input_batch: InputBatch, grammar_output: Any) -> Any:
        self._batch = input_batch
        return super().sample(hidden_states, input_batch, grammar_output)

    def _sample(self, stock: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where vLLM's sampler draws tokens from logits [R, V]: beam rows get theirs by the search."""
        sampled, processed = stock(logits, *args, **kwargs)
        self._select(logits, processed, sampled)
        return sampled, processed

    def _verify(self, stock: Any, logits: torch.Tensor, batch: InputBatch, *args: Any) -> SamplerOutput:
        """Where vLLM verifies drafts of ordinary requests, [R + drafts, V]: the same for beam rows, which have none."""
        output = stock(logits, batch, *args)
        processed = logits
        if any(step.rules.is_controlled for step in self.beam_slots.steps.values()):
            assert self.sampler is not None
            processed = self.sampler.apply_sampling_params(
                logits,
                batch.expanded_idx_mapping,
                batch.idx_mapping,
                batch.idx_mapping_np,
                batch.positions[batch.logits_indices],
                batch.input_ids[batch.logits_indices],
                batch.expanded_local_pos,
                batch.seq_lens_cpu_upper_bound.numpy(),
                skip_top_k_top_p=True,
            )
        first = batch.cu_num_logits[:-1].long()
        self._select(logits[first], processed[first], output.sampled_token_ids[:, 0])
        return output

    def _select(self, logits: torch.Tensor, controlled: torch.Tensor, sampled: torch.Tensor) -> None:
        rows, batch = self.beam_slots, self._batch
        if not any(step.selects for step in rows.steps.values()):
            return
        assert batch is not None
        num_tokens = batch.seq_lens_cpu_upper_bound.tolist()
        in_batch = InBatch(
            {row_id: place for place, row_id in enumerate(batch.req_ids)},
            {row_id: num_tokens[place] for place, row_id in enumerate(batch.req_ids)},
        )
        self._selected = select(rows, in_batch, logits, controlled, sampled)
        if self._rank_check is not None:  # here, and not in what waits for the copies: one rank alone does that
            decided = self._selected.decided([packed.cpu().numpy() for _, packed in self._selected.on_device])
            self._rank_check.compare("beams", {group_id: one.as_arrays() for group_id, one in decided.items()})

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        selected, self._selected = self._selected, NOTHING
        if selected == NOTHING:
            return output
        return BeamOutput(output, selected, self.main_stream, self.output_copy_stream)


class BeamOutput(AsyncModelRunnerOutput):
    """A step's output and what it decided of groups, on its way to the host beside vLLM's own.

    Args:
        stock: vLLM's output of the same step.
        selected: What was decided.
        main_stream: Where it is computed.
        copy_stream: Where it is copied.
    """

    def __init__(self, stock: Any, selected: Selected, main_stream: Any, copy_stream: Any) -> None:
        self._stock, self._selected = stock, selected  # which keeps what is copied from alive
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with stream(copy_stream, main_stream):
            copy_stream.wait_stream(main_stream)
            self._packed: list[np.ndarray] = [async_copy_to_np(packed) for _, packed in selected.on_device]
            self._event.record(copy_stream)

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the copies."""
        output = self._stock.get_output()
        self._event.synchronize()
        attach_results(output, self._selected.decided(self._packed))
        return output

    def get_kv_connector_output(self) -> Any:
        """vLLM's own; there is no KV connector in an engine with beam groups."""
        return self._stock.get_kv_connector_output()
