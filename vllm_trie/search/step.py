"""One step of beam search: from logits to the next beams, and to the hypotheses that finish.

Everything here works on G groups with equal rules at once, in the order of the device's stream. Shapes depend on
nothing that only the device knows, so the host never waits, except to judge stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

import numpy as np
import torch

from vllm_trie.search.pruning import pruned
from vllm_trie.search.rank import Array, Candidates, rank_candidates
from vllm_trie.search.rules import SelectRules, num_candidates
from vllm_trie.search.sampling import draw, draw_continuations, joint
from vllm_trie.search.slots import choose, in_slots, select_next
from vllm_trie.search.warping import NEVER, filtered, log_probabilities, tensor_of

__all__ = ["Candidates", "num_candidates"]

Completes = Callable[[Candidates[np.ndarray]], np.ndarray]  # of candidates [G, K] which do, [G, K] bool
Random = torch.Tensor | Sequence[np.random.Generator]
Layout = tuple[tuple[tuple[int, ...], bool], ...]  # of each field its shape for one group, and whether it is of floats


class TopLogprobs(NamedTuple, Generic[Array]):
    """The best tokens of each row, best first: [G, r, N], on the host [r, N]."""

    tokens: Array
    logprobs: Array  # float32


class TokenLogprobs(NamedTuple, Generic[Array]):
    """What continuations report of their newest tokens: [G, n], on the host [n]."""

    logprobs: Array  # float32
    ranks: Array  # how many tokens of its row are at least as probable


class Step(NamedTuple, Generic[Array]):
    """What one step decided: tensors [G, b] and [G, F]; on the host [b] and [F], of a single group."""

    parents: Array  # by slot: the slot whose beam this slot continues
    tokens: Array  # by slot
    scores: Array  # by slot, float32; -inf where fewer than b continuations exist
    finished: Candidates[Array]  # hypotheses that end here, in the order in which they are kept on equal scores
    is_finished: Array  # bool: which of `finished` are meant; all, on the host
    top_logprobs: TopLogprobs[Array] | None = None  # by parent; this and the others if rules ask for log-probabilities
    beam_logprobs: TokenLogprobs[Array] | None = None  # by slot
    finished_logprobs: TokenLogprobs[Array] | None = None
    tops: Any = None

    @property
    def num_beams(self) -> int:
        """Beams that live on, of a single group."""
        return int((np.asarray(self.scores) > NEVER).sum())

    def group(self: Any, index: int, tops: Any = None) -> Step:
        chosen = self.is_finished[index]
        finished = Candidates(*(field[index][chosen] for field in self.finished))
        return Step(self.parents[index], self.tokens[index], self.scores[index], finished, chosen[chosen], tops=tops)


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
    if rules.law is not None:
        assert isinstance(random, Sequence), "beams are drawn without a generator for each group"
        p, logprobs = joint_distribution(rules, logits, scores)
        cells, is_possible = draw_continuations(p.flatten(1), rules.width, rules.law.replacement, random)
        drawn = _drawn(logprobs, scores, cells, is_possible)
        stops = _stops(rules, drawn, completes)
        beams = select_next(drawn, _go_on(drawn, stops), rules.width, scores.shape[1])
        step = Step(*beams, drawn, _end(rules, drawn, stops))
        return _reported(rules, best_of(step) if rules.law.keeps_one else step, logprobs)
    logits, scores = _without_barred_rows(rules, logits, scores)
    logprobs = log_probabilities(logits, _masked(rules), rules.warping.temperature)
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
    logits, scores = _without_barred_rows(rules, logits, scores)
    logprobs = log_probabilities(logits, _masked(rules))
    return joint(scores, logprobs, rules.warping), logprobs


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
    chosen = choose(drawn.parents, _go_on(drawn, stops), rules.width)
    step = Step(*in_slots(drawn, chosen, len(scores)), drawn, _end(rules, drawn, stops))
    takes = chosen[0, :, None] == torch.arange(num_drawn, device=cells.device)  # [b, K]
    slots = torch.where(takes.any(dim=0), takes.int().argmax(dim=0), -1)
    return _reported(rules, step, logprobs[None]), slots


def best_of(step: Step[torch.Tensor]) -> Step[torch.Tensor]:
    """The same step, after which only the best beam of each group goes on."""
    best = step.scores.argmax(dim=1, keepdim=True)
    parents, tokens, scores = (field.gather(1, best) for field in (step.parents, step.tokens, step.scores))
    reported = step.beam_logprobs and TokenLogprobs(*(field.gather(1, best) for field in step.beam_logprobs))
    return step._replace(parents=parents, tokens=tokens, scores=scores, beam_logprobs=reported)


def packed(step: Step[torch.Tensor]) -> tuple[torch.Tensor, Layout]:
    """All of a step as one tensor [G, n] int32, to be copied to the host at once; floats keep their bits."""
    parts = [None if part is None else [part] if isinstance(part, torch.Tensor) else part for part in step]
    fields: list[torch.Tensor] = [field for part in parts if part is not None for field in part]
    layout = tuple((tuple(field.shape[1:]), field.is_floating_point()) for field in fields)
    words = [field.view(torch.int32) if field.is_floating_point() else field for field in fields]
    return torch.cat([field.flatten(1) for field in words], dim=1).int(), layout


def unpacked(array: np.ndarray, layout: Layout) -> list[Step[np.ndarray]]:
    """The step of each group that `packed` has packed."""
    fields, start = list[np.ndarray](), 0
    for shape, is_float in layout:
        words = array[:, start : (start := start + int(np.prod(shape)))]
        fields.append((words.view(np.float32) if is_float else words).reshape(len(array), *shape))
    is_finished = fields[6] = fields[6].astype(bool)
    return [_of_group([field[at] for field in fields], ends) for at, ends in enumerate(is_finished)]


def _of_group(fields: list[np.ndarray], ends: np.ndarray) -> Step[np.ndarray]:
    fields[3:7] = (field[ends] for field in fields[3:7])
    decided = Step(fields[0], fields[1], fields[2], Candidates(*fields[3:6]), fields[6])
    if len(fields) == 7:
        return decided
    tops, of_beams, of_finished = fields[7:9], fields[9:11], (field[ends] for field in fields[11:])
    return decided._replace(
        top_logprobs=TopLogprobs(*tops),
        beam_logprobs=TokenLogprobs(*of_beams),
        finished_logprobs=TokenLogprobs(*of_finished),
    )


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
        allowed = pruned(filtered(logprobs, rules.warping, count), scores, rules.pruning)
        candidates = rank_candidates(allowed, scores, count)
        stops = _stops(rules, candidates, completes)
        if completes is None or count >= num_rows * vocab_size or ((~stops).sum(dim=1) >= width).all():
            break
        count *= 2  # too many complete a stop string, too few would go on
    if rules.semantics == "vllm":
        finished = _own_stops(rules, allowed, scores, completes)
        if rules.handicap is not None:
            candidates = _ranked_with_factor(rules, candidates, allowed, scores)
            stops = _stops(rules, candidates, completes)
        lives = _go_on(candidates, stops)
        if rules.is_last:
            ends = lives & (lives.cumsum(dim=1) <= width)
            live = candidates._replace(scores=candidates.scores.where(ends, NEVER))
            finished = Candidates(*(torch.cat(pair, dim=1) for pair in zip(finished, live, strict=True)))
        is_finished = finished.scores > NEVER
    else:
        lives = _go_on(candidates, stops)
        finished, is_finished = candidates, _end(rules, candidates, stops)
        if rules.semantics == "hf":  # source: transformers 5.19 `GenerationMixin._beam_search`
            finished, is_finished = Candidates(*(field[:, :width] for field in finished)), is_finished[:, :width]
        else:  # whatever stops before the last to go on; source: the trie paper's published code
            is_finished &= (~stops).cumsum(dim=1) + stops.int() <= width
    return Step(*select_next(candidates, lives, width, num_rows), finished, is_finished)


def _own_stops(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, completes: Completes | None
) -> Candidates[torch.Tensor]:
    """What stops among each beam's own best continuations finishes, however it ranks among all; else -inf.

    Source: vLLM 0.32 `BeamSearchOfflineMixin._beam_search_step`.
    """
    if completes is None:
        return _own_continuations(rules, allowed, scores, rules.stop_token_ids)
    count = num_candidates(rules.width, len(rules.stop_token_ids))
    best, tokens = allowed.topk(min(count, allowed.shape[-1]), dim=-1)
    own = _by_row(tokens, best + scores[..., None])
    return own._replace(scores=own.scores.where(_stops(rules, own, completes), NEVER))


def _ranked_with_factor(
    rules: SelectRules, candidates: Candidates[torch.Tensor], allowed: torch.Tensor, scores: torch.Tensor
) -> Candidates[torch.Tensor]:
    """The candidates by another order: one token competes by its score times a factor, and only among a row's best."""
    assert rules.handicap is not None
    token_id, factor = rules.handicap
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
    tokens = tensor_of(token_ids, allowed.device)
    own = allowed.index_select(-1, tokens)
    num_better = (allowed[:, :, None] > own[..., None]).sum(dim=-1)
    return _by_row(tokens.expand_as(own), (own + scores[..., None]).where(num_better < count, NEVER))


def _by_row(tokens: torch.Tensor, scores: torch.Tensor) -> Candidates[torch.Tensor]:
    """Continuations [G, r, k] of r rows."""
    parents = torch.arange(tokens.shape[1], device=tokens.device)[:, None].expand_as(tokens)
    return Candidates(parents.flatten(1), tokens.flatten(1), scores.flatten(1))


def _sampled(
    rules: SelectRules,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    random: torch.Tensor,
    completes: Completes | None,
) -> Step[torch.Tensor]:
    """Each beam takes one token that is drawn from what its row may take, or finishes with it.

    The slot of a beam that stops is dead; the search displaces it once nothing is drawn any more.
    """
    num_groups, num_rows, vocab_size = logprobs.shape
    allowed = filtered(logprobs, rules.warping, vocab_size)
    tokens = draw(allowed, random.view(num_groups, num_rows, -1))
    drawn = _by_row(tokens, allowed.gather(-1, tokens) + scores[..., None])
    stops = _stops(rules, drawn, completes)
    beams = drawn._replace(scores=drawn.scores.masked_fill(stops, NEVER))
    return Step(*beams, drawn, _end(rules, drawn, stops))


def _drawn(
    logprobs: torch.Tensor, scores: torch.Tensor, cells: torch.Tensor, is_possible: torch.Tensor
) -> Candidates[torch.Tensor]:
    """Continuations at `cells` [G, K], parent * V + token, in the order in which they were drawn."""
    vocab_size = logprobs.shape[-1]
    parents = cells // vocab_size
    total = logprobs.flatten(1).gather(1, cells) + scores.gather(1, parents)
    return Candidates(parents, cells % vocab_size, total.where(is_possible, NEVER))


def _without_barred_rows(
    rules: SelectRules, logits: torch.Tensor, scores: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A row that may take no token at all, which only controls can bring about, ends here."""
    if not rules.is_controlled:
        return logits, scores
    is_barred = logits.amax(dim=-1) == NEVER
    return logits.masked_fill(is_barred[..., None], 0.0), scores.masked_fill(is_barred, NEVER)


def _masked(rules: SelectRules) -> tuple[int, ...]:
    return rules.stop_token_ids if rules.masks_stops else ()


def _stops(rules: SelectRules, candidates: Candidates[torch.Tensor], completes: Completes | None) -> torch.Tensor:
    """Which candidates [G, K] end in a stop token or complete a stop string."""
    tokens = candidates.tokens
    stops = (tokens[..., None] == tensor_of(rules.stop_token_ids, tokens.device)).any(dim=-1)
    if completes is None or rules.masks_stops:
        return stops
    on_host = Candidates(*(field.cpu().numpy() for field in candidates))
    return stops | torch.from_numpy(completes(on_host)).to(tokens.device)


def _go_on(candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    return candidates.scores.masked_fill(stops, NEVER) > NEVER


def _end(rules: SelectRules, candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    is_possible = candidates.scores > NEVER
    return is_possible if rules.is_last else is_possible & stops


def _reported(rules: SelectRules, step: Step[torch.Tensor], logprobs: torch.Tensor) -> Step[torch.Tensor]:
    """The same step with the log-probabilities that the rules ask for. `logprobs`: [G, r, V], unfiltered."""
    if rules.num_logprobs is None:
        return step
    best, tokens = logprobs.topk(min(rules.num_logprobs, logprobs.shape[-1]), dim=-1)
    return step._replace(
        top_logprobs=TopLogprobs(tokens, best),
        beam_logprobs=_token_logprobs(logprobs, step.parents, step.tokens),
        finished_logprobs=_token_logprobs(logprobs, step.finished.parents, step.finished.tokens),
    )


def _token_logprobs(logprobs: torch.Tensor, parents: torch.Tensor, tokens: torch.Tensor) -> TokenLogprobs[torch.Tensor]:
    num_groups, num_rows, vocab_size = logprobs.shape
    own = logprobs.flatten(1).gather(1, parents * vocab_size + tokens)
    groups = torch.arange(num_groups, device=own.device)[:, None]
    parts = zip(
        torch.split(parents, num_rows, 1), torch.split(own, num_rows, 1), strict=True
    )  # so much memory at a time
    ranks = [(logprobs[groups, rows] >= of_rows[..., None]).sum(dim=-1) for rows, of_rows in parts]
    return TokenLogprobs(own, torch.cat(ranks, dim=1))


# What follows goes with the V1 runner.


def hf_step(candidates: Candidates, stops: np.ndarray, width: int, is_last: bool) -> Step:
    """Split ranked candidates into the next b beams and those that finish, as transformers does.

    A candidate finishes if it stops and ranks among the best `width`; in the last step all of these
    do. The first `width` others live on. Source: transformers 5.19 `GenerationMixin._beam_search`.

    Args:
        candidates: [G, K] in total order, K >= `num_candidates`.
        stops: [G, K] bool, which of them end in a stop token or complete a stop string.
        width: Beams per group, b.
        is_last: The length is reached.
    """
    best = Candidates(*(field[:, :width] for field in candidates))
    is_finished = stops[:, :width] | is_last
    return settle(candidates, candidates.scores, stops, width, best, is_finished)


def tridecode_step(candidates: Candidates, stops: np.ndarray, width: int, is_last: bool) -> Step:
    """Split ranked candidates into the next b beams and those that finish, as the trie paper's code does.

    Whatever stops and ranks before the `width`-th that does not finishes. The first `width` others live
    on, and finish too in the last step. Source: Efficient Beam Search for LLMs Using Trie-Based
    Decoding, published code. Arguments as for `hf_step`.
    """
    others = (~stops).cumsum(axis=1)  # that do not stop, up to and with each candidate
    is_finished = np.where(stops, others < width, is_last & (others <= width))
    return settle(candidates, candidates.scores, stops, width, candidates, is_finished)


def vllm_step(
    candidates: Candidates,
    merits: np.ndarray,
    stops: np.ndarray,
    stopping: Candidates,
    is_stopping: np.ndarray,
    width: int,
    is_last: bool,
) -> Step:
    """Split candidates into the next b beams and those that finish, as `LLM.beam_search` does.

    Whatever stops among each beam's own best continuations finishes, however it ranks among all. The
    best `width` others live on, and finish too in the last step. Source: vLLM 0.32
    `BeamSearchOfflineMixin._beam_search_step`.

    Args:
        candidates: [G, K], any order on unequal merits.
        merits: [G, K] float32, what candidates are compared by to live on.
        stops: [G, K] bool, which of them end in a stop token or complete a stop string.
        stopping: [G, S], continuations that may stop, of any beam.
        is_stopping: [G, S] bool, which of them do.
        width: Beams per group, b.
        is_last: The length is reached.
    """
    step = settle(candidates, merits, stops, width, stopping, is_stopping)
    if not is_last:
        return step
    by_score = np.argsort(-step.scores, axis=1, kind="stable")
    live = _taken(Candidates(step.parents, step.tokens, step.scores), _groups(by_score), by_score)
    finished = Candidates(*(np.concatenate(pair, axis=1) for pair in zip(stopping, live, strict=True)))
    return step._replace(finished=finished, is_finished=np.concatenate([is_stopping, live.scores > -np.inf], axis=1))


def drawn_step(drawn: Candidates, stops: np.ndarray, width: int, is_last: bool) -> tuple[Step, np.ndarray]:
    """Let the beams that were drawn live on, or finish where they stop; in the last step all finish.

    Args:
        drawn: [1, K], continuations of living beams, K <= width.
        stops: [1, K] bool, which of them end in a stop token or complete a stop string.
        width: Beams of the group, b; those that were not drawn are dead.
        is_last: The length is reached.

    Returns:
        The step, and the slot of each drawn beam, [K]; -1 for those that stop.
    """
    count = drawn.tokens.shape[1]
    fill = ((0, 0), (0, width - count))
    parents = np.pad(drawn.parents, fill, constant_values=drawn.parents[0, 0] if count else 0)
    alive = np.pad(~stops, fill)
    living_first = np.argsort(~alive, axis=1, kind="stable")  # they keep the slots of their parents
    slots = np.empty_like(living_first)
    np.put_along_axis(slots, living_first, assign_slots(np.take_along_axis(parents, living_first, axis=1)), axis=1)
    tokens, scores = np.pad(drawn.tokens, fill), np.pad(drawn.scores, fill, constant_values=np.float32(-np.inf))
    in_slots = np.argsort(slots, axis=1)
    scores = np.where(alive, scores, np.float32(-np.inf))
    of_slots = _taken(Candidates(parents, tokens, scores), _groups(in_slots), in_slots)
    step = Step(of_slots.parents, of_slots.tokens, of_slots.scores, drawn, stops | is_last)
    return step, np.where(stops, -1, slots[:, :count])[0]


def settle(
    candidates: Candidates,
    merits: np.ndarray,
    stops: np.ndarray,
    width: int,
    finished: Candidates,
    is_finished: np.ndarray,
) -> Step:
    """Let the best `width` candidates that do not stop live on, and give them their slots.

    Where there are fewer, the remaining slots are dead: their score is -inf, and whatever is alive
    displaces them in the next step.
    """
    groups = _groups(candidates.tokens)
    by_merit = np.argsort(np.where(stops, np.inf, -merits), axis=1, kind="stable")[:, :width]
    alive = ~stops[groups, by_merit]
    slots = assign_slots(candidates.parents[groups, by_merit])
    in_slots = np.empty_like(by_merit)
    in_slots[groups, slots] = by_merit
    alive_in_slots = np.empty_like(alive)
    alive_in_slots[groups, slots] = alive
    parents, tokens, scores = _taken(candidates, groups, in_slots)
    return Step(parents, tokens, np.where(alive_in_slots, scores, np.float32(-np.inf)), finished, is_finished)


def assign_slots(parents: np.ndarray) -> np.ndarray:
    """Give each surviving child a row such that copying never overwrites what is still needed.

    The first child of a parent stays in its parent's slot; every other child takes a dead slot, one
    whose own beam has no child, in ascending order. Sources (survivors) and destinations (dead
    slots) are therefore disjoint.

    Args:
        parents: [G, b] parent slot of each child, in rank order.

    Returns:
        [G, b] slot of each child; each row is a permutation of 0..b-1.
    """
    num_groups, width = parents.shape
    groups = np.arange(num_groups)[:, None]
    order = np.argsort(parents, axis=1, kind="stable")
    by_parent = parents[groups, order]
    is_first = np.ones((num_groups, width), dtype=bool)
    is_first[:, 1:] = by_parent[:, 1:] != by_parent[:, :-1]
    first = np.empty_like(is_first)
    first[groups, order] = is_first

    survives = np.zeros((num_groups, width), dtype=bool)
    survives[groups, parents] = True
    dead_slots = np.argsort(survives, axis=1, kind="stable")
    nth_other = np.maximum(np.cumsum(~first, axis=1) - 1, 0)
    return np.where(first, parents, dead_slots[groups, nth_other])


def _groups(of: np.ndarray) -> np.ndarray:
    return np.arange(len(of))[:, None]


def _taken(candidates: Candidates, groups: np.ndarray, index: np.ndarray) -> Candidates:
    return Candidates(*(field[groups, index] for field in candidates))


def sampled_step(tokens: np.ndarray, scores: np.ndarray, stops: np.ndarray, num_rows: int, is_last: bool) -> Step:
    """Let every beam live on by the token drawn for it, or finish with it.

    The slot of a beam that stops is dead; the search displaces it once nothing is drawn any more.

    Args:
        tokens: [G, b], what was drawn for each beam.
        scores: [G, b] float32, cumulative log-probability with it.
        stops: [G, b] bool, which of them end in a stop token or complete a stop string.
        num_rows: 1 in the first step, from which all beams descend; then b.
        is_last: The length is reached.
    """
    parents = np.broadcast_to(np.arange(tokens.shape[1]) % num_rows, tokens.shape)
    return Step(
        parents,
        tokens,
        np.where(stops, np.float32(-np.inf), scores),
        Candidates(parents, tokens, scores),
        stops | bool(is_last),
    )


class Tops(NamedTuple):
    """The best k continuations of each row by themselves, best first. Shapes [r, k]."""

    tokens: np.ndarray
    logprobs: np.ndarray  # float32
