"""Some rows of vLLM's batch as a batch of their own, for what shall not see the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_trie.search.spans import spans


def sub_batch(batch: InputBatch, rows: np.ndarray) -> tuple[InputBatch, torch.Tensor, torch.Tensor]:
    """Rows of a batch, which come after the forward: nothing is padded, and the forward's buffers are left alone.

    Args:
        batch: vLLM's.
        rows: [n] places in it, ascending.

    Returns:
        The smaller batch, and which tokens [T] and logits [N] of the batch are its.
    """
    device = batch.input_ids.device

    def on_device(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return async_tensor_h2d(values, device=device, dtype=dtype)

    lengths, num_logits = np.diff(batch.query_start_loc_np)[rows], np.diff(batch.cu_num_logits_np)[rows]
    tokens = on_device(spans(batch.query_start_loc_np[rows], lengths))
    logits = on_device(spans(batch.cu_num_logits_np[rows], num_logits))
    query_starts, cu_num_logits = (np.concatenate([[0], n.cumsum()]).astype(np.int32) for n in (lengths, num_logits))
    at = on_device(rows)
    # Where the tokens of a row lie among those of all rows, they lie among those of these.
    moved = on_device(np.repeat(query_starts[:-1] - batch.query_start_loc_np[rows], num_logits))
    is_prefilling, counts = batch.is_prefilling_np[rows], _some(batch.num_draft_tokens_per_req, rows)
    smaller = replace(
        batch,
        req_ids=[batch.req_ids[row] for row in rows],
        num_reqs=len(rows),
        num_reqs_after_padding=len(rows),
        idx_mapping=batch.idx_mapping[at],
        idx_mapping_np=batch.idx_mapping_np[rows],
        expanded_idx_mapping=batch.expanded_idx_mapping[logits],
        expanded_local_pos=batch.expanded_local_pos[logits],
        num_scheduled_tokens=batch.num_scheduled_tokens[rows],
        num_tokens=len(tokens),
        num_tokens_after_padding=len(tokens),
        num_draft_tokens=0 if counts is None else int(counts.sum()),
        num_draft_tokens_per_req=counts,
        query_start_loc=on_device(query_starts, torch.int32),
        query_start_loc_np=query_starts,
        seq_lens=batch.seq_lens[at],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(rows)],
        num_computed_tokens_np=batch.num_computed_tokens_np[rows],
        prefill_len_np=batch.prefill_len_np[rows],
        num_computed_prefill_tokens_np=batch.num_computed_prefill_tokens_np[rows],
        is_prefilling_np=is_prefilling,
        has_prefill=bool(is_prefilling.any()),
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
        is_padding=batch.is_padding[tokens],
        logits_indices=batch.logits_indices[logits] + moved,
        cu_num_logits=on_device(cu_num_logits, torch.int32),
        cu_num_logits_np=cu_num_logits,
        prompt_lens=_some(batch.prompt_lens, at),
        prefill_runs_as_decode_np=_some(batch.prefill_runs_as_decode_np, rows),
        max_query_len=None,
        fast_prefill=None,
    )
    return smaller, tokens, logits


def _some(values: Any, at: Any) -> Any:
    """Those of some rows; None where vLLM, or this version of it, has none."""
    return None if values is None else values[at]


def scatter_logprobs(tensors: LogprobsTensors, logits: torch.Tensor, batch: InputBatch) -> LogprobsTensors:
    """What vLLM reports of some logits [N], as what it reports of all logits of the batch; of the others, nothing.

    Args:
        tensors: Of the smaller batch.
        logits: [N], which of the batch's they are.
        batch: The whole one.
    """
    count = int(batch.cu_num_logits_np[-1])

    def spread(field: torch.Tensor) -> torch.Tensor:
        return field.new_zeros(count, *field.shape[1:]).index_copy_(0, logits, field)

    fields = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
    has_several = count > batch.num_reqs
    return LogprobsTensors(*map(spread, fields), batch.cu_num_logits_np.tolist() if has_several else None)
