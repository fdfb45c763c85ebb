"""What a head goes on from, kept by KV slot.

An EAGLE head reads of each token its embedding, and the target's hidden states at the token before it. vLLM's own
drafting writes the KV of the pair (states of token i, token i + 1) into slot i. Then the last slot of a block depends
on the token after the block, in which beams that share the block may differ. For groups, slot i holds the pair (states
of token i - 1, token i), which depends on tokens up to i alone. Positions only count as distances, so that the head
sees the pairs that it was trained on. The first token stands beside zeros.

The states themselves lie by slot, too, like one more layer of the KV cache: those of all tokens that the target has
computed, and those of the head at drafts, until the target computes these. So they are copied with blocks where beams
fork, and moved with tokens where drafts are accepted. A cached prefix has them, and so has a preempted group once it is
computed again. Only what vLLM's own drafting has computed of a prefix that a group shares has other pairs; then fewer
drafts may be accepted.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from vllm_trie.worker.kv_slots import ByToken


class HiddenStates:
    """The states of all tokens in a runner's KV cache.

    Args:
        runner: Whose engine has an EAGLE-3 head; its KV cache is there.
    """

    def __init__(self, runner: GPUModelRunner) -> None:
        config, speculator = runner.kv_cache_config, runner.speculator
        assert isinstance(speculator, EagleSpeculator)
        self._model = speculator.model
        self.layer = min(speculator.draft_attn_layer_names)
        (self.number,) = (n for n, group in enumerate(config.kv_cache_groups) if self.layer in group.layer_names)
        block_size = runner.block_tables.block_sizes[self.number]
        size = config.num_blocks, block_size, speculator.hidden_size
        self.by_token = ByToken(torch.zeros(size, dtype=speculator.dtype, device=runner.device), (block_size,))
        self.by_slot = self.by_token.contents.flatten(0, 1)  # [slots, H], the same memory

    @torch.inference_mode()
    def keep(self, forward: Any) -> None:
        """Those of all tokens that the target has computed; `forward` is vLLM's `ExecuteModelState`."""
        num_tokens = forward.input_batch.num_tokens
        slots = forward.slot_mappings_by_layer[self.layer][:num_tokens]
        states = torch.cat([of_layer[:num_tokens] for of_layer in forward.aux_hidden_states], dim=-1)
        self.by_slot[slots] = self._model.combine_hidden_states(states)
