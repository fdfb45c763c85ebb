"""Between forward and sampling: every group's next beams, groups with equal rules together."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch

from vllm_trie.messages import SelectRules
from vllm_trie.search.pruning import pruned
from vllm_trie.search.ranking import Ranking, rank_candidates, tops_of
from vllm_trie.search.sampling import draw, sampled_step, uniforms
from vllm_trie.search.step import Candidates, Step, Tops, hf_step, num_candidates, tridecode_step, vllm_step
from vllm_trie.search.warping import filtered, log_probabilities
from vllm_trie.worker.rows import BeamRows

DEAD = np.float32(-np.inf)


def select(rows: BeamRows, logits: torch.Tensor, controlled: torch.Tensor, sampled: torch.Tensor) -> dict[str, Step]:
    """Take one step of every group that has reached the end of its prompt.

    Args:
        rows: The groups; their scores, newest tokens and places in the batch are updated.
        logits: [R, V], one row per row of the batch, unprocessed.
        controlled: The same with penalties, biases and the like applied; `logits` itself if no group has any.
        sampled: [R, 1], receives the newest token of every row of a group.

    Returns:
        What was decided, by group.
    """
    alike = defaultdict(list)
    for group_id, step in rows.steps.items():
        if step.selects:
            alike[step.rules, step.decodes].append(group_id)

    decided: dict[str, Step] = {}
    sources, destinations = [], []
    for (rules, decodes), group_ids in alike.items():
        groups = [rows.groups[group_id] for group_id in group_ids]
        index = rows.indices(group_ids)
        places = torch.from_numpy(index).to(logits.device)
        scores = torch.from_numpy(np.concatenate([group.scores for group in groups]).reshape(index.shape))
        selection = _Selection(rows, group_ids, rules, scores.to(logits.device))
        taken = selection.step((controlled if rules.is_controlled else logits)[places])
        for position, (group_id, group) in enumerate(zip(group_ids, groups, strict=True)):
            decided[group_id] = one = taken.group(position, selection.tops(position))
            group.scores, group.tokens = one.scores, one.tokens
        newest = taken.tokens[:, : index.shape[1]].astype(np.int32)
        sampled[places, 0] = torch.from_numpy(newest).to(logits.device)
        if decodes:
            forked = taken.parents != np.arange(rules.width)
            sources.append(index[np.arange(len(groups))[:, None], taken.parents][forked])
            destinations.append(index[forked])
            if rules.is_controlled:
                rows.copy_output_tokens(sources[-1], destinations[-1])
    if any(map(len, sources)):
        rows.permute(np.concatenate(sources), np.concatenate(destinations))
    return decided


class _Selection:
    """One step of groups with equal rules."""

    def __init__(self, rows: BeamRows, group_ids: list[str], rules: SelectRules, scores: torch.Tensor) -> None:
        self.rows = rows
        self.group_ids = group_ids
        self.rules = rules
        self.scores = scores  # [G, r]
        self.count = num_candidates(rules.width, len(rules.stop_token_ids))
        self.num_ranked = self.count  # of a group's candidates, and so at most of one row's; if drawn: of one row's
        self.logprobs: torch.Tensor  # [G, r, V], before any filter or pruning
        self.ranking: Ranking | None = None

    def step(self, logits: torch.Tensor) -> Step:
        """Decide. `logits`: [G, r, V]."""
        rules = self.rules
        if rules.is_controlled:  # a row that may take no token at all ends here
            is_barred = logits.amax(dim=-1) == float("-inf")
            logits = logits.masked_fill(is_barred[..., None], 0.0)
            self.scores = self.scores.masked_fill(is_barred, float("-inf"))
        masked = rules.stop_token_ids if rules.masks_stops else ()
        self.logprobs = log_probabilities(logits, masked, rules.warping.temperature)
        allowed = filtered(self.logprobs, rules.warping)
        if rules.samples:
            return self._sample(allowed)
        allowed = pruned(allowed, self.scores, rules.pruning)
        most = logits[0].numel()
        while True:
            self.ranking = rank_candidates(allowed, self.scores, self.num_ranked, rules.num_logprobs or 0)
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
        keys = [key for group_id in self.group_ids if (key := self.rows.steps[group_id].draw) is not None]
        assert len(keys) == len(self.group_ids), "a group draws without a seed"
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
        if self.rules.stop_strings and not self.rules.masks_stops:
            strings = self.rows.stop_strings(self.rules.stop_strings, self.rules.skip_special_tokens)
            for group, rank in zip(*(strings.may_complete(candidates.tokens) & ~stops).nonzero(), strict=True):
                prompt, generated = self.rows.history(self.group_ids[group], int(candidates.parents[group, rank]))
                stops[group, rank] = strings.is_completed_by(int(candidates.tokens[group, rank]), prompt, generated)
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
