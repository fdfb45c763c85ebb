"""Forwards of an EAGLE head over rows of our choosing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.worker.draft_model import DraftBatch, DraftModel
from vllm_trie.worker.hidden_states import HiddenStates
from vllm_trie.worker.rows import Rows


class HeadModel(DraftModel):
    """The head of a runner, as a draft model that also reads the hidden states at the token before each.

    Args:
        runner: A runner whose engine has a head.
        rows: Of the runner.
    """

    def __init__(self, runner: GPUModelRunner, rows: Rows) -> None:
        super().__init__(runner)
        self._rows = rows

    def _run(
        self, batch: DraftBatch, token_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: Any
    ) -> torch.Tensor:
        """See `DraftModel`. Where logits are wanted, drafts follow: these go on from the head's own states."""
        speculator, states, num_tokens = self._speculator, self._rows.hidden_states, len(token_ids)
        assert isinstance(speculator, EagleSpeculator)
        assert states is not None
        buffers = speculator.input_buffers
        buffers.input_ids[:num_tokens], buffers.positions[:num_tokens] = token_ids, positions
        speculator.hidden_states[:num_tokens] = self._beside(batch, states)
        hidden, own = speculator._run_model(num_tokens, metadata, slots, None)
        if batch.wanted:
            wanted = self._on_device(np.array(batch.wanted))
            states.by_slot[slots[states.layer][wanted]] = own[wanted]
        return hidden

    def _beside(self, batch: DraftBatch, states: HiddenStates) -> torch.Tensor:
        """[T, H] the states at the token before each; zeros before the first."""
        parents = np.array(batch.parents)
        before = self._slots(batch, np.maximum(parents, 0))[states.number]
        beside = states.by_slot[self._on_device(before)]
        beside[self._on_device(np.flatnonzero(parents < 0))] = 0
        return beside
