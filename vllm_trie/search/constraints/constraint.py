"""What every rule on the next tokens of rows is to the search: plain steps, drafts and forests all go by it."""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import torch


class Source(Enum):
    """Where the states of rows come from before each step."""

    LAST_STEP = "last step"  # the step before, which has advanced them
    TOKENS = "tokens"  # they are the tokens of each row, its prompt's among them, see `ngrams`
    MASKS = "masks"  # they are which tokens the grammar of each row allows, which the scheduler knows


class Constraint:
    """A rule on what each row may take next, by a state: one tensor [G, r, ...] of G groups with r rows each.

    Constraints are compared by what they say: groups whose constraints are equal are one batch. The four rules below
    leave everything as it is, unless a constraint says otherwise; it says so in the one of them that fits.
    """

    source: ClassVar[Source] = Source.LAST_STEP
    most_boost: float = 0.0  # see `boosts`: the most that one token may add

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """[1, r, ...] the states of hypotheses without a token."""
        raise NotImplementedError

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after one more token [G, r] each. Where a token is not possible, any state."""
        raise NotImplementedError

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether a token [G, r] is possible there and something may come after it."""
        raise NotImplementedError

    def boosts(self, states: torch.Tensor, vocab_size: int, is_end: bool) -> torch.Tensor | None:
        """What each token adds to the score that hypotheses compete by, besides its log-probability; None: nothing.

        Args:
            is_end: What it is added to ends with this token.

        Returns:
            [G, r, V] float32, finite.
        """
        return None

    def mask(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits [G, r, V] with -inf for what may not come: log-probabilities are those of a model that knows of it."""
        return logits

    def restrict(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [G, r, V] with -inf for what may not come, in what is reported, too; not renormalised."""
        return logprobs

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [G, r, V] with -inf for what does not go on, as filters have it; reports are without it."""
        return logprobs
