"""Reference searches that read each token once are told what they would be told of whole texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.loop import one_thread
from tests.support.next_logits import NextLogits
from tests.support.reference import load
from tests.support.running import prompt_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["gqa", "gemma2"])
@one_thread()
@torch.inference_mode()
def test_texts_read_token_by_token_are_read_as_whole_ones(random_model: Callable[[str], Path], kind: str) -> None:
    model, choose = random_model(kind), random.Random(0)
    next_logits, texts = NextLogits(model), [prompt_of(40, seed) for seed in range(3)]
    for _ in range(8):
        whole = load(model)(torch.tensor(texts)).logits[:, -1]
        torch.testing.assert_close(next_logits(texts), whole, rtol=0, atol=1e-3)
        texts = [[*choose.choice(texts), choose.randrange(2, 300)] for _ in range(choose.randrange(1, 5))]
