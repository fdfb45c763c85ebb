"""A Llama for drafts that reads all tokens and proposes few: its output projection only has rows for the likeliest.

With a large vocabulary that projection costs a small draft model more than all its layers. `plugin.register` registers
the architecture with vLLM; a checkpoint names it in its config.json. As in EAGLE-3's checkpoints, `draft_vocab_size`
is the number of tokens that can be drafted, and `d2t` [draft_vocab_size] is each token's id in the target's vocabulary
minus its own index. FR-Spec (arXiv 2502.14856) measures the idea.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix


class DraftVocabularyLlama(LlamaForCausalLM):
    """vLLM's Llama, with logits of -inf for tokens outside the draft vocabulary.

    Args:
        vllm_config: The draft model's; `draft_vocab_size` of its config.json is how many tokens it may propose.
        prefix: Of its layers' names.

    Raises:
        ValueError: the checkpoint has no valid `draft_vocab_size`, or ties its input and output embeddings.
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
        """The draft vocabulary, under the name that vLLM's `get_top_tokens` reads."""
        return self.d2t

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[rows, V] over the target's vocabulary; None on ranks that gather none."""
        own = super().compute_logits(hidden_states)
        if own is None:
            return None
        logits = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t, own)
