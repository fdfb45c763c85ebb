"""vLLM's V1 model runner with beam groups."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import MinPLogitsProcessor

from vllm_trie.messages import Decided, attach_results
from vllm_trie.worker.select import select
from vllm_trie.worker.v1_speculation import SpeculatingModelRunner, last_logits
from vllm_trie.worker.verify import verify


class BeamModelRunner(SpeculatingModelRunner):
    """Expands groups before the stock runner sees the step, and selects where it would sample."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decided: dict[str, Decided] = {}

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        return super().execute_model(self.beam_rows.expand(scheduler_output), *args, **kwargs)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        rows, batch = self.beam_rows, self.input_batch
        selecting = [group_id for group_id, step in rows.steps.items() if step.selects]
        if logits is None or not selecting:
            return super()._sample(logits, spec_decode_metadata)
        last = None if self.speculator is None else last_logits(spec_decode_metadata)
        of_rows = logits if last is None else logits[torch.from_numpy(last).to(logits.device)]
        most_steps = max(
            1 if (grant := rows.steps[group_id].grant) is None else 1 + grant.num_layers for group_id in selecting
        )
        newest = torch.full((batch.num_reqs, most_steps), -1, dtype=torch.int32, device=logits.device)
        self._decided = select(rows, of_rows, self._controlled(of_rows), newest)
        num_spare_rows = 0
        if self.speculator is not None:
            self._decided |= verify(rows, self.speculator, logits, self.controlled_after, newest)
            num_spare_rows = sum(len(rows.groups[group_id].spare_ids) for group_id in selecting)
        if self.rank_check is not None:
            self.rank_check.compare("beams", {group_id: one.as_arrays() for group_id, one in self._decided.items()})
        if num_spare_rows + sum(len(rows.groups[group_id].row_ids) for group_id in selecting) == batch.num_reqs:
            return SamplerOutput(sampled_token_ids=newest, logprobs_tensors=None)
        output = super()._sample(logits if last is None else logits[: last[-1] + 1], spec_decode_metadata)
        is_ordinary = newest[:, :1] < 0
        is_ordinary[batch.num_reqs - num_spare_rows :] = False
        width = max(most_steps, output.sampled_token_ids.shape[1])
        sampled, newest = _padded(output.sampled_token_ids, width), _padded(newest, width)
        if output.logprobs_tensors is not None and width > output.sampled_token_ids.shape[1]:
            output.logprobs_tensors = _padded_logprobs(output.logprobs_tensors, batch.num_reqs, width)
        output.sampled_token_ids = torch.where(is_ordinary, sampled, newest)
        return output

    def _controlled(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits after penalties, biases, bans and custom processors, if any group's plain step has some.

        Processors that leave the best token alone run at each row's temperature, as in vLLM's sampler.
        """
        plain = (step for step in self.beam_rows.steps.values() if step.selects and step.grant is None)
        if not any(step.rules.is_controlled for step in plain):
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


def _padded(token_ids: torch.Tensor, width: int) -> torch.Tensor:
    """Tokens [R, k] as [R, width]; -1 stands for none."""
    return torch.nn.functional.pad(token_ids, (0, width - token_ids.shape[1]), value=-1)


def _padded_logprobs(tensors: LogprobsTensors, num_rows: int, width: int) -> LogprobsTensors:
    """What belongs to tokens [R, k], counted through all rows, as what belongs to tokens [R, width]."""

    def padded(field: torch.Tensor) -> torch.Tensor:
        by_row = field.reshape(num_rows, -1, *field.shape[1:])
        missing = by_row.new_zeros(num_rows, width - by_row.shape[1], *field.shape[1:])
        return torch.cat([by_row, missing], dim=1).flatten(0, 1)

    fields = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
    return LogprobsTensors(*map(padded, fields))
