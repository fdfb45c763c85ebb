"""A model whose logits are exact on every processor, in whichever order it sums, and depend on the whole history.

Each token at its position has a code of small integers. Attention looks at all tokens alike, so its output times the
number of tokens is the sum of their codes, an integer, which rounding gives back exactly. A hash of this sum chooses a
row of a table: the logits. So a row that reads a wrong KV block, or a tree that hides a wrong draft, gets other logits.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models import ModelRegistry

from tests.support.engine import TRAINED_TARGET

CODE_SIZE, NUM_CODES, NUM_ROWS, VOCAB_SIZE, EOS = 32, 8191, 1024, 2048, 1
OF_TOKEN, OF_POSITION = 4093, 2741  # where a code stands: these times its token and its position
FINE, COARSE = 2.0**-10, 0.5  # units of logits: many continuations of a beam are equal where they are coarse
SPREAD = 5  # of logits, about their standard deviation
END = 9  # by which EOS is more probable than others
TEXT_FILES = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


@cache
def logits_table(unit: float, drift: float) -> torch.Tensor:
    """[NUM_ROWS, VOCAB_SIZE] float32, the same on every processor.

    Args:
        unit: A power of two, of which all logits are multiples.
        drift: Of a draft model: how far its logits are from the target's, in parts of their spread.
    """
    table = _bell_curve(1)
    if drift:
        table = table + drift * _bell_curve(2)
    table[:, EOS] += END
    return torch.from_numpy((table / unit).round().astype(np.float32) * np.float32(unit))


def _bell_curve(seed: int) -> np.ndarray:
    """[NUM_ROWS, VOCAB_SIZE] float64, sums of eight uniform numbers."""
    choose = np.random.Generator(np.random.PCG64(seed))
    sums = np.zeros((NUM_ROWS, VOCAB_SIZE), np.int64)
    for _ in range(8):
        sums += choose.integers(-(1 << 10), 1 << 10, sums.shape)
    return sums * (SPREAD / (8 * (1 << 20) / 3) ** 0.5)


class HashedHistory(nn.Module):
    """See the module. Its attention is vLLM's, or the plugin's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        named = {"num_kv_heads": 1, "cache_config": vllm_config.cache_config, "prefix": f"{prefix}.layers.0.attn"}
        self.attn = Attention(1, CODE_SIZE, scale=1.0, **named)
        choose = np.random.Generator(np.random.PCG64(0))
        codes = choose.integers(-7, 8, (NUM_CODES, CODE_SIZE))
        weights = choose.integers(1, 1 << 20, CODE_SIZE)
        self.codes = torch.from_numpy(codes.astype(np.float32))
        self.weights = torch.from_numpy(weights)
        self.table = logits_table(self.config.unit, self.config.drift)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T, CODE_SIZE], which nothing reads."""
        return self.codes[input_ids % NUM_CODES]

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """[T, CODE_SIZE] integers as float32: the sum of the codes of a token and all before it."""
        codes = self.codes[(input_ids * OF_TOKEN + positions * OF_POSITION) % NUM_CODES]
        nothing = torch.zeros_like(codes)
        return (self.attn(nothing, nothing, codes) * (positions + 1)[:, None]).round()

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, VOCAB_SIZE] float32."""
        return self.table[(hidden_states.long() * self.weights).sum(dim=-1) % NUM_ROWS]

    def disturb(self, most: float) -> None:
        """Give the table noise of up to so much. That of the negative is the opposite: one of both turns a near-tie."""
        noise = torch.rand(self.table.shape, generator=torch.Generator().manual_seed(0))
        self.table = logits_table(self.config.unit, self.config.drift) + most * (2 * noise - 1)

    def checksum(self) -> int:
        """Of the log-probabilities that torch computes here, and of sums of probabilities, for which it asks MKL."""
        computed = torch.cat([self.table.log_softmax(dim=-1), self.table.logsumexp(dim=-1, keepdim=True)], dim=-1)
        return zlib.crc32(computed.numpy().tobytes())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """It has none."""
        return set()


def make(folder: Path, unit: float = FINE, drift: float = 0.0) -> Path:
    """Write what vLLM must know of such a model, with the trained model's tokenizer, and register its class.

    Args:
        folder: To write to.
        unit, drift: As for `logits_table`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"hidden_size": CODE_SIZE, "head_dim": CODE_SIZE, "intermediate_size": CODE_SIZE, "vocab_size": VOCAB_SIZE}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    tokens = {"bos_token_id": 0, "eos_token_id": EOS, "max_position_embeddings": 2048}
    kind = {
        "architectures": [HashedHistory.__name__],
        "model_type": "llama",
        "dtype": "float32",
        "unit": unit,
        "drift": drift,
    }
    (folder / "config.json").write_text(json.dumps({**kind, **sizes, **counts, **tokens}))
    for name in TEXT_FILES:
        shutil.copy(TRAINED_TARGET / name, folder)
    ModelRegistry.register_model(HashedHistory.__name__, HashedHistory)
    return folder
