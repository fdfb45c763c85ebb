"""Some rows of vLLM's batch as a batch of their own, for code that must not see the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_trie.search import search_spans
from vllm_trie.search.devices import ALIGNMENT, uploaded_together_for_search
from vllm_trie.worker import launches

# A batch's fields by row, by logit, and by token.
TAKEN = (
    *("idx_mapping", "seq_lens"),
    *("expanded_idx_mapping", "expanded_local_pos", "logits_indices"),
    *("input_ids", "positions", "is_padding"),
)


class RowSubBatch(NamedTuple):
    """Some rows of a batch."""

    batch: InputBatch  # of these rows alone
    rows: torch.Tensor  # [R] int64, their indices in the whole batch
    tokens: torch.Tensor  # [T] int64, indices of their tokens in the whole batch
    logits: torch.Tensor  # [N] int64, indices of their logits in the whole batch
    is_run: bool  # whether these logits are consecutive
    first_logits: int

    def of(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] from the logits of the whole batch; a view, if they are consecutive and aligned in it."""
        if self.is_run and self.first_logits * logits.stride(0) * logits.element_size() % ALIGNMENT == 0:
            return logits[self.first_logits : self.first_logits + len(self.logits)]
        return logits[self.logits]


def sub_batch_of_rows(batch: InputBatch, rows: np.ndarray) -> RowSubBatch:
    """Rows of a batch after the forward pass: nothing is padded, and the pass's buffers are not touched.

    Args:
        batch: vLLM's.
        rows: [R], their indices in it, ascending.
    """
    lengths, num_logits = np.diff(batch.query_start_loc_np)[rows], np.diff(batch.cu_num_logits_np)[rows]
    tokens_np = search_spans(batch.query_start_loc_np[rows], lengths)
    logits_np = search_spans(batch.cu_num_logits_np[rows], num_logits)
    query_starts, cu_num_logits = (np.concatenate([[0], n.cumsum()]).astype(np.int32) for n in (lengths, num_logits))
    # How far a row's tokens move from their places among those of all rows to those among these.
    moved_np = np.repeat(query_starts[:-1] - batch.query_start_loc_np[rows], num_logits)
    indices = [n.astype(np.int64, copy=False) for n in (rows, logits_np, moved_np, tokens_np)]
    at, logits, moved, tokens, starts, cumulative = uploaded_together_for_search(
        [*indices, query_starts, cu_num_logits], batch.input_ids.device
    )
    take = (
        launches.worker_module_for_gpus("worker.kernels.ordinary_rows").launch_take_rows
        if launches.worker_runs_kernels_on(at.device)
        else take_batch_rows
    )
    fields = dict(zip(TAKEN, take(at, logits, moved, tokens, [getattr(batch, name) for name in TAKEN]), strict=True))
    is_prefilling, counts = batch.is_prefilling_np[rows], _some_rows(batch.num_draft_tokens_per_req, rows)
    smaller = replace(
        batch,
        req_ids=[batch.req_ids[row] for row in rows],
        num_reqs=len(rows),
        num_reqs_after_padding=len(rows),
        idx_mapping_np=batch.idx_mapping_np[rows],
        num_scheduled_tokens=batch.num_scheduled_tokens[rows],
        num_tokens=len(tokens),
        num_tokens_after_padding=len(tokens),
        num_draft_tokens=0 if counts is None else int(counts.sum()),
        num_draft_tokens_per_req=counts,
        query_start_loc=starts,
        query_start_loc_np=query_starts,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(rows)],
        num_computed_tokens_np=batch.num_computed_tokens_np[rows],
        prefill_len_np=batch.prefill_len_np[rows],
        num_computed_prefill_tokens_np=batch.num_computed_prefill_tokens_np[rows],
        is_prefilling_np=is_prefilling,
        has_prefill=bool(is_prefilling.any()),
        cu_num_logits=cumulative,
        cu_num_logits_np=cu_num_logits,
        prompt_lens=_some_rows(batch.prompt_lens, at),
        prefill_runs_as_decode_np=_some_rows(batch.prefill_runs_as_decode_np, rows),
        max_query_len=None,
        fast_prefill=None,
        **fields,
    )
    first, last = logits_np[0], logits_np[-1]
    return RowSubBatch(smaller, at, tokens, logits, bool(last - first + 1 == len(logits_np)), int(first))


def take_batch_rows(
    rows: torch.Tensor, logits: torch.Tensor, moved: torch.Tensor, tokens: torch.Tensor, fields: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The fields `TAKEN` of a batch for some rows [R], logits [N] and tokens [T] of it.

    Args:
        moved: [N], how far the token of each logit moves to its place among these tokens.
        fields: Of the whole batch.
    """
    at = dict.fromkeys(TAKEN[:2], rows) | dict.fromkeys(TAKEN[2:5], logits) | dict.fromkeys(TAKEN[5:], tokens)
    own = [field[of_name] for field, of_name in zip(fields, at.values(), strict=True)]
    own[TAKEN.index("logits_indices")] += moved
    return own


def put_sampled_rows(
    rows: torch.Tensor, own: Sequence[torch.Tensor], sampled: torch.Tensor, counts: torch.Tensor, rejected: torch.Tensor
) -> None:
    """Writes what was sampled for rows [R] into the whole batch's results.

    Args:
        own: Tokens [R, n], and [R] how many there are, and how many were rejected.
        sampled: [rows, n or more].
        counts, rejected: [rows].
    """
    tokens, num_sampled, num_rejected = own
    sampled[rows, : tokens.shape[1]] = tokens.to(sampled.dtype)
    counts[rows], rejected[rows] = num_sampled.to(counts.dtype), num_rejected.to(rejected.dtype)


def _some_rows(values: Any, at: Any) -> Any:
    """The values of some rows; None where vLLM, or this version of it, has none."""
    return None if values is None else values[at]


def scatter_row_logprobs(tensors: LogprobsTensors, logits: torch.Tensor, batch: InputBatch) -> LogprobsTensors:
    """Log-probabilities of some logits [N], in the layout of all logits of the batch; zeros for the others.

    Args:
        tensors: Of the smaller batch.
        logits: [N], their indices among the batch's.
        batch: The whole one.
    """
    count = int(batch.cu_num_logits_np[-1])

    def spread(field: torch.Tensor) -> torch.Tensor:
        return field.new_zeros(count, *field.shape[1:]).index_copy_(0, logits, field)

    fields = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
    has_several = count > batch.num_reqs
    return LogprobsTensors(*map(spread, fields), batch.cu_num_logits_np.tolist() if has_several else None)
