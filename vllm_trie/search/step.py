"""One step of beam search: from logits to the next beams, and to the hypotheses that finish.

Everything here works on G groups with equal rules at once, in the order of the device's stream. Shapes depend on
nothing that only the device knows, so the host never waits, except to judge stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from vllm_trie.search.devices import NEVER, constant, numbers
from vllm_trie.search.filters import filtered, log_probabilities, pruned
from vllm_trie.search.rank import Array, Candidates, rank_candidates, topk
from vllm_trie.search.rules import SelectRules, num_candidates
from vllm_trie.search.sampling import draw, draw_continuations, joint_probabilities
from vllm_trie.search.slots import choose, in_slots, select_next

Completes = Callable[[Candidates[np.ndarray]], np.ndarray]  # of candidates [G, K] which do, [G, K] bool
NONE = slice(0)
Random = torch.Tensor | Sequence[np.random.Generator]


class TopLogprobs(NamedTuple, Generic[Array]):
    """The best tokens of each row, best first: tensors [G, r, N]; on the host [r, N]."""

    tokens: Array
    logprobs: Array  # float32


class TokenLogprobs(NamedTuple, Generic[Array]):
    """What continuations report of their newest tokens: tensors [G, n]; on the host [n]."""

    logprobs: Array  # float32
    ranks: Array  # how many tokens of its row are at least as probable


class Step(NamedTuple, Generic[Array]):
    """What one step decided: tensors [G, b] and [G, F]; on the host [b] and [F], of a single group."""

    parents: Array  # by slot: the slot whose beam this slot continues
    tokens: Array  # by slot
    scores: Array  # by slot, float32; -inf where there is no beam
    finished: Candidates[Array]  # hypotheses that end here, in the order in which they are kept on equal scores
    top_logprobs: TopLogprobs[Array] | None = None  # by parent; this and the others if log-probabilities are reported
    beam_logprobs: TokenLogprobs[Array] | None = None  # by slot
    finished_logprobs: TokenLogprobs[Array] | None = None

    @property
    def num_beams(self) -> int:
        """Beams that live on, of a single group."""
        return int((np.asarray(self.scores) > NEVER).sum())


class Layout(NamedTuple):
    """How a step is packed: columns of each of its fields, integers first, then floats."""

    ints: list[int]
    floats: list[int]
    top_shape: torch.Size | None  # [r, N], if log-probabilities are reported


def take_step(
    rules: SelectRules,
    logits: torch.Tensor,
    scores: torch.Tensor,
    random: Random | None = None,
    completes: Completes | None = None,
    select_next: Callable[..., Candidates[torch.Tensor]] = select_next,
) -> Step[torch.Tensor]:
    """Take one step of G groups.

    Args:
        rules: Theirs.
        logits: [G, r, V] of any floating point type, processed ones if `rules.is_controlled`.
        scores: [G, r] float32, cumulative log-probability of each row, at most 0; -inf for a row that is dead.
        random: Where each beam samples, [G, b] float64 in [0, 1); where beams are drawn together, by group what draws.
        completes: Tells of candidates on the host which complete a stop string, where there are stop strings.
        select_next: `slots.select_next`, or what does the same on this device.
    """
    if rules.beam_sampling is not None:
        assert isinstance(random, Sequence), "beams are drawn without a generator for each group"
        p, logprobs = joint_distribution(rules, logits, scores)
        cells, is_possible = draw_continuations(p.flatten(1), rules.width, rules.beam_sampling.replacement, random)
        drawn = _drawn(logprobs, scores, cells, is_possible)
        stops = _stops(rules, drawn, completes)
        beams = select_next(drawn, _alive(drawn, stops), rules.width, scores.shape[1])
        step = Step(*beams, _ended(rules, drawn, stops))
        return _reported(rules, best_of(step) if rules.beam_sampling.keeps_one else step, logprobs)
    logprobs, scores = _of_rows(rules, logits, scores, rules.filters.temperature)
    if rules.samples:
        assert isinstance(random, torch.Tensor), "each beam samples without a random number"
        step = _sampled(rules, logprobs, scores, random, completes)
    else:
        step = _best(rules, logprobs, scores, completes, select_next)
    return _reported(rules, step, logprobs)


def joint_distribution(
    rules: SelectRules, logits: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What beam sampling draws the next beams of a group from.

    Args:
        logits: [..., I, V], as for `take_step`.
        scores: [..., I].

    Returns:
        Probabilities [..., I, V] float64, over all continuations together, and log-probabilities [..., I, V]
        float32 of each row by itself, at temperature 1.
    """
    logprobs, scores = _of_rows(rules, logits, scores)
    return joint_probabilities(scores, logprobs, rules.filters), logprobs


def take_cells(
    rules: SelectRules,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    cells: torch.Tensor,
    completes: Completes | None = None,
) -> tuple[Step[torch.Tensor], torch.Tensor]:
    """Go on with what was drawn for one group from its joint distribution.

    Args:
        logprobs: [I, V], as `joint_distribution` returns them.
        scores: [I].
        cells: [K] int64, parent * V + token, at most b.

    Returns:
        A step of one group, and the slot of each cell, [K]; -1 where it finishes.
    """
    num_drawn = len(cells)
    cells = torch.nn.functional.pad(cells, (0, rules.width - num_drawn))[None]
    is_possible = torch.arange(rules.width, device=cells.device) < num_drawn
    drawn = _drawn(logprobs[None], scores[None], cells, is_possible)
    stops = _stops(rules, drawn, completes)
    chosen = choose(drawn.parents, _alive(drawn, stops), rules.width)
    step = Step(*in_slots(drawn, chosen, len(scores)), _ended(rules, drawn, stops))
    takes = chosen[0, :, None] == torch.arange(num_drawn, device=cells.device)  # [b, K]
    slots = torch.where(takes.any(dim=0), takes.int().argmax(dim=0), -1)
    return _reported(rules, step, logprobs[None]), slots


def best_of(step: Step[Any]) -> Step[Any]:
    """The same step, after which only the best beam of each group goes on; on the device or on the host."""
    along: Any = np.take_along_axis if isinstance(step.scores, np.ndarray) else torch.take_along_dim
    best = step.scores.argmax(-1, keepdims=True)
    parents, tokens, scores = (along(field, best, -1) for field in step[:3])
    reported = step.beam_logprobs and TokenLogprobs(*(along(field, best, -1) for field in step.beam_logprobs))
    return step._replace(parents=parents, tokens=tokens, scores=scores, beam_logprobs=reported)


def packed(step: Step[torch.Tensor]) -> tuple[torch.Tensor, Layout]:
    """All of a step as one tensor [G, n] int32, to be copied to the host at once; floats keep their bits."""
    parents, tokens, scores, finished, top_logprobs, of_beams, of_finished = step
    ints, floats = [parents, tokens, finished.parents, finished.tokens], [scores, finished.scores]
    if top_logprobs and of_beams and of_finished:
        ints += [of_beams.ranks, of_finished.ranks, top_logprobs.tokens.flatten(1)]
        floats += [of_beams.logprobs, of_finished.logprobs, top_logprobs.logprobs.flatten(1)]
    words = torch.cat([torch.cat(ints, dim=1).int(), torch.cat(floats, dim=1).view(torch.int32)], dim=1)
    sizes = [[field.shape[1] for field in fields] for fields in (ints, floats)]
    return words, Layout(sizes[0], sizes[1], top_logprobs and top_logprobs.tokens.shape[1:])


def unpacked(array: np.ndarray, layout: Layout) -> list[Step[np.ndarray]]:
    """The step of each group that `packed` has packed; `finished` without what does not finish."""
    parents, tokens, ended_by, ended_in, *reported = _split(array, layout.ints)
    scores, ended_with, *logprobs = _split(array[:, sum(layout.ints) :].view(np.float32), layout.floats)
    ends = ended_with > NEVER
    steps = []
    for at, is_ending in enumerate(map(any, ends.tolist())):
        which = at, ends[at] if is_ending else NONE
        finished = Candidates(ended_by[which], ended_in[which], ended_with[which])
        step = Step(parents[at], tokens[at], scores[at], finished)
        if layout.top_shape is not None:
            step = step._replace(
                top_logprobs=TopLogprobs(*(field[2][at].reshape(layout.top_shape) for field in (reported, logprobs))),
                beam_logprobs=TokenLogprobs(logprobs[0][at], reported[0][at]),
                finished_logprobs=TokenLogprobs(logprobs[1][which], reported[1][which]),
            )
        steps.append(step)
    return steps


def _split(array: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return [array[:, end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


def _best(
    rules: SelectRules,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    completes: Completes | None,
    select_next: Callable[..., Candidates[torch.Tensor]],
) -> Step[torch.Tensor]:
    """The best continuations become beams, or finish by the rules of `semantics`."""
    _, num_rows, vocab_size = logprobs.shape
    width, count = rules.width, num_candidates(rules.width, len(rules.stop_token_ids))
    while True:
        allowed = pruned(filtered(logprobs, rules.filters, count), scores, rules.pruning)
        candidates = rank_candidates(allowed, scores, count)
        stops = _stops(rules, candidates, completes)
        if completes is None or count >= num_rows * vocab_size or ((~stops).sum(dim=1) >= width).all():
            break
        count *= 2  # too many complete a stop string, too few would go on
    if rules.semantics == "hf":  # what stops finishes among the best b; source: transformers 5.19 `_beam_search`
        finished = _ended(rules, candidates, stops, numbers(stops.shape[1], stops.device) < width)
    elif rules.semantics == "tridecode":  # or before the b-th that goes on; source: the trie paper's published code
        finished = _ended(rules, candidates, stops, (~stops).cumsum(dim=1) + stops.int() <= width)
    else:
        finished = _own_stops(rules, allowed, scores, completes)
        if rules.eos_score_factor is not None:
            candidates = _ranked_with_factor(rules, candidates, allowed, scores)
            stops = _stops(rules, candidates, completes)
        if rules.is_last:
            lives = _alive(candidates, stops)
            ended = _ended(rules, candidates, stops, lives & (lives.cumsum(dim=1) <= width))
            finished = Candidates(*(torch.cat(pair, dim=1) for pair in zip(finished, ended, strict=True)))
    return Step(*select_next(candidates, _alive(candidates, stops), width, num_rows), finished)


def _own_stops(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, completes: Completes | None
) -> Candidates[torch.Tensor]:
    """What stops among each beam's own best continuations finishes, however it ranks among all; else -inf.

    Source: vLLM 0.32 `BeamSearchOfflineMixin._beam_search_step`.
    """
    if completes is None:
        return _own_continuations(rules, allowed, scores, rules.stop_token_ids)
    count = num_candidates(rules.width, len(rules.stop_token_ids))
    best, tokens = topk(allowed, min(count, allowed.shape[-1]))
    own = _by_row(tokens, best + scores[..., None])
    return own._replace(scores=own.scores.where(_stops(rules, own, completes), NEVER))


def _ranked_with_factor(
    rules: SelectRules, candidates: Candidates[torch.Tensor], allowed: torch.Tensor, scores: torch.Tensor
) -> Candidates[torch.Tensor]:
    """The candidates by another order: one token competes by its score times a factor, and only among a row's best."""
    assert rules.eos_score_factor is not None
    token_id, factor = rules.eos_score_factor
    own = _own_continuations(rules, allowed, scores, (token_id,))
    others = candidates._replace(scores=candidates.scores.masked_fill(candidates.tokens == token_id, NEVER))
    both = Candidates(*(torch.cat(pair, dim=1) for pair in zip(others, own, strict=True)))
    rank_scores = both.scores.double()
    rank_scores = torch.where(both.tokens == token_id, factor * rank_scores, rank_scores)
    order = rank_scores.argsort(dim=1, descending=True, stable=True)
    return Candidates(*(field.gather(1, order) for field in both))


def _own_continuations(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, token_ids: tuple[int, ...]
) -> Candidates[torch.Tensor]:
    """Each row's continuation by each of `token_ids`; -inf unless it is among the row's best."""
    count = num_candidates(rules.width, len(rules.stop_token_ids))
    tokens = constant(token_ids, allowed.device)
    own = allowed.index_select(-1, tokens)
    num_better = (allowed[:, :, None] > own[..., None]).sum(dim=-1)
    return _by_row(tokens.expand_as(own), (own + scores[..., None]).where(num_better < count, NEVER))


def _by_row(tokens: torch.Tensor, scores: torch.Tensor) -> Candidates[torch.Tensor]:
    """Continuations [G, r, k] of r rows."""
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return Candidates(parents.flatten(1), tokens.flatten(1), scores.flatten(1))


def _sampled(
    rules: SelectRules, logprobs: torch.Tensor, scores: torch.Tensor, random: torch.Tensor, completes: Completes | None
) -> Step[torch.Tensor]:
    """Each beam takes one token that is drawn from what its row may take, or finishes with it.

    The slot of a beam that stops is dead; the search displaces it once nothing is drawn any more.
    """
    num_groups, num_rows, vocab_size = logprobs.shape
    allowed = filtered(logprobs, rules.filters, vocab_size)
    tokens = draw(allowed, random.view(num_groups, num_rows, -1))
    drawn = _by_row(tokens, allowed.gather(-1, tokens) + scores[..., None])
    stops = _stops(rules, drawn, completes)
    beams = drawn._replace(scores=drawn.scores.masked_fill(stops, NEVER))
    return Step(*beams, _ended(rules, drawn, stops))


def _drawn(
    logprobs: torch.Tensor, scores: torch.Tensor, cells: torch.Tensor, is_possible: torch.Tensor
) -> Candidates[torch.Tensor]:
    """Continuations at `cells` [G, K], parent * V + token, in the order in which they were drawn."""
    vocab_size = logprobs.shape[-1]
    parents = cells // vocab_size
    total = logprobs.flatten(1).gather(1, cells) + scores.gather(1, parents)
    return Candidates(parents, cells % vocab_size, total.where(is_possible, NEVER))


def _of_rows(
    rules: SelectRules, logits: torch.Tensor, scores: torch.Tensor, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [..., r, V], and the rows' scores.

    A row that may take no token at all, which only controls can bring about, ends here.
    """
    if rules.is_controlled:
        is_barred = logits.amax(dim=-1) == NEVER
        logits, scores = logits.masked_fill(is_barred[..., None], 0.0), scores.masked_fill(is_barred, NEVER)
    return log_probabilities(logits, rules.stop_token_ids if rules.masks_stops else (), temperature), scores


def _stops(rules: SelectRules, candidates: Candidates[torch.Tensor], completes: Completes | None) -> torch.Tensor:
    """Which candidates [G, K] end in a stop token or complete a stop string."""
    tokens = candidates.tokens
    if len(rules.stop_token_ids) == 1:
        stops = tokens == rules.stop_token_ids[0]
    else:
        stops = (tokens[..., None] == constant(rules.stop_token_ids, tokens.device)).any(dim=-1)
    if completes is None or rules.masks_stops:
        return stops
    on_host = Candidates(*(field.cpu().numpy() for field in candidates))
    return stops | torch.from_numpy(completes(on_host)).to(tokens.device)


def _alive(candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    return (candidates.scores > NEVER) > stops  # that is, and not


def _ended(
    rules: SelectRules, candidates: Candidates[torch.Tensor], stops: torch.Tensor, may_end: torch.Tensor | None = None
) -> Candidates[torch.Tensor]:
    """The candidates that stop, or in the last step all, where they may; the others with a score of -inf."""
    ends = torch.ones_like(stops) if rules.is_last else stops
    ends = ends if may_end is None else ends & may_end
    return candidates._replace(scores=candidates.scores.where(ends, NEVER))


def _reported(rules: SelectRules, step: Step[torch.Tensor], logprobs: torch.Tensor) -> Step[torch.Tensor]:
    """The same step with the log-probabilities that the rules ask for. `logprobs`: [G, r, V], unfiltered."""
    if rules.num_logprobs is None:
        return step
    vocab_size = logprobs.shape[-1]
    num_tops = vocab_size if rules.num_logprobs < 0 else min(rules.num_logprobs, vocab_size)
    best, tokens = topk(logprobs, num_tops)
    return step._replace(
        top_logprobs=TopLogprobs(tokens, best),
        beam_logprobs=_token_logprobs(logprobs, step.parents, step.tokens),
        finished_logprobs=_token_logprobs(logprobs, step.finished.parents, step.finished.tokens),
    )


def _token_logprobs(logprobs: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> TokenLogprobs[torch.Tensor]:
    num_groups, num_rows, vocab_size = logprobs.shape
    own = logprobs.flatten(1).gather(1, parents * vocab_size + tokens)
    groups = torch.arange(num_groups, device=own.device)[:, None]
    # As many at a time as there are rows, to save memory.
    parts = zip(torch.split(parents, num_rows, 1), torch.split(own, num_rows, 1), strict=True)
    ranks = [(logprobs[groups, rows] >= of_rows[..., None]).sum(dim=-1) for rows, of_rows in parts]
    return TokenLogprobs(own, torch.cat(ranks, dim=1))
