"""What every rule on the next tokens of rows is to the search: plain steps, drafts and forests all go by it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

NOTHING = -1  # where a history has no token


class ConstraintSource(Enum):
    """Where the states of rows come from before each step."""

    LAST_STEP = "last step"  # the step before, which has advanced them
    TOKENS = "tokens"  # they are the tokens of each row, its prompt's among them; `NOTHING` where there is none
    MASKS = "masks"  # they are which tokens the grammar of each row allows, which the scheduler knows
    AMATEUR = "amateur"  # they are the draft model's log-probabilities of the next token, see `contrast`


class ConstrainedContinuations(NamedTuple):
    """How rows may go on: [G, r, B] each; where a row has fewer than B continuations, the others do not exist."""

    tokens: torch.Tensor  # int64, ascending, but for stop tokens, which come last
    targets: torch.Tensor  # int64, what they lead to, see `Constraint.outcomes`
    exist: torch.Tensor  # bool


class ConstraintOutcomes(NamedTuple):
    """What continuations lead to, of any shape."""

    states: torch.Tensor
    is_complete: torch.Tensor  # bool, the hypothesis is one that may be returned
    ends: torch.Tensor  # bool, and it is over
    goes_on: torch.Tensor  # bool, there are continuations from there


class Constraint:
    """A rule on what each row may take next, by a state: one tensor [G, r, ...] of G groups with r rows each.

    Constraints are compared by what they say: groups whose constraints are equal are one batch. The rules below leave
    everything as it is, unless a constraint says otherwise; it says so in the one of them that fits.
    """

    source: ClassVar[ConstraintSource] = ConstraintSource.LAST_STEP
    most_boost: float = 0.0  # see `boosts`: the most that one token may add; infinite, if there is no most
    is_sparse: ClassVar[bool] = False  # it lists `continuations`, which are few, instead of leaving tokens out

    @property
    def num_bytes(self) -> int:
        """That it takes on each device, if it came with its request."""
        return 0

    def on(self, tries: Mapping[str, Any], stop_token_ids: tuple[int, ...]) -> Constraint:
        """The same on a device with these catalogs, of hypotheses that these tokens end."""
        return self

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """[1, r, ...] the states of hypotheses without a token."""
        raise NotImplementedError

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after one more token [G, r] each. Where a token is not possible, any state."""
        raise NotImplementedError

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether a token [G, r] is possible there and something may come after it."""
        raise NotImplementedError

    def boosts(self, states: torch.Tensor, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor | None:
        """What each token adds to the score that hypotheses compete by, besides its log-probability; None: nothing.

        Args:
            logprobs: [G, r, V], of what each row may take next.
            is_end: What it is added to ends with this token.

        Returns:
            [G, r, V] float32, finite.
        """
        return None

    def pending(self, states: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """What hypotheses lose of their boosts that end with tokens [G, k] after rows `parents` [G, k]; None: nothing.

        There may be many more of them than rows.
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

    @property
    def num_ends(self) -> int:
        """How many stop tokens `continuations` lists at last, besides what `most_continuations` counts."""
        return 0

    def most_continuations(self, states: torch.Tensor, vocab_size: int, length: int | None) -> int:
        """How many continuations any of these rows has, or a bound that needs no look at the device.

        Args:
            states: [G, r].
            vocab_size: Tokens that there are.
            length: Of these hypotheses, if they are equally long, in tokens.
        """
        raise NotImplementedError

    def continuations(self, states: torch.Tensor, most: int) -> ConstrainedContinuations:
        """How rows may go on, if none of them has more continuations than `most`, as `most_continuations` has it."""
        raise NotImplementedError

    def outcomes(self, targets: torch.Tensor) -> ConstraintOutcomes:
        """What continuations lead to, by their targets, of any shape."""
        raise NotImplementedError

    def go_on(self, targets: torch.Tensor) -> torch.Tensor:
        """What `outcomes` says of them in `goes_on`, alone."""
        raise NotImplementedError

    def end(self, targets: torch.Tensor) -> torch.Tensor:
        """What `outcomes` says of them in `ends`, alone."""
        raise NotImplementedError

    def logprobs_of(self, logprobs: torch.Tensor, continuations: ConstrainedContinuations) -> torch.Tensor:
        """[G, r, B] log-probabilities of continuations, of all [G, r, V]; -inf where there is none."""
        return logprobs.gather(-1, continuations.tokens).where(continuations.exist, float("-inf"))
