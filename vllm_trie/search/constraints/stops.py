"""What ends a hypothesis: stop tokens, and stop strings, which the host looks for in text; not before `min_tokens`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from vllm_trie.search.devices import constant
from vllm_trie.search.rank import Candidates, Completes


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
        if len(self.token_ids) == 1:
            stops = tokens == self.token_ids[0]
        else:
            stops = (tokens[..., None] == constant(self.token_ids, tokens.device)).any(dim=-1)
        if completes is None or self.are_barred:
            return stops
        on_host = Candidates(*(field.cpu().numpy() for field in candidates))
        return stops | torch.from_numpy(completes(on_host)).to(tokens.device)
