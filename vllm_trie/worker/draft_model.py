"""Forwards of vLLM's draft model over rows of our choosing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class DraftModel:
    """The draft model of a runner. Its layers lie in the same KV blocks as the target's.

    Args:
        runner: A runner whose engine has a draft model, and one KV cache group.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        assert isinstance(runner.drafter, DraftModelProposer)
        self._proposer = runner.drafter
        self._vllm_config = runner.vllm_config
        self._device = runner.device
        self._cache_config = runner.cache_config  # its block_size is final only once there is a KV cache

    def logits(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], blocks: np.ndarray) -> torch.Tensor:
        """Compute some tokens of every row, write their KV, and return what may come after the last of each.

        Args:
            tokens: For each row the tokens to compute, at least one.
            starts: For each row the position of the first of them.
            blocks: [rows, columns] int32, the blocks of each row from its first token on.

        Returns:
            [rows, V] logits.
        """
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        ends = np.array(starts, dtype=np.int32) + lengths
        query_starts = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        row = np.repeat(np.arange(len(tokens)), lengths)
        positions = np.repeat(np.array(starts, dtype=np.int64), lengths) + np.arange(len(row)) - query_starts[row]
        block_size = self._cache_config.block_size
        slots = blocks[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        on_host = torch.from_numpy(query_starts)
        metadata = CommonAttentionMetadata(
            query_start_loc=self._on_device(query_starts),
            query_start_loc_cpu=on_host,
            seq_lens=self._on_device(ends),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            num_reqs=len(tokens),
            num_actual_tokens=len(row),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._on_device(np.ascontiguousarray(blocks)),
            slot_mapping=self._on_device(slots),
            causal=True,
            positions=self._on_device(positions),
        )
        _, per_layer = self._proposer.build_per_group_and_layer_attn_metadata(metadata)
        with set_forward_context(
            per_layer,
            self._vllm_config,
            num_tokens=len(row),
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(per_layer, metadata.slot_mapping),
        ):
            hidden = self._proposer.model(
                input_ids=self._on_device(np.fromiter((t for row in tokens for t in row), dtype=np.int32)),
                positions=metadata.positions,
                inputs_embeds=None,
            )
            return self._proposer.model.compute_logits(hidden[metadata.query_start_loc[1:].long() - 1])

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
