"""One step of beam search: from logits to the next beams, and to the hypotheses that finish.

Everything here works on G groups with equal rules at once, in the order of the device's stream. Shapes depend on
nothing that only the device knows, so the host never waits, except to judge stop strings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from vllm_trie.search.beam_groups import step_in_groups
from vllm_trie.search.beams import Beams, States
from vllm_trie.search.constraints.catalog import AlongItems, Outcomes, log_probabilities_of
from vllm_trie.search.devices import NEVER, constant, numbers, sees
from vllm_trie.search.filters import filtered, log_probabilities, pruned
from vllm_trie.search.gumbel import stochastic_step
from vllm_trie.search.rank import Candidates, rank_candidates, topk
from vllm_trie.search.rules import SelectRules, num_candidates
from vllm_trie.search.sampling import draw, draw_continuations, joint_probabilities
from vllm_trie.search.slots import choose, in_slots, select_next
from vllm_trie.search.step_result import Completes, PerturbedScores, Step, TokenLogprobs, TopLogprobs

Random = torch.Tensor | Sequence[np.random.Generator]


def take_step(
    rules: SelectRules,
    logits: torch.Tensor,
    beams: Beams,
    random: Random | None = None,
    completes: Completes | None = None,
    select_next: Callable[..., Candidates[torch.Tensor]] = select_next,
) -> Step[torch.Tensor]:
    """Take one step of G groups.

    Args:
        rules: Theirs.
        logits: [G, r, V] of any floating point type, processed ones if `rules.is_controlled`.
        beams: What their rows carry.
        random: Where each beam samples, [G, b] float64 in [0, 1); where beams are drawn together, by group what draws.
        completes: Tells of candidates on the host which complete a stop string, where there are stop strings.
        select_next: `slots.select_next`, or what does the same on this device.
    """
    if rules.beam_sampling is not None:
        assert isinstance(random, Sequence), "beams are drawn without a generator for each group"
        if rules.beam_sampling.stochastic:
            logprobs, beams = _of_rows(rules, logits, beams, rules.filters.temperature)
            return _stochastic(rules, logprobs, beams, random, completes, select_next)
        p, logprobs = joint_distribution(rules, logits, beams)
        cells, is_possible = draw_continuations(p.flatten(1), rules.width, rules.beam_sampling.replacement, random)
        drawn = _drawn(logprobs, beams.scores, cells, is_possible)
        stops = _stops(rules, drawn, completes)
        going_on = select_next(drawn, _alive(drawn, stops), rules.width, beams.scores.shape[1])
        step = Step(*going_on, _ended(rules, drawn, stops))
        return _reported(rules, best_of(step) if rules.beam_sampling.keeps_one else step, logprobs)
    logprobs, beams = _of_rows(rules, logits, beams, rules.filters.temperature)
    if rules.items is not None:
        step = _best_of_items(rules, logprobs, beams, select_next)
    elif rules.samples:
        assert isinstance(random, torch.Tensor), "each beam samples without a random number"
        step = _sampled(rules, beams.narrow(logprobs), beams.scores, random, completes)
    elif rules.beam_groups is not None:
        best = partial(_best, select_next=select_next)
        step, logprobs = step_in_groups(rules, logprobs, beams.scores, completes, best)
    else:
        step = _best(rules, beams.narrow(logprobs), beams.scores, completes, select_next)
    return _reported(rules, step, logprobs)


def joint_distribution(rules: SelectRules, logits: torch.Tensor, beams: Beams) -> tuple[torch.Tensor, torch.Tensor]:
    """What beam sampling draws the next beams of a group from.

    Args:
        rules, logits, beams: As for `take_step`.

    Returns:
        Probabilities [G, r, V] float64, over all continuations of a group together, and log-probabilities [G, r, V]
        float32 of each row by itself, at temperature 1.
    """
    logprobs, beams = _of_rows(rules, logits, beams)
    return joint_probabilities(beams.scores, beams.narrow(logprobs), rules.filters), logprobs


def draft_logprobs(rules: SelectRules, logits: torch.Tensor, beams: Beams) -> torch.Tensor:
    """Log-probabilities [G, r, V] of a draft model, with -inf for whatever does not go on after the next step."""
    logprobs = log_probabilities(logits, rules.stop_token_ids, rules.filters.temperature)
    return beams.narrow(beams.restrict(logprobs))


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


def _best(
    rules: SelectRules,
    logprobs: torch.Tensor,
    scores: torch.Tensor,
    completes: Completes | None,
    select_next: Callable[..., Candidates[torch.Tensor]],
    penalties: torch.Tensor | None = None,
) -> Step[torch.Tensor]:
    """The best continuations, less penalties [G, V], become beams, or finish by the rules of `semantics`."""
    _, num_rows, vocab_size = logprobs.shape
    width = rules.num_beams or rules.width
    count = num_candidates(width, len(rules.stop_token_ids), rules.width)
    while True:
        allowed = filtered(logprobs, rules.filters, count if penalties is None else None)
        allowed = pruned(allowed if penalties is None else allowed - penalties[:, None], scores, rules.pruning)
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
    return Step(*select_next(candidates, _going_on(rules, candidates, stops), rules.width, num_rows), finished)


def _best_of_items(
    rules: SelectRules,
    logprobs: torch.Tensor,
    beams: Beams,
    select_next: Callable[..., Candidates[torch.Tensor]],
) -> Step[torch.Tensor]:
    """The best ways along a catalog become beams, and those among the best b that complete their items finish.

    A way may do both, where an item is the beginning of another: so what finishes and what goes on are ranked
    apart. Rows have a few children each, which are ranked like a vocabulary of that size.
    """
    (num_rows, vocab_size), width, scores = logprobs.shape[1:], rules.num_beams or rules.width, beams.scores
    items = next(constraint for constraint in beams.states if isinstance(constraint, AlongItems))
    ways = items.ways(beams.states[items], vocab_size, beams.length)
    of_ways = log_probabilities_of(beams.narrow(logprobs, items), ways, items.rules.renormalizes)
    allowed = pruned(filtered(of_ways, rules.filters, width), scores, rules.pruning)

    def outcomes(candidates: Candidates[torch.Tensor]) -> Outcomes:
        return items.outcomes(ways.targets.flatten(1).gather(1, candidates.tokens))

    tokens = ways.tokens.flatten(1)
    over = live = _best_ways(allowed, scores, width)
    of_over = of_live = outcomes(over)
    if not (sees(scores.device) and bool((of_over.goes_on | (over.scores == NEVER)).all())):
        leads_on = items.outcomes(ways.targets).goes_on
        live = _best_ways(allowed.where(leads_on, NEVER), scores, width)
        of_live = outcomes(live)
    ends = (of_over.is_complete if rules.is_last else of_over.ends) & (not rules.masks_stops)
    finished = over._replace(tokens=tokens.gather(1, over.tokens), scores=over.scores.where(ends, NEVER))
    going_on = select_next(live, _going_on(rules, live, ~of_live.goes_on), rules.width, num_rows)
    states: States = {items: outcomes(going_on).states}
    return Step(going_on.parents, tokens.gather(1, going_on.tokens), going_on.scores, finished, states=states)


def _best_ways(allowed: torch.Tensor, scores: torch.Tensor, count: int) -> Candidates[torch.Tensor]:
    """The best `count` of ways [G, r, B]; in `tokens` stand their places among all of a group."""
    ranked = rank_candidates(allowed, scores, count)
    return ranked._replace(tokens=ranked.parents * allowed.shape[-1] + ranked.tokens)


def _own_stops(
    rules: SelectRules, allowed: torch.Tensor, scores: torch.Tensor, completes: Completes | None
) -> Candidates[torch.Tensor]:
    """What stops among each beam's own best 2b continuations finishes, however it ranks among all; else -inf.

    Source: vLLM 0.32 `BeamSearchOfflineMixin._beam_search_step`.
    """
    if completes is None:
        return _own_continuations(rules, allowed, scores, rules.stop_token_ids)
    best, tokens = topk(allowed, min(2 * rules.width, allowed.shape[-1]))
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
    """Each row's continuation by each of `token_ids`; -inf unless it is among the row's best 2b."""
    tokens = constant(token_ids, allowed.device)
    own = allowed.index_select(-1, tokens)
    num_better = (allowed[:, :, None] > own[..., None]).sum(dim=-1)
    return _by_row(tokens.expand_as(own), (own + scores[..., None]).where(num_better < 2 * rules.width, NEVER))


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


def _stochastic(
    rules: SelectRules,
    logprobs: torch.Tensor,
    beams: Beams,
    rngs: Sequence[np.random.Generator],
    completes: Completes | None,
    select_next: Callable[..., Candidates[torch.Tensor]],
) -> Step[torch.Tensor]:
    """The best continuations after noise become beams, or finish, drawn from what each row may take.

    Those that finish compete with all that is still running by their noise, and keep it. Source: Kool et al. 2019.
    """
    scores, vocab_size = beams.scores, logprobs.shape[-1]
    perturbed = torch.zeros_like(scores) if beams.perturbed is None else beams.perturbed
    allowed = filtered(beams.narrow(logprobs), rules.filters)
    total = allowed.logsumexp(dim=-1, keepdim=True)
    allowed = (allowed - total).where(total > NEVER, NEVER)
    of_groups = [
        stochastic_step(*of_rows[:3], rules.width, of_rows[3])
        for of_rows in zip(scores, perturbed, allowed, rngs, strict=True)
    ]
    cells, sums, noisy = (torch.stack(fields) for fields in zip(*of_groups, strict=True))
    noisy = noisy.float()
    drawn = Candidates(cells // vocab_size, cells % vocab_size, sums.float().where(noisy > NEVER, NEVER))
    stops = _stops(rules, drawn, completes)
    of_slots = _alive(drawn, stops), rules.width, scores.shape[1]
    with_noise = PerturbedScores(select_next(drawn._replace(scores=noisy), *of_slots).scores, noisy)
    step = Step(*select_next(drawn, *of_slots), _ended(rules, drawn, stops), perturbed=with_noise)
    return _reported(rules, step, allowed)


def _drawn(
    logprobs: torch.Tensor, scores: torch.Tensor, cells: torch.Tensor, is_possible: torch.Tensor
) -> Candidates[torch.Tensor]:
    """Continuations at `cells` [G, K], parent * V + token, in the order in which they were drawn."""
    vocab_size = logprobs.shape[-1]
    parents = cells // vocab_size
    total = logprobs.flatten(1).gather(1, cells) + scores.gather(1, parents)
    return Candidates(parents, cells % vocab_size, total.where(is_possible, NEVER))


def _of_rows(
    rules: SelectRules, logits: torch.Tensor, beams: Beams, temperature: float = 1.0
) -> tuple[torch.Tensor, Beams]:
    """Log-probabilities [G, r, V], and the rows with their scores.

    A row that may take no token at all, which only controls and grammars can bring about, ends here.
    """
    masked = beams.mask(logits)
    if rules.is_controlled or masked is not logits:
        is_barred = masked.amax(dim=-1) == NEVER
        if not sees(logits.device) or is_barred.any():
            masked = masked.masked_fill(is_barred[..., None], 0.0)
            beams = replace(beams, scores=beams.scores.masked_fill(is_barred, NEVER))
    logprobs = log_probabilities(masked, rules.stop_token_ids if rules.masks_stops else (), temperature)
    return beams.restrict(logprobs), beams


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


def _going_on(rules: SelectRules, candidates: Candidates[torch.Tensor], stops: torch.Tensor) -> torch.Tensor:
    """The candidates that may become beams."""
    lives = _alive(candidates, stops)
    return lives if rules.num_beams is None else lives & (lives.cumsum(dim=1) <= rules.num_beams)


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
