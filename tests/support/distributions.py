"""What a small model says may follow, for distributions that can be enumerated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.support.loop import one_thread

PROMPT = [3, 9, 14]
Beam = tuple[int, ...]


def continuations(model: Path) -> Callable[[Beam], np.ndarray]:
    """[V] log-probabilities of what may follow."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @cache
    def after(beam: Beam) -> np.ndarray:
        with one_thread(), torch.inference_mode():
            return network(torch.tensor([[*PROMPT, *beam]])).logits[0, -1].double().log_softmax(-1).numpy()

    return after
