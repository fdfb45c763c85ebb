"""What ends a hypothesis: stop tokens, and stop strings, which the host looks for in text; not before `min_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import constant, sees, uploaded
from vllm_trie.search.rank import Candidates

# Of parents and tokens [G, K], and of what was copied beside them: which complete a stop string, [G, K].
Judge = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]


class Completes:
    """Finds on the host which candidates complete a stop string: for one copy of them the host waits.

    Args:
        judge: Finds them.
        beside: int32, on the device, what this takes besides: copied with the first candidates.
        first: From which row on their parents are counted.
    """

    def __init__(self, judge: Judge, beside: torch.Tensor | None = None, first: int = 0) -> None:
        self._judge, self._beside, self._first = judge, beside, first
        self._copied: np.ndarray | None = None
        self.num_going_on = 0  # candidates that do not end, of the group that had fewest, when it was last asked

    def of_rows(self, first: int) -> Completes:
        """The same of candidates whose parents are counted from row `first` on."""
        return Completes(self._judge, self._beside, first)

    def end(self, candidates: Candidates[torch.Tensor], token_ids: tuple[int, ...]) -> torch.Tensor:
        """Which candidates [G, K] complete a stop string, or end in a stop token."""
        parents, tokens = self._on_host(candidates)
        ends = np.isin(tokens, token_ids) | self._judge(parents + self._first, tokens, self._copied)
        self.num_going_on = int((~ends).sum(axis=1).min(initial=ends.shape[1]))
        return uploaded(ends, candidates.tokens.device)

    def _on_host(self, candidates: Candidates[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
        parents, tokens, _ = candidates
        if sees(tokens.device):
            self._copied = None if self._beside is None else self._beside.numpy()
            return parents.numpy(), tokens.numpy()
        words = torch.stack([parents, tokens]).int().flatten()
        if self._beside is not None and self._copied is None:
            together = torch.cat([words, self._beside.flatten()]).cpu().numpy()
            self._copied = together[len(words) :].reshape(self._beside.shape)
        else:
            together = words.cpu().numpy()
        both = together[: len(words)].reshape(2, *tokens.shape)
        return both[0], both[1]


class Stops(NamedTuple):
    """What the hypotheses of a search may end with.

    Args:
        token_ids: Stop tokens.
        strings: Stop strings.
        skips_special_tokens: The text in which they are looked for is without special tokens.
        are_barred: `min_tokens` is not reached: no hypothesis may stop here, or take a stop token.
    """

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    skips_special_tokens: bool = True
    are_barred: bool = False

    @property
    def barred_token_ids(self) -> tuple[int, ...]:
        """What nothing may continue with."""
        return self.token_ids if self.are_barred else ()

    def end(self, candidates: Candidates[torch.Tensor], completes: Completes | None) -> torch.Tensor:
        """Which candidates [G, K] end in a stop token or complete a stop string."""
        tokens = candidates.tokens
        if completes is not None and not self.are_barred:
            return completes.end(candidates, self.token_ids)
        if len(self.token_ids) == 1:
            return tokens == self.token_ids[0]
        return (tokens[..., None] == constant(self.token_ids, tokens.device)).any(dim=-1)
