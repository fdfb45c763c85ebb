"""Searches by the trained pair, sampled or not, and what the target itself says of what they find."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.engine import TRAINED_TARGET, Engine, Engines
from tests.support.loop import one_thread
from tests.support.pairs import TRAINED, speculating
from tests.support.reference import load
from tests.support.running import trained_prompts
from vllm_trie import beam_params

LAYERS, WIDTH, LENGTH = 3, 4, 32
SAMPLED = {"speculation": "sample", "seed": 1}
ONE_BEAM = SAMPLED | {"memory_mode": True}
WARPED = {"temperature": 0.7, "top_k": 40, "top_p": 0.95}

Answer = list[tuple[tuple[int, ...], float | None]]


def trained_pair(engines: Engines) -> Engine:
    return speculating(engines, TRAINED, LAYERS)


def held_out() -> list[list[int]]:
    """Four prompts."""
    return trained_prompts([LENGTH] * 4)


def search(engine: Engine, prompts: list[list[int]], width: int = WIDTH, **options: Any) -> list[Any]:
    """By `LLM.generate`, all `width` hypotheses of each prompt."""
    options = {"n": width, "max_tokens": LENGTH, "ignore_eos": True, **options}
    return engine.generate(prompts, beam_params(width, **options))


def answer(output: Any) -> Answer:
    return [(tuple(o.token_ids), o.cumulative_logprob) for o in output.outputs]


def tokens(outputs: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[of_one for of_one, _ in answer(output)] for output in outputs]


def counts(output: Any) -> dict[str, Any]:
    return output.kv_transfer_params["trie_beam"]


@one_thread()
@torch.inference_mode()
def rows_of(prompt: list[int], generated: tuple[int, ...]) -> torch.Tensor:
    """[tokens, V] the target's log-probabilities at the place of each generated token."""
    logits = load(TRAINED_TARGET)(torch.tensor([[*prompt, *generated]])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def own_sum(prompt: list[int], generated: tuple[int, ...]) -> float:
    """The target's log-probability of a hypothesis."""
    return rows_of(prompt, generated).gather(1, torch.tensor(generated)[:, None]).sum().item()
