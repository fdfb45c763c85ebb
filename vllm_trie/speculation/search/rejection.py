"""Speculative beam sampling: accepts drafts sampled from the draft model so that the target's distribution is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_trie.search.filters import search_running_sum
from vllm_trie.search.sampling import sample_search_cells

NEGLIGIBLE = 1e-12  # a probability this small is rounding


class DraftAcceptanceRules(NamedTuple):
    """How wide drafts and layers are, and which of beam sampling's two distributions the layers follow."""

    draft_width: int  # W_S
    max_width: int  # W_L
    min_width: int = 1
    threshold: float | None = None  # None: every layer has max_width
    replacement: bool = False
    top_k: int | None = None  # accept drafts by rank, which is not exact; None: exactly

    def width(self, p: torch.Tensor, q: torch.Tensor, num_drafts: int) -> int:
        """How many beams a layer has: `acceptable_draft_width`, unless it is fixed."""
        if self.threshold is None:
            return self.max_width
        return acceptable_draft_width(p, q, num_drafts, self.threshold, self.min_width, self.max_width)

    def verify(self, p: torch.Tensor, drafts: Drafts, width: int, rng: np.random.Generator) -> AcceptedLayer:
        """Turns drafts into beams by the requested rule."""
        if self.top_k is not None:
            return accept_drafts_by_rank(p, drafts.cells, width, self.top_k, self.replacement, rng)
        return accept_drafts(p, drafts.q, drafts.cells, width, self.replacement, rng)


class Drafts(NamedTuple):
    """One layer of drafts."""

    q: torch.Tensor  # [I, V] float64, the distribution that they were sampled from
    cells: np.ndarray  # [S] flat cells, in the order sampled


class AcceptedLayer(NamedTuple):
    """One layer of beams, sampled from the target's distribution."""

    cells: np.ndarray  # [W] flat cells, in the order sampled
    drafts: np.ndarray  # [W], the draft of each; -1 if it was sampled from the target

    @property
    def is_complete(self) -> bool:
        """Whether all are drafts, so that the forward pass has also computed what follows them."""
        return bool((self.drafts >= 0).all())


def sample_acceptable_drafts(q: torch.Tensor, rules: DraftAcceptanceRules, rng: np.random.Generator) -> Drafts:
    """Samples a layer of drafts from exactly the distribution they will be verified against."""
    return Drafts(q, sample_search_cells(q, rules.draft_width, rules.replacement, rng))


def accept_draft_layers(
    layers: Sequence[Drafts],
    distribution: Callable[[AcceptedLayer | None], torch.Tensor],
    rules: DraftAcceptanceRules,
    rng: np.random.Generator,
) -> Iterator[AcceptedLayer]:
    """Verifies layers of drafts until one is incomplete; after the last, samples one more from the target.

    Each layer has beam sampling's distribution given the previous one, unless drafts are accepted by rank. The
    iteration ends early where nothing is possible. Source: DSBD paper.

    Args:
        layers: The drafts of one forest, the first sampled from the input beams, each later one from all drafts
            before it.
        distribution: The target's joint distribution: for None, over the input beams; for a complete layer, with a row
            for each of *its drafts*, zero for those that were not accepted or have finished.
        rules: The width of a layer.
        rng: Independent of what sampled the drafts.
    """
    verified, width = None, rules.max_width
    for drafts in layers:
        p = distribution(verified)
        if not p.any():
            return
        width = rules.width(p, drafts.q, len(drafts.cells))
        verified = rules.verify(p, drafts, width, rng)
        yield verified
        if not verified.is_complete:
            return
    cells = sample_search_cells(distribution(verified), width, rules.replacement, rng)
    if len(cells):
        yield AcceptedLayer(cells, np.full(len(cells), -1))


def accept_drafts(
    p: torch.Tensor, q: torch.Tensor, drafts: np.ndarray, width: int, replacement: bool, rng: np.random.Generator
) -> AcceptedLayer:
    """Turns samples from q into samples from p, as many of them as possible being the drafts.

    The cells are `width` samples from p, independent with replacement and sequential without it, whatever q is, if
    `width` was set without looking at the drafts. Source: DSBD paper, whose ratio is printed upside down.

    Args:
        p: [I, V] float64, normalised, not all zero. Rows of rejected draft parents are zero.
        q: [I, V] float64, as the drafts were sampled: neither masked nor renormalised over valid parents.
        drafts: [S] flat cells in the order sampled, with or without replacement as `replacement` has it.
        width: W; without replacement fewer cells are returned if fewer are possible.
        replacement: Whether a cell may be sampled again.
        rng: Independent of what sampled the drafts.
    """
    residual = DraftRejectionResidual(p, q, replacement)
    cells, accepted = list[int](), list[int]()
    for index, draft in enumerate(_accept_drafts_as_sampled(p, q, drafts, replacement)):
        if len(cells) == width or residual.is_empty:
            break
        if rng.random() < residual.chance(draft):
            residual.accept(drafts[index : index + 1], drafts[: index + 1])
            cells.append(draft.cell)
            accepted.append(index)
        else:
            residual.reject(draft.left)
    num_filled = width - len(cells)
    if num_filled and not residual.is_empty:
        first = sample_search_cells(residual.distribution, 1, replacement, rng)
        residual.accept(first, drafts)
        cells += [*first, *sample_search_cells(residual.distribution, num_filled - 1, replacement, rng)]
    accepted += [-1] * (len(cells) - len(accepted))
    return AcceptedLayer(np.array(cells, dtype=np.int64), np.array(accepted, dtype=np.int64))


def accept_drafts_by_rank(
    p: torch.Tensor, drafts: np.ndarray, width: int, top_k: int, replacement: bool, rng: np.random.Generator
) -> AcceptedLayer:
    """Accepts the drafts that are among the target's best cells, and samples the rest from p.

    The cells follow no distribution that p alone determines. As the temperature falls, without replacement and with
    `top_k` at most `width`, they become the `width` best ones, as those of `accept_drafts` do. Source: top-K
    acceptance; AtSpeed (https://arxiv.org/abs/2410.05165) relaxes verification in the same spirit.

    Args:
        p: [I, V] float64, as in `accept_drafts`.
        drafts: [S] flat cells in the order sampled.
        width: W, as in `accept_drafts`.
        top_k: How many cells count as best; all that tie for the last place are included.
        replacement: Whether a cell may be sampled again.
        rng: As in `accept_drafts`.
    """
    target = p.flatten()
    least = target.topk(min(top_k, len(target))).values[-1]
    of_drafts = target[torch.from_numpy(drafts).to(p.device)]
    accepted = ((of_drafts >= least) & (of_drafts > 0)).nonzero().flatten().cpu().numpy()[:width]
    cells = drafts[accepted]
    left = target if replacement else target.index_fill(0, torch.from_numpy(cells).to(p.device), 0.0)
    filled = sample_search_cells(left, width - len(cells), replacement, rng)
    return AcceptedLayer(np.concatenate([cells, filled]), np.concatenate([accepted, np.full(len(filled), -1)]))


class Draft(NamedTuple):
    """A draft as it is verified; its probability when it was sampled was q / left."""

    cell: int
    p: float
    q: float
    left: float  # the mass that q had left after the earlier drafts: 1 with replacement


class DraftRejectionResidual:
    """p': the target's distribution for the next beam, given the drafts seen so far.

    A rejection makes p' = norm(max(p' - q', 0)), q' being the distribution that the rejected draft was sampled from. An
    acceptance resets p' = p; without replacement, p without the accepted cells. All updates between two acceptances
    together subtract a multiple of q, so p' = norm(max(p - debt * q, 0)): a rejection costs one pass and no copy.

    q needs no mask where a parent was rejected: p is zero in such a row, and so is the maximum. Renormalising q over
    valid parents would be wrong, because its drafts were sampled, and rejected, with the probabilities of q itself.
    Without replacement the same debt is charged to rejected drafts, which q' no longer contains: they were rejected
    because it exceeds their p', and are zero until the next acceptance.

    Args:
        p: [I, V] float64.
        q: [I, V] float64.
        replacement: Whether a cell may be sampled again.
    """

    mass: float  # of `distribution`
    debt: float

    def __init__(self, p: torch.Tensor, q: torch.Tensor, replacement: bool) -> None:
        self.replacement = replacement
        self.target = p.flatten() if replacement else p.flatten().clone()
        self.proposal = q.flatten() if replacement else q.flatten().clone()
        self._restart()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left to sample."""
        return self.mass == 0

    @property
    def distribution(self) -> torch.Tensor:
        """p' [I * V], unnormalised."""
        return self.target.sub(self.proposal, alpha=self.debt).clamp_(min=0) if self.debt else self.target

    def chance(self, draft: Draft) -> float:
        """p' / q', the probability to accept a draft, if less than 1."""
        kept = max(draft.p - self.debt * draft.q, 0.0)
        return kept / self.mass / (draft.q / draft.left) if kept else 0.0

    def accept(self, cells: np.ndarray, sampled: np.ndarray) -> None:
        """Starts the next beam: `cells` are taken, and the drafts `sampled` cannot come again."""
        if not self.replacement:
            self.target[torch.from_numpy(cells).to(self.target.device)] = 0
            self.proposal[torch.from_numpy(sampled).to(self.proposal.device)] = 0
        self._restart()

    def reject(self, left: float = 1.0) -> float:
        """Subtracts the rejected draft's q' from p'. Returns the probability that a draft is rejected here."""
        before = self.mass
        self.debt += before / left
        self.mass = float(self.distribution.sum())
        rejected = self.mass / before
        if self.mass < NEGLIGIBLE * self.whole:  # p' = q', and only rounding rejects
            self._restart()
        return rejected

    def _restart(self) -> None:
        self.debt = 0.0
        self.mass = self.whole = float(self.target.sum())


def draft_acceptance_distribution(p: torch.Tensor, q: torch.Tensor, num_drafts: int) -> np.ndarray:
    """P(S, k) for k = 0..S: the distribution of how many of S drafts with replacement are accepted, without a limit.

    The run of drafts up to the next acceptance starts afresh after each, so the counts are a convolution.
    Source: DSBD paper, whose M_S is S.
    """
    residual = DraftRejectionResidual(p, q, replacement=True)
    none = np.cumprod([1.0] + [residual.reject() for _ in range(num_drafts)])  # [S + 1], P(i, 0)
    first = np.concatenate([[0.0], none[:-1] - none[1:]])  # the first accepted is the i-th
    distribution = [none]
    for _ in range(num_drafts):
        distribution.append(np.convolve(first, distribution[-1])[: num_drafts + 1])
    return np.array(distribution)[:, -1]


def acceptable_draft_width(
    p: torch.Tensor, q: torch.Tensor, num_drafts: int, threshold: float, min_width: int, max_width: int
) -> int:
    """The widest layer that drafts fill with a probability of at least `threshold`, within bounds.

    Derived for drafts with replacement, and also used without it: the layer's distribution stays exact under any rule
    that looks at p and q but not at the drafts. Source: DSBD paper.
    """
    at_least = draft_acceptance_distribution(p, q, num_drafts)[::-1].cumsum()[
        ::-1
    ]  # [S + 1], P(>= K), which is 1 at K = 0
    widest = int(np.flatnonzero(at_least >= threshold - NEGLIGIBLE)[-1])
    return min(max_width, max(min_width, widest))


def _accept_drafts_as_sampled(p: torch.Tensor, q: torch.Tensor, drafts: np.ndarray, replacement: bool) -> list[Draft]:
    where = torch.from_numpy(drafts).to(q.device)
    target, chances = p.flatten()[where], q.flatten()[where]
    left = torch.ones_like(chances)
    if not replacement:
        # Summed from the end: one minus what was sampled would be mere rounding once q is nearly used up.
        left = q.flatten().index_fill(0, where, 0.0).sum() + search_running_sum(chances.flip(0)).flip(0)
    return [Draft(*seen) for seen in zip(drafts.tolist(), *torch.stack([target, chances, left]).tolist(), strict=True)]
