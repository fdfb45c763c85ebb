"""The draft model: a Llama of few layers and few output tokens that shares all else with its target.

Its layers and its vocabulary are committed, in the folder draft; `join` adds the target's embeddings. vLLM runs it as
`DraftVocabularyLlama` of `vllm_trie.speculation.worker.draft_vocabulary`, `DraftInTransformers` is the same in
transformers.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from shutil import copy
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

LAYERS = "layers.safetensors"
EMBEDDINGS = "model.embed_tokens.weight"
OFFSETS = "d2t"  # [draft_vocab_size]: each token's number in the target's vocabulary, less its own number
ARCHITECTURE = "DraftVocabularyLlama"
OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


class DraftInTransformers(LlamaForCausalLM):
    """The draft model in transformers: tokens outside its vocabulary have probability 0."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer(OFFSETS, torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def vocabulary(self) -> torch.Tensor:
        """[draft_vocab_size] int64, the target's numbers of its tokens."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(self, *args: Any, **options: Any) -> Any:
        """As `LlamaForCausalLM.forward`; logits are [batch, tokens, V] of the target's vocabulary."""
        output = super().forward(*args, **options)
        own = output.logits
        output.logits = own.new_full((*own.shape[:-1], self.config.vocab_size), float("-inf"))
        output.logits[..., self.vocabulary] = own
        return output


def version(layers: Path) -> str:
    """Names what is committed, so that what was joined from something else is not taken for it."""
    return hashlib.sha256((layers / LAYERS).read_bytes() + (layers / "config.json").read_bytes()).hexdigest()[:12]


def save_layers(model: LlamaForCausalLM, vocabulary: torch.Tensor, folder: Path) -> None:
    """Save what is the draft model's own, in bfloat16.

    Args:
        model: Whose embeddings are the target's.
        vocabulary: [draft_vocab_size] int64, ascending, the tokens it may draft.
        folder: For its layers and its configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: weight.to(torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
        if name not in (EMBEDDINGS, "lm_head.weight")
    }
    weights[OFFSETS] = (vocabulary - torch.arange(len(vocabulary))).to(torch.int32)
    save_file(weights, folder / LAYERS, metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("_name_or_path", None)  # a folder of the machine that trained it
    own = {"architectures": [ARCHITECTURE], "draft_vocab_size": len(vocabulary), "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({**config, **own, "dtype": "bfloat16"}, indent=2) + "\n")


def join(layers: Path, target: Path, folder: Path) -> None:
    """Make a model folder of a draft's own layers and its target's embeddings and tokenizer."""
    weights = load_file(layers / LAYERS)
    with safe_open(target / "model.safetensors", framework="pt") as of_target:
        embeddings = of_target.get_tensor(EMBEDDINGS).to(torch.bfloat16)
    weights[OFFSETS] = weights[OFFSETS].long()
    vocabulary = torch.arange(len(weights[OFFSETS])) + weights[OFFSETS]
    weights |= {EMBEDDINGS: embeddings, "lm_head.weight": embeddings[vocabulary].clone()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    copy(layers / "config.json", folder)
    for name in OF_TOKENIZER:
        copy(target / name, folder)
