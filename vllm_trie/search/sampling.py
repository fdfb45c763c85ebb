"""Beams that are sampled: each independently, or all from one joint distribution over all their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from vllm_trie.search.devices import NEVER, is_searched_on_host
from vllm_trie.search.filters import SearchFilters, filter_search_logprobs, search_running_sum
from vllm_trie.search.gumbel import search_generator_on_device, search_gumbel_top_k
from vllm_trie.search.parts import in_search_parts, split_for_search


def search_generator(seed: int, step: int) -> np.random.Generator:
    """Random numbers that depend only on seed and step, whatever else is in the batch.

    Two generators with the same seed and step give the same numbers: independent numbers must be taken one after the
    other from a single generator.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), step], dtype=np.uint64)))


def search_uniforms(seed: int, step: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1) that depend only on seed and step, whatever else is in the batch."""
    return search_generator(seed, step).random(count)


def sample_search_tokens(logprobs: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Samples tokens [G, r, k], each independently by the probabilities of its row, by inverting their running sum.

    Args:
        logprobs: [G, r, V], -inf for what may not be sampled; they need not sum to one. Where nothing may be sampled,
            the last token is returned.
        chances: [G, r, k] float64 in [0, 1).
    """

    def of_rows(logprobs: torch.Tensor, chances: torch.Tensor) -> tuple[torch.Tensor]:
        return (_inverted_search_sums(logprobs.double().softmax(dim=-1).nan_to_num_(), chances),)

    (sampled,) = in_search_parts(logprobs.shape, of_rows, logprobs, chances)
    return sampled


def joint_search_probabilities(scores: torch.Tensor, logprobs: torch.Tensor, filters: SearchFilters) -> torch.Tensor:
    """Beam sampling's joint distribution of all continuations of all beams, [..., I, V] float64, summing to 1.

    The temperature divides cumulative sums, and the filters apply once, to all continuations together: as the
    temperature goes to 0, sampling without replacement becomes beam search. Source: DSBD paper.

    Args:
        scores: [..., I], cumulative log-probabilities at temperature 1; -inf for a beam that may not continue.
        logprobs: [..., I, V], of the next token at temperature 1; -inf for what may not be taken.
        filters: The temperature must be above 0. What is more than 745 * temperature below the best is 0 in float64;
            if fewer cells are left than beams are wanted, the temperature is too low to sample.

    Returns:
        The distribution; all zeros if nothing is possible.
    """
    logs = logprobs.to(torch.float64, copy=True)  # the rest is in place: it may take gigabytes
    logs.add_(scores[..., None]).div_(filters.temperature)
    is_nan = logprobs.amax(dim=-1, keepdim=True).isnan()
    if not is_searched_on_host(logs.device) or is_nan.any():
        logs.masked_fill_(is_nan, NEVER)  # a row whose logits are NaN dies alone
    rows = logs.view(-1, logs.shape[-2] * logs.shape[-1])
    return filter_search_logprobs(rows, filters).softmax(dim=-1).nan_to_num_().view_as(logs)


def sample_search_continuations(
    p: torch.Tensor, count: int, replacement: bool, rngs: Sequence[np.random.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples cells from the distribution of each group, [G, N], in the order of the device's stream.

    With replacement they are independent. Without, each is sampled from what the earlier ones have left.

    Args:
        p: Unnormalised probabilities, float64.
        count: How many to sample.
        rngs: Random numbers, by group.

    Returns:
        Cells [G, count] int64 in the order sampled, fewer if there are fewer, and which of these were possible at
        all.
    """
    if replacement:
        chances = torch.empty(len(p), count, dtype=torch.float64, device=p.device)
        for of_group, rng in zip(chances, rngs, strict=True):
            of_group.uniform_(generator=search_generator_on_device(rng, p.device))
        return _inverted_search_sums(p, chances), p.any(dim=-1, keepdim=True).expand(-1, count)
    values, cells = search_gumbel_top_k(p.log(), min(count, p.shape[-1]), rngs)
    return cells, values > NEVER


def sample_search_cells(p: torch.Tensor, count: int, replacement: bool, rng: np.random.Generator) -> np.ndarray:
    """As `sample_search_continuations` for one group of [I, V], on the host, without impossible cells."""
    cells, is_possible = sample_search_continuations(p.flatten()[None], count, replacement, [rng])
    return cells[is_possible].cpu().numpy()


def _inverted_search_sums(p: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Where the running sums of p [..., N] pass `chances` [..., k], which are shares of its total."""
    *others, last = split_for_search(p)
    ends = [search_running_sum(part)[..., -1:].clone() for part in others]
    *starts, start = accumulate(ends, initial=torch.zeros_like(p[..., :1]))
    share = search_running_sum(last)
    if others:
        share.add_(start)
    total = share[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not pass the last possible one
    passed = torch.minimum(chances * total, below_total)
    sampled = torch.searchsorted(share, passed, right=True)
    for part, start in zip(others, starts, strict=True):
        sampled += torch.searchsorted(search_running_sum(part).add_(start), passed, right=True)
    return sampled.clamp_(max=p.shape[-1] - 1)
