"""Drawing by taking maxima: a log-weight plus Gumbel noise needs neither a softmax nor a running sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER

TINY = torch.finfo(torch.float64).tiny  # so that noise is finite


class StochasticBeams(NamedTuple):
    """Beams of a stochastic beam search, best perturbed first. Its root is one beam with both values 0."""

    cells: torch.Tensor  # [..., k], parent * V + token
    scores: torch.Tensor  # [..., k] float64, cumulative log-probability: phi in Kool et al.
    perturbed: torch.Tensor  # [..., k] float64, G ~ Gumbel(phi); -inf where there was nothing left to keep


def gumbel_top_k(
    logs: torch.Tensor, count: int, rngs: Sequence[np.random.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws without replacement from the log-weights of each group, [G, N], in the order they were drawn.

    The same distribution as drawing one after the other and renormalising what is left.
    Source: Vieira 2014, Gumbel-max trick and weighted reservoir sampling.

    Args:
        logs: Unnormalised; -inf for what may not be drawn.
        count: How many, at most N.
        rngs: What draws, by group.

    Returns:
        Log-weights with noise [G, count] float64, -inf where nothing was left to draw, and their indices.
    """
    noisy = _perturbed(logs, rngs)
    values, indices = noisy.topk(count, dim=-1)
    return values, indices


def stochastic_step(
    scores: torch.Tensor, perturbed: torch.Tensor, logprobs: torch.Tensor, count: int, rng: np.random.Generator
) -> StochasticBeams:
    """Let the best `count` continuations after noise live on: over all steps, sequences without replacement.

    A beam's noise is the maximum of its continuations' noises, so these are drawn given their maximum.
    Source: Kool et al. 2019, Stochastic Beams and Where to Find Them, algorithm 1.

    Args:
        scores: [..., b], cumulative log-probability of each beam.
        perturbed: [..., b], the same with noise, as the last step returned it; 0 for the root.
        logprobs: [..., b, V], normalised; -inf for what may not be taken.
        count: Beams to keep; fewer come back if there are fewer continuations.
    """
    phi = scores.double()[..., None] + logprobs.double()
    noisy = _with_maximum(_perturbed(phi[None], [rng])[0], perturbed.double()[..., None]).flatten(-2)
    best = noisy.topk(min(count, noisy.shape[-1]), dim=-1)
    return StochasticBeams(best.indices, phi.flatten(-2).gather(-1, best.indices), best.values)


def on_device(rng: np.random.Generator, device: torch.device) -> torch.Generator:
    """A generator of the device that `rng` seeds."""
    return torch.Generator(device).manual_seed(int(rng.integers(1 << 63)))


def _perturbed(logs: torch.Tensor, rngs: Sequence[np.random.Generator]) -> torch.Tensor:
    """Log-weights [G, ...] plus noise, in float64. Noise costs more to send than to make, so it is made there."""
    noise = torch.empty_like(logs, dtype=torch.float64, memory_format=torch.contiguous_format)
    for of_group, rng in zip(noise, rngs, strict=True):
        of_group.exponential_(generator=on_device(rng, logs.device))
    noise.clamp_(min=TINY).log_()
    return torch.sub(logs, noise, out=noise)


def _with_maximum(values: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Independent Gumbels [..., V] moved to where they would be, had their maximum been `maximum` [..., 1].

    That is -log(exp(-maximum) - exp(-max values) + exp(-values)), without its overflows and cancellations.
    Source: Kool et al. 2019, appendix B.3.
    """
    gap = values - values.amax(dim=-1, keepdim=True)  # and then in place: there may be gigabytes
    below = (maximum - values).add_(gap.expm1_().neg_().log_())
    tail = torch.abs(below, out=gap).neg_().exp_().log1p_()
    moved = torch.sub(maximum, below.clamp_(min=0), out=below).sub_(tail)
    return moved.masked_fill_(values == NEVER, NEVER)
