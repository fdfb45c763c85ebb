"""vLLM's V1 model runner with beam groups, and the worker that runs it on a GPU."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_trie.messages import attach_results
from vllm_trie.search.step import Step
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.select import select


class BeamModelRunner(GPUModelRunner):
    """Expands groups before the stock runner sees the step, and selects where it would sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beam_rows = BeamRows(self)
        self._decided: dict[str, Step] = {}

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self.beam_rows.expand(scheduler_output), *args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        selecting = [group_id for group_id, step in self.beam_rows.steps.items() if step.selects]
        if logits is None or not selecting:
            return super()._sample(logits, spec_decode_metadata)
        newest = torch.full((len(logits), 1), -1, dtype=torch.int32, device=logits.device)
        self._decided = select(self.beam_rows, logits, self._controlled(logits), newest)
        num_beam_rows = sum(len(self.beam_rows.groups[group_id].row_ids) for group_id in selecting)
        if num_beam_rows == len(logits):
            return SamplerOutput(sampled_token_ids=newest, logprobs_tensors=None)
        output = super()._sample(logits, spec_decode_metadata)
        output.sampled_token_ids = torch.where(newest >= 0, newest, output.sampled_token_ids)
        return output

    def _controlled(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits after penalties, biases, bans and custom processors, if any group has some.

        Processors that leave the best token alone run at each row's temperature, as in vLLM's sampler.
        """
        if not any(step.selects and step.rules.is_controlled for step in self.beam_rows.steps.values()):
            return logits
        metadata = self.input_batch.sampling_metadata
        own = self.sampler.apply_logits_processors(logits.to(torch.float32, copy=True), metadata, False)
        processors = [p for p in metadata.logitsprocs.argmax_invariant if not isinstance(p, MinPLogitsProcessor)]
        if processors:
            temperatures = torch.from_numpy(self.beam_rows.temperatures()).to(own.device)
            own /= temperatures
            for processor in processors:
                own = processor.apply(own)
            own *= temperatures
        return own

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if self._decided:
            attach_results(output, self._decided)
            self._decided = {}
        return output


class BeamGPUWorker(Worker):
    """vLLM's GPU worker around the V1 runner with beam groups."""

    def _make_model_runner(self) -> GPUModelRunner:
        return BeamModelRunner(self.vllm_config, self.device)
