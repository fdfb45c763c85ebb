"""The interface of a rule on a row's next tokens, which plain steps, drafts and draft forests all follow."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, ClassVar, NamedTuple

import torch

NOTHING = -1  # where a history has no token


class ConstraintSource(Enum):
    """Where the states of rows come from before a step."""

    LAST_STEP = "last step"  # the previous step, which has advanced them
    TOKENS = "tokens"  # the tokens of each row, its prompt included; `NOTHING` where there is none
    MASKS = "masks"  # the tokens that the grammar of each row allows, which the scheduler sends
    AMATEUR = "amateur"  # the draft model's log-probabilities of the next token, see `contrast`


class ConstrainedContinuations(NamedTuple):
    """How rows may continue: [G, r, B] each. A row with fewer than B continuations has entries that do not exist."""

    tokens: torch.Tensor  # int64, ascending, except stop tokens, which come last
    targets: torch.Tensor  # int64, what each token leads to, see `Constraint.outcomes`
    exist: torch.Tensor  # bool


class ConstraintOutcomes(NamedTuple):
    """What continuations lead to, by target; of any shape."""

    states: torch.Tensor
    is_complete: torch.Tensor  # bool, the hypothesis may be returned
    ends: torch.Tensor  # bool, the hypothesis ends
    goes_on: torch.Tensor  # bool, the hypothesis has continuations


class Constraint:
    """A rule on what each row may take next, by a state: a tensor [G, r, ...] for G groups of r rows each.

    Constraints are compared by value: groups with equal constraints form one batch. The methods of this class leave
    everything unchanged; a constraint overrides those that it needs.
    """

    source: ClassVar[ConstraintSource] = ConstraintSource.LAST_STEP
    most_boost: float = 0.0  # see `boosts`: the most that one token may add; inf if unbounded
    is_sparse: ClassVar[bool] = False  # it lists `continuations`, which are few, instead of masking tokens

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on each device, if it came with its request."""
        return 0

    def on(self, tries: Mapping[str, Any], stop_token_ids: tuple[int, ...]) -> Constraint:
        """This constraint on a device that has these catalogs, for hypotheses that these stop tokens end."""
        return self

    def begin(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """[1, r, ...], the states of empty hypotheses."""
        raise NotImplementedError

    def advance(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The states after one more token [G, r] each; any state where the token is not possible."""
        raise NotImplementedError

    def leads_on(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[G, r] bool, whether a token [G, r] is possible and something may follow it."""
        raise NotImplementedError

    def boosts(self, states: torch.Tensor, logprobs: torch.Tensor, is_end: bool) -> torch.Tensor | None:
        """What each token adds, besides its log-probability, to the score that hypotheses compete by; None: nothing.

        Args:
            logprobs: [G, r, V], of what each row may take next.
            is_end: The token ends the hypothesis.

        Returns:
            [G, r, V] float32, finite.
        """
        return None

    def pending(self, states: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """The boosts that hypotheses lose if they end with tokens [G, k] after rows `parents` [G, k]; None: nothing.

        k may be much larger than r.
        """
        return None

    def mask(self, logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits [G, r, V] with -inf for forbidden tokens: log-probabilities are normalised over the others."""
        return logits

    def restrict(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [G, r, V] with -inf for forbidden tokens, also in reports; not renormalised."""
        return logprobs

    def narrow(self, logprobs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [G, r, V] with -inf for what beams do not take; like filters, it does not alter reports."""
        return logprobs

    @property
    def num_ends(self) -> int:
        """How many stop tokens `continuations` lists last, beyond those that `most_continuations` counts."""
        return 0

    def most_continuations(self, states: torch.Tensor, vocab_size: int, length: int | None) -> int:
        """The most continuations of any of these rows, or a bound that needs no wait for the device.

        Args:
            states: [G, r].
            vocab_size: Tokens of the vocabulary.
            length: Tokens of every hypothesis, if all are equally long.
        """
        raise NotImplementedError

    def continuations(self, states: torch.Tensor, most: int) -> ConstrainedContinuations:
        """How rows may continue; `most` is at least `most_continuations`."""
        raise NotImplementedError

    def outcomes(self, targets: torch.Tensor) -> ConstraintOutcomes:
        """What continuations lead to, by their targets of any shape."""
        raise NotImplementedError

    def go_on(self, targets: torch.Tensor) -> torch.Tensor:
        """`outcomes(targets).goes_on`, without the other fields."""
        raise NotImplementedError

    def end(self, targets: torch.Tensor) -> torch.Tensor:
        """`outcomes(targets).ends`, without the other fields."""
        raise NotImplementedError

    def logprobs_of(self, logprobs: torch.Tensor, continuations: ConstrainedContinuations) -> torch.Tensor:
        """[G, r, B], the log-probabilities of continuations, from [G, r, V]; -inf where there is none."""
        return logprobs.gather(-1, continuations.tokens).where(continuations.exist, float("-inf"))
