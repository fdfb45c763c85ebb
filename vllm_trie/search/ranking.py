"""Rank the continuations of many groups at once, in total order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.rank import Candidates
from vllm_trie.search.step import Tops

WIDE = 128  # candidates from which on few are asked of each row at first: seldom do many of the best come from one


class Ranking(NamedTuple):
    """The best continuations of each group, and of each of its rows by itself."""

    candidates: Candidates  # [G, K]
    logprobs: torch.Tensor  # [G, r, V] float32, as ranked
    row_logprobs: torch.Tensor  # [G, r, M], best first; if rows' own best are wanted, M > K or all of the vocabulary
    row_tokens: torch.Tensor  # [G, r, M]

    def tops(self, group: int, count: int) -> Tops:
        """The best `count` continuations of each row of one group."""
        return _tops(self.row_tokens[group, :, :count], self.row_logprobs[group, :, :count])

    def proposals(self, token_ids: Sequence[int], scores: torch.Tensor, count: int) -> tuple[Candidates, np.ndarray]:
        """Each row's own continuation by each of `token_ids`, by row and token.

        Args:
            scores: [G, r], the rows' own.
            count: How many continuations of a row count as its best.

        Returns:
            Candidates [G, r * tokens], and which of them are among their row's best, as bools.
        """
        num_groups, num_rows, _ = self.logprobs.shape
        logprobs = self.logprobs[..., list(token_ids)]
        worst = self.row_logprobs[..., min(count, self.row_logprobs.shape[-1]) - 1]
        is_top = (logprobs >= worst[..., None]) & (logprobs > float("-inf"))
        parents = np.repeat(np.arange(num_rows), len(token_ids))
        tokens = np.tile(np.array(token_ids, dtype=np.int64), num_rows)
        shape = (num_groups, num_rows * len(token_ids))
        candidates = Candidates(
            np.broadcast_to(parents, shape),
            np.broadcast_to(tokens, shape),
            (logprobs + scores[..., None]).flatten(1).cpu().numpy(),
        )
        return candidates, is_top.flatten(1).cpu().numpy()


def rank_candidates(logprobs: torch.Tensor, scores: torch.Tensor, count: int, row_count: int = 0) -> Ranking:
    """The best `count` continuations of each group by cumulative log-probability.

    The order is total: score desc, parent asc, token asc. Equal scores are common with bfloat16
    logits, and `topk` breaks them arbitrarily; where a tie could decide who is among the best, that
    group is ranked again exhaustively.

    Args:
        logprobs: [G, r, V] float32; r rows of each of G groups; -inf where a row may not take a token.
        scores: [G, r] float32, cumulative log-probability of each row.
        count: K, at most r * V.
        row_count: Continuations of each row that are wanted in any case, the best K + 1 with them; 0: none.
    """
    vocab_size = logprobs.shape[-1]
    most = min(max(count + 1, row_count), vocab_size)
    per_row = most if row_count or most < WIDE else max(WIDE // 4, -(-most // logprobs.shape[1]))
    while True:
        row_best, row_tokens = logprobs.topk(per_row, dim=-1)
        total = row_best + scores[..., None]
        best, index = total.flatten(1).topk(min(count + 1, total[0].numel()), dim=-1)
        # What a row has left is no better than the last it gave. Where that is not among the best, nothing is missing.
        if per_row == most or bool((total[..., -1] < best[:, -1:]).all()):
            break
        per_row = min(4 * per_row, most)
    tokens = row_tokens.flatten(1).gather(1, index)
    parents = index // per_row

    ranked = Candidates(*(field[:, :count].cpu().numpy() for field in (parents, tokens, best)))
    if best.shape[1] > count:
        last, next_best = best[:, count - 1], best[:, count]
        for group in ((last == next_best) & (last > float("-inf"))).nonzero().flatten().tolist():
            exact = _rank_exhaustively(logprobs[group] + scores[group, :, None], count)
            for field, values in zip(ranked, exact, strict=True):
                field[group] = values
    return Ranking(_in_total_order(ranked, vocab_size), logprobs, row_best, row_tokens)


def tops_of(logprobs: torch.Tensor, count: int) -> Tops:
    """The best `count` continuations of each row, whatever is ranked. `logprobs`: [r, V]."""
    best, tokens = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return _tops(tokens, best)


def _tops(tokens: torch.Tensor, logprobs: torch.Tensor) -> Tops:
    return Tops(tokens.cpu().numpy().astype(np.int32), logprobs.cpu().numpy())


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
