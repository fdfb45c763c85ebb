"""Forward passes of vLLM's draft model over chosen rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

from vllm_trie.speculation.worker.draft_batch import DraftInputs
from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes


class DraftModel:
    """The draft model of a runner. Its layers use the same KV blocks as the target's.

    Args:
        runner: A runner whose engine has a draft model.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        assert isinstance(runner.speculator, DraftModelSpeculator)
        self._runner = runner
        self._speculator = runner.speculator

    def logits(self, inputs: DraftInputs) -> torch.Tensor:
        """Computes tokens, writes their KV, and returns the logits [wanted, V] after some of them."""
        hidden = self.forward(inputs)
        return self._speculator.model.compute_logits(hidden if inputs.wanted is None else hidden[inputs.wanted])

    def forward(self, inputs: DraftInputs) -> torch.Tensor:
        """Computes tokens, writes their KV, and returns hidden states [T, H]."""
        config = self._runner.kv_cache_config
        self._announce_trees(inputs)
        metadata = build_attn_metadata(
            attn_groups=self._speculator.attn_groups,
            num_reqs=len(inputs.ends),
            num_tokens=len(inputs.tokens),
            query_start_loc_gpu=inputs.starts,
            query_start_loc_cpu=torch.from_numpy(inputs.starts_on_host),
            max_query_len=int(np.diff(inputs.starts_on_host).max()),
            seq_lens=inputs.ends,
            max_seq_len=int(inputs.most_ends.max()),
            block_tables=inputs.tables,
            slot_mappings=inputs.slots,
            kv_cache_config=config,
            seq_lens_cpu_upper_bound=torch.from_numpy(inputs.most_ends),
            positions=inputs.positions,
        )
        return self._run(inputs, metadata, build_slot_mappings_by_layer(inputs.slots, config))

    def _run(self, inputs: DraftInputs, metadata: Any, slots: Any) -> torch.Tensor:
        """[T, H], hidden states of all tokens; `metadata` and `slots` are by layer."""
        assert isinstance(self._speculator, StandaloneARSpeculator)
        return self._speculator._run_model(inputs.tokens, inputs.positions, metadata, slots, None)

    def _announce_trees(self, inputs: DraftInputs) -> None:
        """Announces to the metadata builders of its layers which rows are trees, if any are."""
        for number, attn_groups in enumerate(self._speculator.attn_groups if inputs.sharing else ()):
            for attn_group in attn_groups:
                builder = attn_group.get_metadata_builder(0)
                assert isinstance(builder, SharesAttentionPrefixes)
                builder.announce([of_group[number] for of_group in inputs.sharing])


def draft_model_logits(runner: GPUModelRunner) -> Iterator[torch.Tensor]:
    """Logits as the draft model or head of a runner makes them: for kernel warm-up; none without one."""
    speculator = runner.speculator
    if isinstance(speculator, DraftModelSpeculator):
        hidden = torch.zeros(1, speculator.hidden_size, dtype=speculator.dtype, device=runner.device)
        yield speculator.model.compute_logits(hidden)
