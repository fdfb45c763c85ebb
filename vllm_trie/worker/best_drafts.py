"""The best tokens after the nodes of a layer, as the draft model has them: the host waits once, for all groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_trie.search.beams import Beams
from vllm_trie.search.devices import NEVER, numbers, sees, uploaded_once
from vllm_trie.search.forest import BestTokens
from vllm_trie.search.step import draft_logprobs
from vllm_trie.worker import kernels
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.kernels import drafts


def best_drafts(
    forest_steps: Sequence[ForestStep], values: torch.Tensor, rows: Sequence[np.ndarray], number: int
) -> list[BestTokens]:
    """The best tokens of layer `number` for each group, as many as it may draft.

    Args:
        forest_steps: Of the groups.
        values: [N, V] logits of the draft model.
        rows: Of each group, which of these follow the nodes of its newest layer.
        number: From 1 on.
    """
    if sees(values.device):
        return [
            BestTokens(*(field.numpy() for field in _ranked(*of_group, values, number)))
            for of_group in zip(forest_steps, rows, strict=True)
        ]
    is_plain = [_most_ranked(forest_step, values, number) > 0 for forest_step in forest_steps]
    plain, others = np.flatnonzero(is_plain).tolist(), np.flatnonzero(~np.array(is_plain)).tolist()
    words = [_words(*_ranked(forest_steps[at], rows[at], values, number)) for at in others]
    if plain:
        count = max(_most_ranked(forest_steps[at], values, number) for at in plain)
        keys = drafts.best_of_rows(values, _which(np.concatenate([rows[at] for at in plain]), values), count)
        words.append(keys.view(torch.int32).flatten())
    on_host = (words[0] if len(words) == 1 else torch.cat(words)).cpu().numpy()
    parts = np.split(on_host, np.cumsum([len(part) for part in words])[:-1])
    found = {at: _unpacked(part, len(rows[at])) for at, part in zip(others, parts, strict=False)}
    if plain:
        every = drafts.decoded(parts[-1].view(np.int64).reshape(keys.shape))
        ends = np.cumsum([len(rows[at]) for at in plain])[:-1]
        for at, *of_group in zip(plain, *(np.split(field, ends) for field in every), strict=True):
            found[at] = _going_on(BestTokens(*of_group), forest_steps[at].rules[number - 1].stops.token_ids)
    return [found[at] for at in range(len(rows))]


def _most_ranked(forest_step: ForestStep, values: torch.Tensor, number: int) -> int:
    """How many tokens of each node kernels must rank, those with which hypotheses end among them; 0: torch does it."""
    rules, vocab_size = forest_step.rules[number - 1], values.shape[1]
    count = min(forest_step.budget.draft_width + len(rules.stops.token_ids), vocab_size)
    is_plain = rules.filters.temperature == 1.0 and not forest_step.states
    return count if kernels.run_on(values.device) and is_plain and drafts.takes(count, vocab_size) else 0


def _which(rows: np.ndarray, values: torch.Tensor) -> torch.Tensor:
    """[rows] int64 on the device."""
    return numbers(len(rows), values.device) if len(rows) == len(values) else uploaded_once(rows, values.device)


def _ranked(
    forest_step: ForestStep, rows: np.ndarray, values: torch.Tensor, number: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[nodes, n] float32 and int64, the best log-probabilities and their tokens."""
    logits = values[int(rows[0]) : int(rows[-1]) + 1]  # those of a group follow one another
    before = forest_step.beams_at(forest_step.layer.nodes, Beams(logits[None, :, 0]))  # scores have no say in these
    (logprobs,) = draft_logprobs(forest_step.rules[number - 1], logits[None], before)
    return torch.topk(logprobs, min(forest_step.budget.draft_width, logprobs.shape[1]), dim=-1)


def _words(logprobs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([logprobs.view(torch.int32), tokens.int()]).flatten()


def _unpacked(words: np.ndarray, num_nodes: int) -> BestTokens:
    logprobs, tokens = words.reshape(2, num_nodes, -1)
    return BestTokens(logprobs.view(np.float32), tokens)


def _going_on(best: BestTokens, stop_token_ids: tuple[int, ...]) -> BestTokens:
    """The same without what hypotheses end with."""
    ends = np.isin(best.tokens, stop_token_ids)
    return best._replace(logprobs=np.where(ends, np.float32(NEVER), best.logprobs))
