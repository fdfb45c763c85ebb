"""Engines with the trained target and an EAGLE-3 head, and what the head says alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.stdlib_pair.head import HEAD, Head, Pairs, shifted
from tests.support.draft_alone import Alone
from tests.support.engine import TRAINED_TARGET, Engine, Engines


def heading(num_layers: int, head: Path = HEAD) -> dict[str, Any]:
    """The option of an engine that drafts `num_layers` tokens by a head."""
    return {"speculative_config": {"method": "eagle3", "model": str(head), "num_speculative_tokens": num_layers}}


def with_head(engines: Engines, num_layers: int, head: Path = HEAD, **options: Any) -> Engine:
    return engines(TRAINED_TARGET, **heading(num_layers, head), **options)


class HeadAlone(Alone):
    """Compares every row of logits with the head run alone: on the target's states, and behind those on its own."""

    model: Head

    def says(self, texts: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """See `Alone`. Slot i holds the pair of token i and the states at token i - 1."""
        passes, states_before = list[Pairs](), self.model.first(self.model.read(texts)[0])
        for _ in range(1 + num_drafts):
            passes.append(self.model(texts, states_before, passes))
            states_before = shifted(passes[-1].states)
        return passes[-1].logits[:, -1]
