"""Beams that begin with drawn tokens: each by itself, with replacement, the same for the same seed."""

from __future__ import annotations

import numpy as np
import torch

from vllm_trie.search.step import Candidates, Step

DEAD = np.float32(-np.inf)


def uniforms(seed: int, step: int, count: int) -> np.ndarray:
    """[count] float64 in [0, 1), by seed and step alone, whatever else is in the batch."""
    key = np.array([seed % (1 << 64), step], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def draw(logprobs: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Tokens [G, r, k], each independently by the probabilities of its row, by inverting their running sum.

    Args:
        logprobs: [G, r, V], -inf for what may not be drawn; they need not sum to one. Where nothing may be drawn,
            the last token stands for it.
        chances: [G, r, k] float64 in [0, 1).
    """
    share = logprobs.double().softmax(dim=-1).nan_to_num().cumsum(dim=-1)
    total = share[..., -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # rounding must not reach beyond the last token
    drawn = torch.searchsorted(share, torch.minimum(chances * total, below_total), right=True)
    return drawn.clamp_(max=logprobs.shape[-1] - 1)


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
