"""How one step of a search selects: what the scheduler decides and the worker follows."""

from __future__ import annotations

from typing import NamedTuple

from vllm_trie.search.constraints.catalog import ItemRules
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.filters import LogitsFilters, Pruning


class BeamSampling(NamedTuple):
    """Beam sampling: the next beams are drawn from one joint distribution of all continuations of all beams."""

    replacement: bool  # the same continuation may be drawn more than once
    min_width: int  # of a layer that is verified, in beams
    threshold: float | None  # how probably as many beams as that must be accepted; None: always all beams
    keeps_one: bool  # of the beams that one target forward leads to, only the best goes on
    stochastic: bool = False  # stochastic beam search: hypotheses are drawn without replacement, not continuations


class BeamGroups(NamedTuple):
    """Group beam search: how many groups the beams are in, and what the later ones of them avoid."""

    number: int
    penalty: float  # that each earlier beam that took a token takes off its log-probability
    padding: int | None  # the token that beams take of a group that is done; None: none
    done: tuple[int, ...] = ()  # which groups are


class SelectRules(NamedTuple):
    """How the worker selects in one step. Groups with equal rules are selected together."""

    width: int
    semantics: str
    stop_token_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    skip_special_tokens: bool  # in the text in which stop strings are looked for
    num_logprobs: int | None  # what each row must report; None: nothing
    is_controlled: bool  # penalties, biases, custom processors or the like act on the logits
    filters: LogitsFilters = LogitsFilters()
    pruning: Pruning = Pruning()
    masks_stops: bool = False  # min_tokens not reached: no hypothesis may stop here
    is_last: bool = False  # the length is reached: all hypotheses end here
    samples: bool = False  # each beam takes a token that is drawn for it
    eos_score_factor: tuple[int, float] | None = None  # token, and the factor of the score by which it is compared
    beam_sampling: BeamSampling | None = None  # how beams are drawn; None: the best go on
    num_beams: int | None = None  # that go on at most; None: one for each slot
    items: ItemRules | None = None  # the catalog along which they go
    beam_groups: BeamGroups | None = None  # in which they are; None: all in one
    constraints: tuple[Constraint, ...] = ()  # under which rows go besides

    @property
    def ranks_together(self) -> bool:
        """Whether all beams' continuations, those that finish among them, have one ranking that alone decides.

        In it, beams that are worse than whatever lives on have no say.
        """
        return self.semantics in ("hf", "tridecode") and self.pruning == Pruning()


def num_candidates(width: int, num_stop_tokens: int, num_parents: int = 0) -> int:
    """How many candidates must be ranked so that `width` of them can go on.

    Each of the b beams can propose every stop token once, so (1 + stop tokens) * b always leave b
    others. transformers ranks at least 2b; so do we.

    Args:
        num_parents: Beams that propose, if these may be more.
    """
    return max(2 * width, width + num_stop_tokens * max(width, num_parents))
