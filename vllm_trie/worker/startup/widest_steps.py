"""Takes the search steps that need most memory, so that vLLM's profiling leaves room for them next to the KV cache."""

from __future__ import annotations

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_trie.search.beams import STATELESS, SearchBeams, States
from vllm_trie.search.constraints.catalog import ConstraintTrie, ItemConstraint
from vllm_trie.search.constraints.constraint import Constraint
from vllm_trie.search.constraints.grammar import GrammarConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.constraints.stops import StopConstraints
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.parts import search_rows_at_a_time
from vllm_trie.search.rules import SearchInputs, SearchRules, SearchStrategy
from vllm_trie.search.step import take_packed_search_step
from vllm_trie.search.strategies.best import BestStrategy
from vllm_trie.search.strategies.in_groups import DiverseGroupsStrategy
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy
from vllm_trie.search.strategies.sampled import RowSamplingStrategy
from vllm_trie.search.strategies.stochastic import StochasticStrategy
from vllm_trie.supported_engines import most_plugin_beams

logger = init_logger("vllm.trie_beam.widest_steps")

ROWS = 64  # of several searches that may share a step that needs much memory
LIGHT_BYTES = 14  # for each row and token of the vocabulary, in other steps
HEAVY_BYTES = 63  # in steps that need much memory, if their rows are one part
HEAVY_BYTES_IN_PARTS, BYTES_OF_PART = 28, 60  # otherwise: of all their rows, and additionally of those of a part
STRATEGIES: tuple[SearchStrategy, ...] = (
    *(BestStrategy(), DiverseGroupsStrategy(1, 0.5, None), RowSamplingStrategy(), StochasticStrategy()),
    *(JointSamplingStrategy(replacement, 1, None, False) for replacement in (False, True)),
)
FILTERS, PRUNING, STOPS = SearchFilters(0.5, 0.1, 0, 0.9), SearchPruning(0.1, 1.0, 0.1, 2), StopConstraints((0,))
# Any token, until one after which a catalog applies.
AFTER = ItemConstraint("", 2, after=0, ends_with_stop=True, excludes=True)
PHRASES = PhraseBoostConstraint.of([([0], 1.0)])


def most_rows_measured_together(vocab_size: int) -> int:
    """How many rows of several searches may share a step that needs much memory: at most a part."""
    return min(ROWS, search_rows_at_a_time(vocab_size))


def most_heavy_rows_measured(vllm_config: VllmConfig) -> int:
    """How many rows a step that needs much memory may have: those of the widest search, or of several."""
    return max(most_plugin_beams(vllm_config), most_rows_measured_together(vllm_config.model_config.get_vocab_size()))


def take_widest_startup_steps(logits: torch.Tensor, num_heavy: int, num_logprobs: int) -> None:
    """Takes a step of each kind, with as many beams as there may be, and with everything that a search may ask for.

    Args:
        logits: [R, V], of all rows.
        num_heavy: See `most_heavy_rows_measured`.
        num_logprobs: The most that each row may have to report.
    """
    _take_startup_step(
        SearchRules(len(logits), BestStrategy(), STOPS, num_logprobs, True), logits, _startup_states_by_grammar(logits)
    )
    of_part = search_rows_at_a_time(logits.shape[1])
    heavy = SearchRules(1, BestStrategy(), STOPS, num_logprobs, True, FILTERS, PRUNING)
    for num_rows in sorted({num_heavy, min(num_heavy, of_part)}):
        some = logits[:num_rows]
        for strategy in STRATEGIES:
            _take_startup_step(heavy._replace(width=len(some), strategy=strategy), some)
        of_items = heavy._replace(width=len(some), constraints=(AFTER, PHRASES))
        _take_startup_step(of_items, some, _startup_states_before_items(1, len(some), logits.device))
    several = logits[: most_rows_measured_together(logits.shape[1])]
    in_groups = heavy._replace(strategy=DiverseGroupsStrategy(1, 0.5, None), constraints=(AFTER,))
    _take_startup_step(in_groups, several, _startup_states_before_items(len(several), 1, logits.device))
    text = "left up to %.1f GB for searches, where %d beams together may sample or filter; max_beam_width bounds both"
    logger.info(text, most_bytes_at_startup(len(logits), logits.shape[1], len(some)) / 1e9, len(some))


def most_bytes_at_startup(num_rows: int, vocab_size: int, num_heavy: int) -> int:
    """The most memory that steps take, in bytes.

    Args:
        num_rows: Of all searches.
        vocab_size: Tokens of the vocabulary.
        num_heavy: See `most_heavy_rows_measured`.
    """
    of_part = search_rows_at_a_time(vocab_size)
    heavy = HEAVY_BYTES * num_heavy
    if num_heavy > of_part:
        heavy = HEAVY_BYTES_IN_PARTS * num_heavy + BYTES_OF_PART * of_part
    return max(LIGHT_BYTES * num_rows, heavy) * vocab_size


def _take_startup_step(rules: SearchRules, logits: torch.Tensor, under: States = STATELESS) -> None:
    """Takes a step of as many groups as there are rows for, with logits of the type of processed ones."""
    by_group = logits.float().view(-1, rules.width, logits.shape[1])
    beams = SearchBeams(torch.zeros(by_group.shape[:2], device=logits.device), states=under)
    take_packed_search_step(rules, by_group, beams, SearchInputs([(0, 0)] * len(by_group)))


def _startup_states_by_grammar(logits: torch.Tensor) -> States:
    """States of one group whose grammar allows all tokens."""
    return {GrammarConstraint(): torch.ones(1, *logits.shape, dtype=torch.bool, device=logits.device)}


def _startup_states_before_items(num_groups: int, width: int, device: torch.device) -> States:
    """States of groups that may take any token, before a catalog of two nodes without children, and with a phrase."""
    first_child = torch.zeros(3, dtype=torch.int32, device=device)
    trie = ConstraintTrie(first_child, first_child[:-1], first_child[:-1].bool(), [1])
    along = AFTER.on({AFTER.catalog: trie}, STOPS.token_ids)
    keys: tuple[Constraint, ...] = (along, PHRASES) if num_groups == 1 else (along,)
    return {key: key.begin(num_groups * width, device).view(num_groups, width) for key in keys}
