"""Forwards of vLLM's draft model over rows of our choosing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_trie.search.spans import spans


class DraftModel:
    """The draft model of a runner. Its layers lie in the same KV blocks as the target's.

    Args:
        runner: A runner whose engine has a draft model.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        assert isinstance(runner.speculator, StandaloneARSpeculator)
        self._runner = runner
        self._speculator = runner.speculator

    def logits(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], blocks: Sequence[np.ndarray]
    ) -> torch.Tensor:
        """Compute some tokens of every row, write their KV, and return what may come after the last of each.

        Args:
            tokens: For each row the tokens to compute, at least one.
            starts: For each row the position of the first of them.
            blocks: By KV cache group: [rows, columns] int32, the blocks of each row from its first token on.

        Returns:
            [rows, V] logits.
        """
        config, speculator = self._runner.kv_cache_config, self._speculator
        lengths = np.array([len(row) for row in tokens], dtype=np.int32)
        ends = np.array(starts, dtype=np.int32) + lengths
        query_starts = np.zeros(len(tokens) + 1, dtype=np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        row, at = np.repeat(np.arange(len(tokens)), lengths), spans(np.array(starts, dtype=np.int64), lengths)
        slots = [
            table[row, at // block_size].astype(np.int64) * block_size + at % block_size
            for table, block_size in zip(blocks, self._runner.block_tables.block_sizes, strict=True)
        ]
        slot_mappings, positions = self._on_device(np.stack(slots)), self._on_device(at)
        query_starts_on_device = self._on_device(query_starts)
        metadata = build_attn_metadata(
            attn_groups=speculator.attn_groups,
            num_reqs=len(tokens),
            num_tokens=len(row),
            query_start_loc_gpu=query_starts_on_device,
            query_start_loc_cpu=torch.from_numpy(query_starts),
            max_query_len=int(lengths.max()),
            seq_lens=self._on_device(ends),
            max_seq_len=int(ends.max()),
            block_tables=[self._on_device(np.ascontiguousarray(table)) for table in blocks],
            slot_mappings=slot_mappings,
            kv_cache_config=config,
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            positions=positions,
        )
        token_ids = self._on_device(np.fromiter((token for row in tokens for token in row), dtype=np.int32))
        by_layer = build_slot_mappings_by_layer(slot_mappings, config)
        hidden = speculator._run_model(token_ids, positions, metadata, by_layer, None)
        return speculator.model.compute_logits(hidden[query_starts_on_device[1:].long() - 1])

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return async_tensor_h2d(array, device=self._runner.device)
