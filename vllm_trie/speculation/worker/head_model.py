"""Forward passes of an EAGLE head over chosen rows."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.speculation.worker.draft_batch import DraftInputs
from vllm_trie.speculation.worker.draft_model import DraftModel
from vllm_trie.speculation.worker.tree_rows import DraftTreeRows


class DraftHeadModel(DraftModel):
    """The head of a runner: a draft model that also reads the hidden states at the token before each.

    Args:
        runner: A runner whose engine has a head.
        rows: The runner's, which have the hidden states.
    """

    def __init__(self, runner: GPUModelRunner, rows: DraftTreeRows) -> None:
        super().__init__(runner)
        self._rows = rows

    def _run(self, inputs: DraftInputs, metadata: Any, slots: Any) -> torch.Tensor:
        """See `DraftModel`. Where logits are wanted, drafts follow, which read the head's own states."""
        speculator, states, num_tokens = self._speculator, self._rows.hidden_states, len(inputs.tokens)
        assert isinstance(speculator, EagleSpeculator)
        assert states is not None
        buffers = speculator.input_buffers
        buffers.input_ids[:num_tokens], buffers.positions[:num_tokens] = inputs.tokens, inputs.positions
        before = inputs.slots_before(states.number)  # the first token has zeros before it
        states_before = states.by_slot[before.clamp(min=0)].masked_fill_((before < 0)[:, None], 0)
        speculator.hidden_states[:num_tokens] = states_before
        hidden, own = speculator._run_model(num_tokens, metadata, slots, None)
        to = slots[states.layer]
        if inputs.wanted is None:
            states.by_slot[to] = own[:num_tokens]
        elif len(inputs.wanted):
            states.by_slot[to[inputs.wanted]] = own[inputs.wanted]
        return hidden
