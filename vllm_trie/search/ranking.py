"""Rank the continuations of many groups at once, in total order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_trie.search.step import Candidates


def rank_candidates(
    logits: torch.Tensor, scores: torch.Tensor, count: int, masked_token_ids: Sequence[int] = ()
) -> Candidates:
    """The best `count` continuations of each group by cumulative log-probability.

    Log-softmax in float32, then the mask (which does not renormalise, as in transformers), then the
    row's own score. The order is total: score desc, parent asc, token asc. Equal scores are common
    with bfloat16 logits, and `topk` breaks them arbitrarily; where a tie could decide who is among
    the best, that group is ranked again exhaustively.

    Args:
        logits: [G, r, V], any floating type; r rows of each of G groups.
        scores: [G, r] float32, cumulative log-probability of each row.
        count: K, at most r * V.
        masked_token_ids: Tokens that no row may take.

    Returns:
        Candidates of shape [G, K].
    """
    vocab_size = logits.shape[-1]
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    if masked_token_ids:
        logprobs[..., list(masked_token_ids)] = float("-inf")

    per_row = min(count + 1, vocab_size)
    row_best, row_tokens = logprobs.topk(per_row, dim=-1)
    row_best += scores[..., None]
    best, index = row_best.flatten(1).topk(min(count + 1, row_best[0].numel()), dim=-1)
    tokens = row_tokens.flatten(1).gather(1, index)
    parents = index // per_row

    ranked = Candidates(*(field[:, :count].cpu().numpy() for field in (parents, tokens, best)))
    if best.shape[1] > count:
        for group in (best[:, count] == best[:, count - 1]).nonzero().flatten().tolist():
            exact = _rank_exhaustively(logprobs[group] + scores[group, :, None], count)
            for field, values in zip(ranked, exact, strict=True):
                field[group] = values
    return _in_total_order(ranked, vocab_size)


def _rank_exhaustively(total: torch.Tensor, count: int) -> Candidates:
    """The best `count` of scores [r, V], the earliest of those that tie for the last places."""
    flat = total.flatten()
    cutoff = flat.topk(count).values[-1]
    above = (flat > cutoff).nonzero().flatten()
    ties = (flat == cutoff).nonzero().flatten()[: count - len(above)]
    chosen = torch.cat([above, ties])
    vocab_size = total.shape[-1]
    return Candidates(*(f.cpu().numpy() for f in (chosen // vocab_size, chosen % vocab_size, flat[chosen])))


def _in_total_order(ranked: Candidates, vocab_size: int) -> Candidates:
    if (ranked.scores[:, 1:] < ranked.scores[:, :-1]).all():
        return ranked
    by_token = np.argsort(ranked.parents * vocab_size + ranked.tokens, axis=1)
    by_score = np.argsort(-np.take_along_axis(ranked.scores, by_token, axis=1), axis=1, kind="stable")
    order = np.take_along_axis(by_token, by_score, axis=1)
    return Candidates(*(np.take_along_axis(field, order, axis=1) for field in ranked))
