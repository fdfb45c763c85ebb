"""A Llama for drafts that knows all tokens and proposes few: its output projection has rows for the likeliest alone.

With a large vocabulary that projection costs a small draft model more than all its layers. `plugin.register` makes the
architecture known to vLLM; a checkpoint names it in its config.json. As in EAGLE-3's checkpoints, `draft_vocab_size`
is the number of tokens that can be drafted, and `d2t` [draft_vocab_size] holds each one's number in the
target's vocabulary, less its own number. FR-Spec (arXiv 2502.14856) is where the idea is measured.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix


class DraftVocabularyLlama(LlamaForCausalLM):
    """vLLM's Llama, where tokens outside the draft vocabulary have logits of -inf.

    Args:
        vllm_config: Of the draft model, whose `draft_vocab_size` says how many tokens it may propose.
        prefix: Of its layers' names.

    Raises:
        ValueError: the checkpoint says no `draft_vocab_size`, or ties its input and output embeddings.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        size = getattr(config, "draft_vocab_size", None)
        if not isinstance(size, int) or not 0 < size <= config.vocab_size:
            limits = f"draft_vocab_size={size} of {vllm_config.model_config.model} is not in 1..{config.vocab_size}"
            raise ValueError(f"{limits}; {type(self).__name__} needs it in config.json")
        if config.tie_word_embeddings:
            raise ValueError(f"{type(self).__name__} has an output projection of its own; tie_word_embeddings is true")
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        head = maybe_prefix(prefix, "lm_head")
        self.lm_head = ParallelLMHead(size, config.hidden_size, quant_config=vllm_config.quant_config, prefix=head)
        self.logits_processor = LogitsProcessor(size, scale=getattr(config, "logit_scale", 1.0))
        self.d2t = torch.nn.Parameter(torch.zeros(size, dtype=torch.int64), requires_grad=False)

    @property
    def draft_id_to_target_id(self) -> torch.nn.Parameter:
        """The draft vocabulary, as vLLM's `get_top_tokens` knows it."""
        return self.d2t

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, V] of the target's vocabulary; None on ranks that gather none."""
        own = super().compute_logits(hidden_states)
        if own is None:
            return None
        logits = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t, own)
