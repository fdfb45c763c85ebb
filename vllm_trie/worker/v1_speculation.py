"""What speculation adds to vLLM's V1 runner: forests among the rows, and stock drafting for the ordinary ones alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_trie.worker.rank_check import rank_check
from vllm_trie.worker.rows import BeamRows
from vllm_trie.worker.speculate import Speculator


class SpeculatingModelRunner(GPUModelRunner):
    """A runner that drafts for beam groups, where its engine has a draft model.

    Rows of decoding groups come last in the batch, the rows of their forests after those, so that vLLM's own
    drafter can be given what comes before.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.beam_rows = BeamRows(self)
        self.rank_check = rank_check(self.vllm_config)
        self.speculator = None if self.speculative_config is None else Speculator(self, self.beam_rows, self.rank_check)
        self._num_stock_rows = 0  # that vLLM's drafter drafts for: ordinary requests, and groups that are one row yet

    def calculate_reorder_batch_threshold(self) -> None:
        super().calculate_reorder_batch_threshold()
        if self.speculator is not None and self.reorder_batch_threshold is not None:
            raise ValueError(
                "trie_beam speculates only with attention backends that take the rows of a batch in any order; "
                "start vLLM with --attention-backend FLASH_ATTN or TRITON_ATTN, or without speculative_config"
            )

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        corrections = super()._update_states(scheduler_output)
        if self.speculator is not None:
            self.speculator.draft(scheduler_output)
        return corrections

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        super()._may_reorder_batch(scheduler_output)
        if self.speculator is not None:
            self._num_stock_rows = self.beam_rows.move_to_the_end()

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> tuple[torch.Tensor, SpecDecodeMetadata | None, int]:
        indices, metadata, most_sampled = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if self.speculator is not None and self.speculator.groups:
            inner = self.speculator.logits_indices(self.query_start_loc.np, last_logits(metadata))
            indices = torch.cat([indices, torch.from_numpy(inner).to(indices)])
        return indices, metadata, most_sampled

    @property
    def _longest_stock_row(self) -> int:
        """Tokens of the longest row that vLLM's drafter drafts for."""
        return max(self.optimistic_seq_lens_cpu[: self._num_stock_rows].tolist(), default=0)

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        if common_attn_metadata is not None:
            common_attn_metadata = replace(common_attn_metadata, max_seq_len=self._longest_stock_row)
        return super()._input_fits_in_drafter(common_attn_metadata)

    def propose_draft_token_ids(
        self,
        scheduler_output: SchedulerOutput,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        count = self._num_stock_rows
        drafts = torch.zeros((self.input_batch.num_reqs, self.num_spec_tokens), dtype=torch.int64, device=self.device)
        if count > 0:
            drafts[:count] = super().propose_draft_token_ids(
                scheduler_output,
                sampled_token_ids[:count],
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                replace(
                    spec_decode_metadata,
                    num_draft_tokens=spec_decode_metadata.num_draft_tokens[:count],
                    cu_num_draft_tokens=spec_decode_metadata.cu_num_draft_tokens[:count],
                    cu_num_sampled_tokens=spec_decode_metadata.cu_num_sampled_tokens[:count],
                ),
                replace(
                    common_attn_metadata.unpadded(int(self.query_start_loc.np[count]), count),
                    max_seq_len=self._longest_stock_row,
                ),
                slot_mappings,
            )
        return drafts

    def controlled_after(self, logits: torch.Tensor, rows: np.ndarray, generated: list[list[int]]) -> torch.Tensor:
        """Logits [N, V] after the penalties, bans and bad words of given rows, for other histories than the rows have.

        Args:
            rows: [N] places in the batch.
            generated: For each what it has generated. Its prompt is that of its row.
        """
        own = self.input_batch.sampling_metadata
        at = torch.from_numpy(rows).to(logits.device)

        def of_rows(field: torch.Tensor | None) -> Any:
            return None if field is None else field[at]

        metadata = replace(
            own,
            prompt_token_ids=of_rows(own.prompt_token_ids),
            frequency_penalties=of_rows(own.frequency_penalties),
            presence_penalties=of_rows(own.presence_penalties),
            repetition_penalties=of_rows(own.repetition_penalties),
            allowed_token_ids_mask=of_rows(own.allowed_token_ids_mask),
            bad_words_token_ids={
                i: words for i, row in enumerate(rows.tolist()) if (words := own.bad_words_token_ids.get(row))
            },
            output_token_ids=generated,
            logitsprocs=LogitsProcessors(),  # with a draft model vLLM has none but min_tokens, which is ours
        )
        return self.sampler.apply_logits_processors(logits.to(torch.float32, copy=True), metadata, False)


def last_logits(metadata: SpecDecodeMetadata | None) -> np.ndarray:
    """[R] where the logits after the last token of each row of the batch are, with a draft model."""
    assert metadata is not None
    return np.cumsum(np.array(metadata.num_draft_tokens) + 1) - 1
