"""What a transformers model says behind texts that grow token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.reference import load


class NextLogits:
    """Logits behind texts. Where all go on from texts of the last call, the model reads the newest tokens alone.

    What it has read lies in transformers' own cache, as in its `generate`. Mamba's models, which know no
    `past_key_values`, end with an error.
    """

    def __init__(self, model: Path) -> None:
        self._model = load(model)
        self._cache: Any = None
        self._rows: dict[tuple[int, ...], int] = {}  # of the texts that the cache holds

    @torch.inference_mode()
    def __call__(self, texts: Sequence[list[int]]) -> torch.Tensor:
        """[B, V] logits behind texts of equal length."""
        parents = [self._rows.get(tuple(text[:-1])) for text in texts]
        if None in parents:
            self._cache, tokens = None, torch.tensor(texts)
        else:
            self._cache.reorder_cache(torch.tensor(parents))
            tokens = torch.tensor([text[-1:] for text in texts])
        output = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._cache, self._rows = output.past_key_values, {tuple(text): row for row, text in enumerate(texts)}
        return output.logits[:, -1]
