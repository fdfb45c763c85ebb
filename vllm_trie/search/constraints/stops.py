"""What ends a hypothesis, not before `min_tokens`: stop tokens, and stop strings, which the host finds in text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER, is_searched_on_host, uploaded_for_search
from vllm_trie.search.rank import SearchCandidates
from vllm_trie.search.token_tables import CPU, MOST_TOKENS, search_token_classes, search_token_columns

GOES_ON, ENDS, BARRED = 0, 1, 2  # classes of tokens

# From parents and tokens [G, K], and what was copied with them: which complete a stop string, [G, K].
Judge = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


class StopStringConstraint:
    """Finds on the host which candidates complete a stop string; the host waits for one copy of the candidates.

    Args:
        judge: Finds them.
        judge_inputs: int32, on the device, what `judge` reads besides candidates; copied with the first of them.
        first: The row from which the parents of candidates are counted.
    """

    def __init__(self, judge: Judge, judge_inputs: torch.Tensor, first: int = 0) -> None:
        self._judge, self._judge_inputs, self._first = judge, judge_inputs, first
        self._copied: np.ndarray | None = None
        self._judged = np.empty((2, 0, 0), dtype=np.int64)  # parents and tokens of the last call of `end`
        self._ends = np.empty((0, 0), dtype=bool)  # and its answer
        self.num_going_on = 0  # non-ending candidates of the group that has fewest, at the last call of `end`

    def of_rows(self, first: int) -> StopStringConstraint:
        """For candidates whose parents are counted from row `first` on."""
        return StopStringConstraint(self._judge, self._judge_inputs, first)

    def end(self, candidates: SearchCandidates[torch.Tensor], is_stop: np.ndarray) -> torch.Tensor:
        """bool [G, K], which candidates complete a stop string or are stop tokens, by `is_stop`, bool [V].

        Where a longer ranking begins as the last one did, only the rest is judged.
        """
        parents, tokens, copied = self._on_host(candidates)
        ranked, num_judged = np.stack([parents, tokens]), self._judged.shape[2]
        first = num_judged if np.array_equal(ranked[..., :num_judged], self._judged) else 0
        rest = tokens[:, first:]
        of_rest = is_stop[rest] | self._judge(parents[:, first:] + self._first, rest, copied)
        ends = np.concatenate([self._ends, of_rest], axis=1) if first else of_rest
        self._judged, self._ends = ranked, ends
        self.num_going_on = int((~ends).sum(axis=1).min(initial=ends.shape[1]))
        return uploaded_for_search(ends, candidates.tokens.device)

    def _on_host(self, candidates: SearchCandidates[torch.Tensor]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        parents, tokens, _ = candidates
        if is_searched_on_host(tokens.device):
            return parents.numpy(), tokens.numpy(), self._judge_inputs.numpy()
        words = torch.stack([parents, tokens]).int().flatten()
        if self._copied is None:
            together = torch.cat([words, self._judge_inputs.flatten()]).cpu().numpy()
            self._copied = together[len(words) :].reshape(self._judge_inputs.shape)
        else:
            together = words.cpu().numpy()
        both = together[: len(words)].reshape(2, *tokens.shape)
        return both[0], both[1], self._copied


class _StopConstraints(NamedTuple):
    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    skips_special_tokens: bool = True
    spaces_special_tokens: bool = True
    are_barred: bool = False
    ignored_token_ids: tuple[int, ...] = ()


class StopConstraints(_StopConstraints):
    """What may end the hypotheses of a search.

    Args:
        token_ids: Stop tokens, ascending.
        strings: Stop strings.
        skips_special_tokens: Stop strings are looked for in text without special tokens.
        spaces_special_tokens: Where the text has special tokens, spaces may separate them.
        are_barred: `min_tokens` is not reached: no hypothesis may end, or take a stop token.
        ignored_token_ids: Tokens that end nothing, but that `min_tokens` bars as vLLM does: an ignored EOS.
    """

    @cached_property
    def barred_token_ids(self) -> tuple[int, ...]:
        """Tokens that no hypothesis may take in this step."""
        if not self.are_barred:
            return ()
        return self.token_ids + self.ignored_token_ids if self.ignored_token_ids else self.token_ids

    @cached_property
    def ending_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a hypothesis in this step."""
        return () if self.are_barred else self.token_ids

    @cached_property
    def last_token_ids(self) -> tuple[int, ...]:
        """Tokens that no beam continues after: they end it, or are barred."""
        return self.barred_token_ids if self.are_barred else self.token_ids

    @cached_property
    def may_complete(self) -> bool:
        """Whether stop strings may end hypotheses in this step."""
        return bool(self.strings) and not self.are_barred

    def classes(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """[V] int8: whether a beam goes on after a token, ends with it, or may not take it. Read-only."""
        return search_token_classes(self.last_token_ids, BARRED if self.are_barred else ENDS, vocab_size, device)

    def columns(self, vocab_size: int, device: torch.device) -> torch.Tensor:
        """[n] int64, ascending: the tokens of a vocabulary that end a hypothesis in this step. Read-only."""
        return search_token_columns(self.ending_token_ids, vocab_size, device)

    def biases(self, vocab_size: int, device: torch.device, *, ends: bool) -> torch.Tensor:
        """[V] float32: 0 for tokens that end a hypothesis in this step, or for those that do not; -inf for others."""
        are_wanted = (self.classes(vocab_size, device) == ENDS) == ends
        return torch.where(are_wanted, 0.0, NEVER)

    def lead_nowhere(self, tokens: np.ndarray) -> np.ndarray:
        """Which of `tokens`, on the host and of any shape, no beam continues after."""
        return np.isin(tokens, search_token_columns(self.last_token_ids, MOST_TOKENS, CPU).numpy())
