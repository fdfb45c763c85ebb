"""One step of groups with equal rules: from logits to what the search decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from vllm_trie.messages import SelectRules
from vllm_trie.search.pruning import pruned
from vllm_trie.search.ranking import Ranking, rank_candidates, tops_of
from vllm_trie.search.sampling import draw, draw_cells, generator, joint, uniforms
from vllm_trie.search.step import (
    Candidates,
    Step,
    Tops,
    drawn_step,
    hf_step,
    num_candidates,
    sampled_step,
    tridecode_step,
    vllm_step,
)
from vllm_trie.search.stop_strings import StopStrings
from vllm_trie.search.warping import filtered, log_probabilities

DEAD = np.float32(-np.inf)


class Selection:
    """One step of G groups with equal rules.

    Args:
        rules: Theirs.
        scores: [G, r] float32, cumulative log-probability of each row.
        history: Of a group and a row, the last few tokens of the prompt, and all that the row has generated.
        stop_strings: Theirs, if they have any.
        draws: For each group the seed and the step, where something is drawn.
    """

    def __init__(
        self,
        rules: SelectRules,
        scores: torch.Tensor,
        history: Callable[[int, int], tuple[list[int], list[int]]],
        stop_strings: StopStrings | None,
        draws: Sequence[tuple[int, int] | None],
    ) -> None:
        self.rules = rules
        self.scores = scores
        self.history = history
        self.stop_strings = stop_strings
        self.draws = draws
        self.count = num_candidates(rules.width, len(rules.stop_token_ids))
        self.num_ranked = self.count  # of a group's candidates, and so at most of one row's; if drawn: of one row's
        self.logprobs: torch.Tensor  # [G, r, V], before any filter or pruning
        self.ranking: Ranking | None = None

    def step(self, logits: torch.Tensor) -> Step:
        """Decide. `logits`: [G, r, V]."""
        rules = self.rules
        if rules.law is not None:
            (key,) = self.draws
            assert key is not None, "a group draws without a seed"
            step, _ = self.take(draw_cells(self.law(logits), rules.width, rules.law.replacement, generator(*key)))
            return step
        self._set_logprobs(logits, rules.warping.temperature)
        allowed = filtered(self.logprobs, rules.warping)
        if rules.samples:
            return self._sample(allowed)
        allowed = pruned(allowed, self.scores, rules.pruning)
        most = logits[0].numel()
        row_count = max(rules.num_logprobs or 0, 1) if rules.wants_rows else 0
        while True:
            self.ranking = rank_candidates(allowed, self.scores, self.num_ranked, row_count)
            candidates = self.ranking.candidates
            stops = self._stops(candidates)
            if self.num_ranked == most or ((~stops).sum(axis=1) >= rules.width).all():
                break
            self.num_ranked = min(2 * self.num_ranked, most)  # too many complete a stop string, too few would go on
        if rules.semantics == "hf":
            return hf_step(candidates, stops, rules.width, rules.is_last)
        if rules.semantics == "tridecode":
            return tridecode_step(candidates, stops, rules.width, rules.is_last)
        merits = candidates.scores
        if rules.handicap is not None:
            candidates, merits = self._handicapped(self.ranking, *rules.handicap)
            stops = self._stops(candidates)
        stopping, is_stopping = self._stopping(self.ranking)
        return vllm_step(candidates, merits, stops, stopping, is_stopping, rules.width, rules.is_last)

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        """What the beams of one group are drawn from: [r, V] float64. `logits`: [1, r, V]."""
        self._set_logprobs(logits, temperature=1.0)
        return joint(self.scores[0], self.logprobs[0], self.rules.warping)

    def take(self, cells: np.ndarray) -> tuple[Step, np.ndarray]:
        """Go on with what was drawn from `law`. Returns the step, and the slot of each; -1 where it finished."""
        parents, tokens = (part[None] for part in np.divmod(cells, self.logprobs.shape[-1]))
        own = self.logprobs[0, torch.from_numpy(parents[0]), torch.from_numpy(tokens[0])]
        if self.rules.num_logprobs is not None and len(cells):  # it may rank anywhere, and its rank is reported
            self.num_ranked = int((self.logprobs[0, torch.from_numpy(parents[0])] >= own[:, None]).sum(dim=-1).max())
        scores = (own + self.scores[0, torch.from_numpy(parents[0])]).cpu().numpy()[None]
        drawn = Candidates(parents, tokens, scores)
        return drawn_step(drawn, self._stops(drawn), self.rules.width, self.rules.is_last)

    def _set_logprobs(self, logits: torch.Tensor, temperature: float) -> None:
        if self.rules.is_controlled:  # a row that may take no token at all ends here
            is_barred = logits.amax(dim=-1) == float("-inf")
            logits = logits.masked_fill(is_barred[..., None], 0.0)
            self.scores = self.scores.masked_fill(is_barred, float("-inf"))
        masked = self.rules.stop_token_ids if self.rules.masks_stops else ()
        self.logprobs = log_probabilities(logits, masked, temperature)

    def tops(self, position: int) -> Tops | None:
        """What one group must report of its rows."""
        if self.rules.num_logprobs is None:
            return None
        count = max(self.rules.num_logprobs, self.num_ranked)
        if self.ranking is not None and self.ranking.logprobs is self.logprobs:
            return self.ranking.tops(position, count)
        return tops_of(self.logprobs[position], count)

    def _sample(self, allowed: torch.Tensor) -> Step:
        """One token for each beam, drawn from what its row may take: [G, r, V]."""
        keys = [key for key in self.draws if key is not None]
        assert len(keys) == len(self.draws), "a group draws without a seed"
        chances = np.stack([uniforms(*key, self.rules.width) for key in keys])
        num_groups, num_rows, _ = allowed.shape
        drawn = draw(allowed, torch.from_numpy(chances.reshape(num_groups, num_rows, -1)).to(allowed.device))
        own = allowed.gather(-1, drawn)
        if self.rules.num_logprobs is not None:  # what is drawn may rank anywhere, and its rank is reported
            as_good = (self.logprobs[:, :, None] >= own[..., None]) & (own > float("-inf"))[..., None]
            self.num_ranked = int(as_good.sum(dim=-1).max())
        tokens = drawn.flatten(1).cpu().numpy()
        scores = (own + self.scores[..., None]).flatten(1).cpu().numpy()
        parents = np.broadcast_to(np.arange(self.rules.width) % num_rows, tokens.shape)
        stops = self._stops(Candidates(parents, tokens, scores))
        return sampled_step(tokens, scores, stops, num_rows, self.rules.is_last)

    def _stops(self, candidates: Candidates) -> np.ndarray:
        """Which candidates end in a stop token or complete a stop string."""
        stops = np.isin(candidates.tokens, self.rules.stop_token_ids)
        if self.stop_strings is not None and not self.rules.masks_stops:
            may_complete = self.stop_strings.may_complete(candidates.tokens)
            for group, rank in zip(*(may_complete & ~stops).nonzero(), strict=True):
                prompt, generated = self.history(int(group), int(candidates.parents[group, rank]))
                token = int(candidates.tokens[group, rank])
                stops[group, rank] = self.stop_strings.is_completed_by(token, prompt, generated)
        return stops

    def _stopping(self, ranking: Ranking) -> tuple[Candidates, np.ndarray]:
        """Every row's continuations that stop, among the row's best."""
        if not self.rules.stop_strings:
            return ranking.proposals(self.rules.stop_token_ids, self.scores, self.count)
        tokens = ranking.row_tokens[..., : self.count]
        scores = ranking.row_logprobs[..., : self.count] + self.scores[..., None]
        num_groups, num_rows, per_row = tokens.shape
        parents = np.broadcast_to(np.repeat(np.arange(num_rows), per_row), (num_groups, num_rows * per_row))
        candidates = Candidates(parents, tokens.flatten(1).cpu().numpy(), scores.flatten(1).cpu().numpy())
        return candidates, self._stops(candidates)

    def _handicapped(self, ranking: Ranking, token_id: int, factor: float) -> tuple[Candidates, np.ndarray]:
        """The candidates, those by `token_id` among each row's best, and what they compare by."""
        best = ranking.candidates
        proposed, is_top = ranking.proposals([token_id], self.scores, self.count)
        others = best._replace(scores=np.where(best.tokens == token_id, DEAD, best.scores))
        proposed = proposed._replace(scores=np.where(is_top, proposed.scores, DEAD))
        candidates = Candidates(*(np.concatenate(pair, axis=1) for pair in zip(others, proposed, strict=True)))
        return candidates, np.where(candidates.tokens == token_id, factor, 1.0) * candidates.scores
