"""Beam search: the best continuations go on, or finish by the rules of transformers, vLLM or the trie paper."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER, constant, numbers
from vllm_trie.search.filters import filtered, prune_, pruned
from vllm_trie.search.parts import in_parts
from vllm_trie.search.rank import Candidates, pick, rank_candidates, topk
from vllm_trie.search.rules import Choice, Means, SelectRules, Strategy, alive, by_row, ended, going_on
from vllm_trie.search.step_result import Step
from vllm_trie.search.strategies.best_continuations import best_continuations


class _Best(NamedTuple):
    semantics: str = "hf"
    eos_score_factor: tuple[int, float] | None = None


class Best(_Best, Strategy):
    """Beam search: the best continuations go on.

    Args:
        semantics: Whose rules say what finishes: "hf", "vllm" or "tridecode".
        eos_score_factor: A token, and the factor of the score by which it is compared.
    """

    @property
    def has_one_ranking(self) -> bool:
        """See `Strategy`."""
        return self.semantics != "vllm"

    def choose(self, rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means) -> Choice:
        """See `Strategy`."""
        if (sparse := beams.sparse) is not None:
            return best_continuations(rules, logprobs, beams, means, sparse)
        scores = beams.scores
        num_rows, vocab_size = logprobs.shape[1:]
        width = rules.num_beams or rules.width
        count = num_candidates(width, len(rules.stops.token_ids), rules.width)
        while True:
            allowed = _allowed(rules, logprobs, beams, means, count)
            prune = pruned if allowed is logprobs else prune_
            allowed = prune(allowed, scores, rules.pruning)
            candidates = rank_candidates(allowed, scores, count)
            stops = rules.stops.end(candidates, means.completes)
            if means.completes is None or count >= num_rows * vocab_size or means.completes.num_going_on >= width:
                break
            count *= 2  # too many complete a stop string, too few would go on
        if self.semantics == "hf":  # what stops finishes among the best b; source: transformers 5.19 `_beam_search`
            finished = ended(rules, candidates, stops, numbers(stops.shape[1], stops.device) < width)
        elif self.semantics == "tridecode":  # or before the b-th that goes on; source: the trie paper's published code
            finished = ended(rules, candidates, stops, (~stops).cumsum(dim=1) + stops.int() <= width)
        else:
            finished = _own_stops(rules, allowed, scores, means)
            if self.eos_score_factor is not None:
                own = _own_continuations(rules, allowed, scores, self.eos_score_factor[:1])
                candidates = _ranked_with_factor(*self.eos_score_factor, candidates, own)
                stops = rules.stops.end(candidates, means.completes)
            if rules.is_last:
                lives = alive(candidates, stops)
                at_last = ended(rules, candidates, stops, lives & (lives.cumsum(dim=1) <= width))
                finished = Candidates.join([finished, at_last])
        by_slot = means.select_next(candidates, going_on(rules, candidates, stops), rules.width, num_rows)
        return Choice(Step(*by_slot, finished), logprobs)


def num_candidates(width: int, num_stop_tokens: int, num_parents: int = 0) -> int:
    """How many candidates must be ranked so that `width` of them can go on.

    Each of the b beams can propose every stop token once, so (1 + stop tokens) * b always leave b
    others. transformers ranks at least 2b; so do we.

    Args:
        num_parents: Beams that propose, if these may be more.
    """
    return max(2 * width, width + num_stop_tokens * max(width, num_parents))


def _allowed(rules: SelectRules, logprobs: torch.Tensor, beams: Beams, means: Means, count: int) -> torch.Tensor:
    """[G, r, V] log-probabilities with boosts, -inf for what constraints and filters leave out.

    Args:
        count: Candidates that will be ranked.

    Returns:
        A new tensor, or `logprobs` itself if there is nothing of all that.
    """
    boosts = means.boosts
    if boosts is None and not beams.are_narrowed and not rules.filters.leave_out(logprobs.shape[-1]):
        return logprobs
    boosts = boosts if boosts is None else boosts.expand_as(logprobs)

    def of_rows(logprobs: torch.Tensor, beams: Beams, boosts: torch.Tensor | None = None) -> tuple[torch.Tensor]:
        allowed = filtered(beams.narrow(logprobs), rules.filters, count if boosts is None else None)
        return (allowed if boosts is None else allowed + boosts,)

    (allowed,) = in_parts(logprobs.shape, of_rows, logprobs, beams, *([] if boosts is None else [boosts]))
    return allowed


def _own_stops(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, means: Means
) -> Candidates[torch.Tensor]:
    """What stops among each beam's own best 2b continuations finishes, however it ranks among all; else -inf.

    Source: vLLM 0.32 `BeamSearchOfflineMixin._beam_search_step`.
    """
    if means.completes is None:
        return _own_continuations(rules, allowed, scores, rules.stops.token_ids)
    own_best, tokens = topk(allowed, min(2 * rules.width, allowed.shape[-1]))
    own = by_row(tokens, own_best + scores[..., None])
    return own._replace(scores=own.scores.where(rules.stops.end(own, means.completes), NEVER))


def _ranked_with_factor(
    token_id: int, factor: float, candidates: Candidates[torch.Tensor], own: Candidates[torch.Tensor]
) -> Candidates[torch.Tensor]:
    """The candidates by another order: one token competes by its score times a factor, and only among a row's best.

    Args:
        own: Each row's continuation by that token.
    """
    others = candidates._replace(scores=candidates.scores.masked_fill(candidates.tokens == token_id, NEVER))
    both = Candidates.join([others, own])
    rank_scores = both.scores.double()
    rank_scores = torch.where(both.tokens == token_id, factor * rank_scores, rank_scores)
    order = rank_scores.argsort(dim=1, descending=True, stable=True)
    return pick(both, order)


def _own_continuations(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, token_ids: tuple[int, ...]
) -> Candidates[torch.Tensor]:
    """Each row's continuation by each of `token_ids`; -inf unless it is among the row's best 2b."""
    tokens = constant(token_ids, allowed.device)
    own = allowed.index_select(-1, tokens)
    num_groups, num_rows, vocab_size = allowed.shape
    (num_better,) = in_parts(
        (num_groups, num_rows, len(tokens) * vocab_size),
        lambda allowed, own: ((allowed[:, :, None] > own[..., None]).sum(dim=-1),),
        *(allowed, own),
    )
    return by_row(tokens.expand_as(own), (own + scores[..., None]).where(num_better < 2 * rules.width, NEVER))
