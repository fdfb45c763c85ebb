"""One step of a search: from logits to the next beams, and to the hypotheses that finish.

Everything here works on G groups with equal rules at once, in the order of the device's stream. Shapes depend on
nothing that only the device knows, so the host never waits, except to judge stop strings.
"""

from __future__ import annotations

import torch

from vllm_trie.search import on_demand
from vllm_trie.search.beams import Beams
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.devices import NEVER, numbers, sees
from vllm_trie.search.filters import LogitsFilters, Pruning, log_probabilities
from vllm_trie.search.parts import in_parts
from vllm_trie.search.rank import topk
from vllm_trie.search.rules import Choice, Means, SelectRules
from vllm_trie.search.step_result import Step, TokenLogprobs, TopLogprobs
from vllm_trie.search.strategies.best import Best

PLAIN = Means()


def take_step(rules: SelectRules, logits: torch.Tensor, beams: Beams, means: Means = PLAIN) -> Step[torch.Tensor]:
    """Take one step of G groups.

    Args:
        rules: Theirs.
        logits: [G, r, V] of any floating point type, processed ones if `rules.is_controlled`.
        beams: What their rows carry.
        means: What else it takes.
    """
    logprobs, beams = _row_logprobs(rules, logits, beams)
    if (boosts := beams.boosts(logprobs, rules.is_last)) is None:
        return reported(rules, rules.strategy.choose(rules, logprobs, beams, means))
    choose_boosted = on_demand("strategies.boosted:choose_boosted")
    return reported(rules, choose_boosted(rules, logprobs, beams, means, boosts))


def is_light(rules: SelectRules) -> bool:
    """Whether a step needs little memory beside its logits: nothing is drawn, sorted, masked, or added to scores."""
    strategy, has_no_filters = rules.strategy, (rules.filters, rules.pruning) == (LogitsFilters(), Pruning())
    if rules.items is not None and not (rules.items.is_plain and rules.num_logprobs is None):
        return False  # a catalog's root, and what is not plain, may have as many children as there are tokens
    boosts = any(type(key).boosts is not Constraint.boosts for key in rules.constraints)
    return isinstance(strategy, Best) and strategy.semantics != "vllm" and has_no_filters and not boosts


def joint_distribution(rules: SelectRules, logits: torch.Tensor, beams: Beams) -> tuple[torch.Tensor, torch.Tensor]:
    """What beam sampling draws the next beams of a group from.

    Args:
        rules, logits, beams: As for `take_step`.

    Returns:
        Probabilities [G, r, V] float64, over all continuations of a group together, and log-probabilities [G, r, V]
        float32 of each row by itself, at temperature 1.
    """
    logprobs, beams = _row_logprobs(rules, logits, beams)
    joint_probabilities = on_demand("sampling:joint_probabilities")
    return joint_probabilities(beams.scores, beams.narrow(logprobs), rules.filters), logprobs


def draft_logprobs(rules: SelectRules, logits: torch.Tensor, beams: Beams) -> torch.Tensor:
    """What drafts compete by: log-probabilities [G, r, V] of a draft model, and boosts.

    It is -inf for whatever does not go on after the next step.
    """
    logprobs = log_probabilities(logits, rules.stops.last_token_ids, rules.filters.temperature)
    logprobs = beams.narrow(beams.restrict(logprobs))
    boosts = beams.boosts(logprobs, is_end=False)
    return logprobs if boosts is None else logprobs + boosts


def _row_logprobs(rules: SelectRules, logits: torch.Tensor, beams: Beams) -> tuple[torch.Tensor, Beams]:
    """Log-probabilities [G, r, V], and the rows with their scores.

    A row that may take no token at all, which only controls and grammars can bring about, ends here.
    """
    masked = beams.mask(logits)
    if rules.is_controlled or masked is not logits:
        is_barred = masked.amax(dim=-1) == NEVER
        if not sees(logits.device) or is_barred.any():
            masked = masked.clone() if masked is logits else masked
            masked.masked_fill_(is_barred[..., None], 0.0)
            beams = beams._replace(scores=beams.scores.masked_fill(is_barred, NEVER))
    temperature = rules.filters.temperature if rules.strategy.scales_logits else 1.0
    logprobs = log_probabilities(masked, rules.stops.barred_token_ids, temperature)
    del masked  # which may be as large
    return beams.restrict(logprobs), beams


def reported(rules: SelectRules, choice: Choice) -> Step[torch.Tensor]:
    """The step that was chosen, with the log-probabilities that the rules ask for."""
    step, logprobs = choice
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
    num_rows, vocab_size = logprobs.shape[1:]
    own = logprobs.flatten(1).gather(1, parents * vocab_size + tokens)
    # As many at a time as there are rows, to save memory.
    some_of_each = zip(torch.split(parents, num_rows, 1), torch.split(own, num_rows, 1), strict=True)
    return TokenLogprobs(own, torch.cat([_ranks(logprobs, *some) for some in some_of_each], dim=1))


def _ranks(logprobs: torch.Tensor, parents: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[G, k] how many tokens of their rows `parents` [G, k] are as probable as these, or more."""
    groups = numbers(len(parents), own.device)[:, None]

    def of_some(parents: torch.Tensor, own: torch.Tensor) -> tuple[torch.Tensor]:
        return ((logprobs[groups, parents] >= own[..., None]).sum(dim=-1),)

    (ranks,) = in_parts((*parents.shape, logprobs.shape[-1]), of_some, parents, own)
    return ranks
