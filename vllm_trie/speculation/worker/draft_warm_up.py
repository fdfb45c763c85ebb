"""Warms up vLLM kernels that prepare draft inputs, in the variants that vLLM's own warm-up leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator, prepare_prefill_inputs

if TYPE_CHECKING:
    from vllm_trie.worker.runner import BeamModelRunner

MOST_TOKENS = 512  # of a request, in one pass of a draft model's kernel


@torch.inference_mode()
def warm_up_draft_inputs(runner: BeamModelRunner, drafts: torch.Tensor | None) -> None:
    """Launches them for a batch of one request without tokens, so that they only write scratch memory.

    Args:
        drafts: [slots, drafts] int64, the drafts of trees, if there are any.
    """
    zeros = torch.zeros(2, dtype=torch.int32, device=runner.device)
    batch: Any = SimpleNamespace(num_reqs=1, num_tokens=0, input_ids=zeros, query_start_loc=zeros, seq_lens=zeros[:1])
    batch.positions, batch.idx_mapping, batch.cu_num_logits = zeros.long(), zeros[:1].long(), zeros
    if drafts is not None:
        _combine_with_draft_trees(runner, batch, drafts)
    if isinstance(runner.speculator, StandaloneARSpeculator):
        _prepare_draft_prompts(runner.speculator, runner.req_states.last_sampled_tokens, batch)


def _combine_with_draft_trees(runner: BeamModelRunner, batch: Any, drafts: torch.Tensor) -> None:
    """The target's inputs with the drafts of trees, of which a row may have more than vLLM drafts."""
    combine_sampled_and_draft_tokens(
        torch.zeros_like(batch.input_ids),
        batch.idx_mapping,
        runner.req_states.last_sampled_tokens,
        batch.query_start_loc,
        batch.seq_lens,
        runner.req_states.prefill_len.gpu,
        drafts,
        batch.cu_num_logits,
        num_logits=1,
        num_new_sampled_tokens=runner.model_state.num_new_sampled_tokens_per_step,
    )


def _prepare_draft_prompts(speculator: StandaloneARSpeculator, last_sampled: torch.Tensor, batch: Any) -> None:
    """The draft model's inputs after prompts, for each length that the kernel is compiled for."""
    for exponent in range(MOST_TOKENS.bit_length()):
        batch.query_start_loc_np = np.array([0, 1 << exponent])
        prepare_prefill_inputs(
            speculator.input_buffers,
            batch,
            last_sampled,
            batch.seq_lens,
            speculator.expanded_input_ids,
            speculator.expanded_positions,
            speculator.last_token_indices,
            speculator.max_num_reqs,
            speculator.max_model_len,
        )
