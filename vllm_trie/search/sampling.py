"""Beams that are drawn: each by itself, or all from one law over everything they may become."""

from __future__ import annotations

import numpy as np
import torch

from vllm_trie.search.gumbel import gumbel_top_k
from vllm_trie.search.step import Candidates, Step
from vllm_trie.search.warping import Warping, filtered, running_sum

DEAD = np.float32(-np.inf)


def generator(seed: int, step: int) -> np.random.Generator:
    """Random numbers by seed and step alone, whatever else is in the batch.

    Two generators of the same seed and step give the same numbers: what must be independent takes one after the other
    from a single generator.
    """
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), step], dtype=np.uint64)))


def uniforms(seed: int, step: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1), by seed and step alone, whatever else is in the batch."""
    return generator(seed, step).random(count)


def draw(logprobs: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Tokens [G, r, k], each independently by the probabilities of its row, by inverting their running sum.

    Args:
        logprobs: [G, r, V], -inf for what may not be drawn; they need not sum to one. Where nothing may be drawn,
            the last token stands for it.
        chances: [G, r, k] float64 in [0, 1).
    """
    return _inverted(logprobs.double().softmax(dim=-1).nan_to_num(), chances)


def joint(scores: torch.Tensor, logprobs: torch.Tensor, warping: Warping) -> torch.Tensor:
    """Beam sampling's law: one distribution over all continuations of all beams, [I, V] float64, summing to 1.

    The temperature divides the cumulative sums, and the filters apply once, to the joint law: as the temperature goes
    to 0, sampling without replacement becomes beam search. Source: DSBD paper.

    Args:
        scores: [I], cumulative log-probabilities at temperature 1; -inf for a beam that may not continue.
        logprobs: [I, V], of the next token at temperature 1; -inf for what may not be taken.
        warping: Its temperature must be above 0. What is more than 745 * temperature behind the best is 0 in float64;
            if fewer cells are left than beams are wanted, it is too cold to draw.

    Returns:
        All zeros if nothing is possible.
    """
    logs = (scores.double()[:, None] + logprobs.double()) / warping.temperature
    return filtered(logs.flatten(), warping).softmax(dim=-1).nan_to_num().view_as(logs)


def draw_cells(p: torch.Tensor, count: int, replacement: bool, rng: np.random.Generator) -> np.ndarray:
    """Draw from a law over cells [I, V]: int64 flat cells, parent * V + token, in the order they were drawn.

    With replacement they are independent. Without, each is drawn from what the earlier ones have left.

    Args:
        p: Unnormalised probabilities, float64.
        count: How many; without replacement there may be fewer that are possible, and without any there are none.
    """
    support = p.flatten().nonzero()[:, 0]
    if replacement:
        chances = torch.from_numpy(rng.random(count if len(support) else 0)).to(p.device)
        drawn = _inverted(p.flatten()[support], chances)
    else:
        drawn = gumbel_top_k(p.flatten()[support].log(), min(count, len(support)), rng).indices
    return support[drawn].cpu().numpy()


def sampled_step(tokens: np.ndarray, scores: np.ndarray, stops: np.ndarray, num_rows: int, is_last: bool) -> Step:
    """Let every beam live on by the token drawn for it, or finish with it.

    The slot of a beam that stops is dead; the search displaces it once nothing is drawn any more.

    Args:
        tokens: [G, b], what was drawn for each beam.
        scores: [G, b] float32, cumulative log-probability with it.
        stops: [G, b] bool, which of them end in a stop token or complete a stop string.
        num_rows: 1 in the first step, from which all beams descend; then b.
        is_last: The length is reached.
    """
    parents = np.broadcast_to(np.arange(tokens.shape[1]) % num_rows, tokens.shape)
    return Step(
        parents, tokens, np.where(stops, DEAD, scores), Candidates(parents, tokens, scores), stops | bool(is_last)
    )


def _inverted(p: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Where the running sums of p [..., N] pass the chances [..., k], these being shares of its total."""
    share = running_sum(p)
    total = share[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not reach beyond the last possible
    drawn = torch.searchsorted(share, torch.minimum(chances * total, below_total), right=True)
    return drawn.clamp_(max=p.shape[-1] - 1)
