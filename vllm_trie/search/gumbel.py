"""Sampling by taking maxima: log-weights plus Gumbel noise need neither a softmax nor a running sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER
from vllm_trie.search.parts import search_parts, split_for_search

TINY = torch.finfo(torch.float64).tiny  # keeps noise finite


class StochasticSearchBeams(NamedTuple):
    """Beams of a stochastic beam search, best perturbed first. Its root is one beam with both scores 0."""

    cells: torch.Tensor  # [..., k], parent * V + token
    scores: torch.Tensor  # [..., k] float64, cumulative log-probability: phi in Kool et al.
    perturbed: torch.Tensor  # [..., k] float64, G ~ Gumbel(phi); -inf where nothing was left to keep


def search_gumbel_top_k(
    logs: torch.Tensor, count: int, rngs: Sequence[np.random.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples without replacement from the log-weights of each group, [G, N], in the order sampled.

    The same distribution as sampling one after the other and renormalising what is left.
    Source: Vieira 2014, Gumbel-max trick and weighted reservoir sampling.

    Args:
        logs: Unnormalised; -inf for what may not be sampled.
        count: How many to sample, at most N.
        rngs: Random numbers, by group.

    Returns:
        Log-weights with noise [G, count] float64, -inf where nothing was left to sample, and their indices.
    """
    generators = [search_generator_on_device(rng, logs.device) for rng in rngs]
    found, first = list[tuple[torch.Tensor, ...]](), 0
    for part in split_for_search(logs):
        values, indices = _perturbed_in_search(part, generators).topk(min(count, part.shape[-1]), dim=-1)
        found.append((values, indices + first if first else indices))
        first += part.shape[-1]
    values, indices = _best_perturbed_in_search(found, count)
    return values, indices


def stochastic_search_step(
    scores: torch.Tensor, perturbed: torch.Tensor, logprobs: torch.Tensor, count: int, rng: np.random.Generator
) -> StochasticSearchBeams:
    """Keeps the best `count` continuations after noise: over all steps, sequences sampled without replacement.

    A beam's noise is the maximum of its continuations' noises, so these are sampled given their maximum.
    Source: Kool et al. 2019, Stochastic Beams and Where to Find Them, algorithm 1.

    Args:
        scores: [..., b], cumulative log-probability of each beam.
        perturbed: [..., b], the scores with noise that the last step returned; 0 for the root.
        logprobs: [..., b, V], normalised; -inf for what may not be taken.
        count: Beams to keep; fewer are returned if there are fewer continuations.
    """
    generator, vocab_size = search_generator_on_device(rng, logprobs.device), logprobs.shape[-1]
    found = list[tuple[torch.Tensor, ...]]()
    for rows in search_parts((logprobs[..., 0, 0].numel(), *logprobs.shape[-2:])):
        phi = scores[..., rows].double()[..., None] + logprobs[..., rows, :].double()
        noise = _perturbed_in_search(phi[None], [generator])[0]
        noisy = _search_noise_with_maximum(noise, perturbed[..., rows].double()[..., None]).flatten(-2)
        values, cells = noisy.topk(min(count, noisy.shape[-1]), dim=-1)
        found.append((values, cells + rows.start * vocab_size, phi.flatten(-2).gather(-1, cells)))
    noisy, cells, sums = _best_perturbed_in_search(found, min(count, logprobs.shape[-2] * vocab_size))
    return StochasticSearchBeams(cells, sums, noisy)


def _best_perturbed_in_search(found: Sequence[tuple[torch.Tensor, ...]], count: int) -> tuple[torch.Tensor, ...]:
    """The best `count` by the first field [..., n], of what was found in all parts."""
    if len(found) == 1:
        return found[0]
    fields = [torch.cat(of_parts, dim=-1) for of_parts in zip(*found, strict=True)]
    best = fields[0].topk(count, dim=-1).indices
    return tuple(field.gather(-1, best) for field in fields)


def search_generator_on_device(rng: np.random.Generator, device: torch.device) -> torch.Generator:
    """A generator on the device, seeded by `rng`."""
    return torch.Generator(device).manual_seed(int(rng.integers(1 << 63)))


def _perturbed_in_search(logs: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Log-weights [G, ...] plus noise, in float64. The device makes the noise: sending it would cost more."""
    noise = torch.empty_like(logs, dtype=torch.float64, memory_format=torch.contiguous_format)
    for of_group, generator in zip(noise, generators, strict=True):
        of_group.exponential_(generator=generator)
    noise.clamp_(min=TINY).log_()
    return torch.sub(logs, noise, out=noise)


def _search_noise_with_maximum(values: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """Moves independent Gumbels [..., V] to where they would be, had their maximum been `maximum` [..., 1].

    That is -log(exp(-maximum) - exp(-max values) + exp(-values)), without its overflows and cancellations.
    Source: Kool et al. 2019, appendix B.3.
    """
    gap = values - values.amax(dim=-1, keepdim=True)  # the rest is in place: it may take gigabytes
    below = (maximum - values).add_(gap.expm1_().neg_().log_())
    tail = torch.abs(below, out=gap).neg_().exp_().log1p_()
    moved = torch.sub(maximum, below.clamp_(min=0), out=below).sub_(tail)
    return moved.masked_fill_(values == NEVER, NEVER)
