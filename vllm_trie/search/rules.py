"""How one step of a search selects: what the scheduler decides and the worker follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_trie.search.constraints.catalog import ItemRules
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.stops import Stops
from vllm_trie.search.filters import LogitsFilters, Pruning


class Best(NamedTuple):
    """Beam search: the best continuations go on.

    Args:
        semantics: Whose rules say what finishes: "hf", "vllm" or "tridecode".
        eos_score_factor: A token, and the factor of the score by which it is compared.
    """

    semantics: str = "hf"
    eos_score_factor: tuple[int, float] | None = None


class Drawn(NamedTuple):
    """Beam sampling: the next beams are drawn from one joint distribution of all continuations of all beams.

    Args:
        replacement: The same continuation may be drawn more than once.
        min_width: Of a layer that is verified, in beams.
        threshold: How probably as many beams as that must be accepted; None: always all beams.
        keeps_one: Of the beams that one target forward leads to, only the best goes on.
    """

    replacement: bool
    min_width: int
    threshold: float | None
    keeps_one: bool


@dataclass(frozen=True)
class Stochastic:
    """Stochastic beam search: hypotheses are drawn without replacement, not continuations."""


@dataclass(frozen=True)
class SampledEach:
    """Each beam takes a token that is drawn for it."""


class InGroups(NamedTuple):
    """Group beam search: how many groups the beams are in, and what the later ones of them avoid.

    Args:
        number: Of groups.
        penalty: That each earlier beam that took a token takes off its log-probability.
        padding: The token that beams take of a group that is done; None: none.
        done: Which groups are.
    """

    number: int
    penalty: float
    padding: int | None
    done: tuple[int, ...] = ()


Strategy = Best | Drawn | Stochastic | SampledEach | InGroups


class SelectRules(NamedTuple):
    """How the worker selects in one step. Groups with equal rules are selected together."""

    width: int
    strategy: Strategy = Best()
    stops: Stops = Stops()
    num_logprobs: int | None = None  # what each row must report; None: nothing
    is_controlled: bool = False  # penalties, biases, custom processors or the like act on the logits
    filters: LogitsFilters = LogitsFilters()
    pruning: Pruning = Pruning()
    items: ItemRules | None = None  # the catalog along which rows go
    constraints: tuple[Constraint, ...] = ()  # under which they go besides
    is_last: bool = False  # the length is reached: all hypotheses end here
    num_beams: int | None = None  # that go on at most; None: one for each slot

    @property
    def ranks_together(self) -> bool:
        """Whether all beams' continuations, those that finish among them, have one ranking that alone decides.

        In it, beams that are worse than whatever lives on have no say.
        """
        strategy = self.strategy
        if any(constraint.most_boost for constraint in self.constraints):  # worse ones may come to be better
            return False
        return isinstance(strategy, Best) and strategy.semantics != "vllm" and self.pruning == Pruning()


def num_candidates(width: int, num_stop_tokens: int, num_parents: int = 0) -> int:
    """How many candidates must be ranked so that `width` of them can go on.

    Each of the b beams can propose every stop token once, so (1 + stop tokens) * b always leave b
    others. transformers ranks at least 2b; so do we.

    Args:
        num_parents: Beams that propose, if these may be more.
    """
    return max(2 * width, width + num_stop_tokens * max(width, num_parents))
