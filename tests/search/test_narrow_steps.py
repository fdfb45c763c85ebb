"""A step from the logits of a catalog's level is the step from all logits, by all rules that allow it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.items import along_of
from tests.support.steps import rules_of, shortcuts
from vllm_trie.catalog import Catalog
from vllm_trie.search.beams import SearchBeams
from vllm_trie.search.constraints.catalog import LEVEL_UNIT, ItemConstraint
from vllm_trie.search.constraints.phrase_boosts import PhraseBoostConstraint
from vllm_trie.search.devices import NEVER
from vllm_trie.search.filters import SearchFilters, SearchPruning
from vllm_trie.search.rules import SearchInputs, SearchRules
from vllm_trie.search.step import is_narrow_search_step, take_search_step
from vllm_trie.search.strategies.joint_sampling import JointSamplingStrategy

VOCAB_SIZE = 200
ITEMS = ItemConstraint("items", renormalizes=True)

all_items = st.lists(
    st.lists(st.integers(3, VOCAB_SIZE - 1), min_size=1, max_size=4).map(tuple), min_size=2, max_size=40, unique=True
)
all_filters = st.sampled_from([SearchFilters(), SearchFilters(0.7, 0.1), SearchFilters(top_k=3, top_p=0.9)])
all_pruning = st.sampled_from([SearchPruning(), SearchPruning(absolute=1.0, per_parent=2)])


@given(all_items)
def test_levels_are_the_tokens_that_items_have_at_each_depth(items: list[tuple[int, ...]]) -> None:
    levels = Catalog.from_sequences(items).tokens_by_depth()
    longest = max(map(len, items))
    assert [level.tolist() for level in levels] == [
        sorted({item[depth] for item in items if len(item) > depth}) for depth in range(longest)
    ]
    trie = along_of(items, ITEMS).trie
    assert trie.most_in_level == max(map(len, levels))
    for depth, level in enumerate(levels):
        tokens = trie.level(depth).tolist()
        assert (len(tokens) % LEVEL_UNIT, tokens) == (0, [*level, *[level[-1]] * (len(tokens) - len(level))])
    assert len(trie.level(longest + 1)) % LEVEL_UNIT == 0, "a step that is taken when the search is over"


@settings(max_examples=60)
@given(all_items, st.integers(1, 6), st.sampled_from(["hf", "vllm", "tridecode"]), all_filters, all_pruning, st.data())
def test_a_step_from_a_level_is_that_from_all_tokens(
    items: list[tuple[int, ...]],
    width: int,
    semantics: str,
    filters: SearchFilters,
    pruning: SearchPruning,
    data: st.DataObject,
) -> None:
    along, random = along_of(items, ITEMS, (1,)), np.random.default_rng(data.draw(st.integers(0, 99)))
    rules = rules_of(width, semantics, (1,), constraints=(ITEMS,), filters=filters, pruning=pruning)
    assert is_narrow_search_step(rules)
    beams = SearchBeams(torch.zeros(2, 1), states={along: torch.zeros(2, 1, dtype=torch.int64)})
    for length in range(max(map(len, items)) + 1):
        beams, level = beams._replace(length=length), along.trie.level(length)
        logits = torch.from_numpy(random.normal(0, 3, (*beams.scores.shape, VOCAB_SIZE)).astype(np.float32))
        with shortcuts(data.draw(st.booleans())):
            expected = take_search_step(rules, logits, beams)
            found = take_search_step(rules, logits[..., level], beams, SearchInputs(level=level))
        lives = expected.scores > NEVER
        assert torch.equal(found.parents[lives], expected.parents[lives])
        assert torch.equal(found.tokens[lives], expected.tokens[lives])
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-5)
        ended = expected.finished.scores > NEVER
        assert torch.equal(found.finished.scores > NEVER, ended)
        assert torch.equal(found.finished.tokens[ended], expected.finished.tokens[ended])
        torch.testing.assert_close(found.finished.scores, expected.finished.scores, rtol=1e-5, atol=1e-5)
        beams = SearchBeams(expected.scores, states={along: expected.states[along]})


@pytest.mark.parametrize(
    "others",
    [
        {"constraints": ()},
        {"constraints": (ItemConstraint("items"),)},
        {"constraints": (ItemConstraint("items", 2, renormalizes=True),)},
        {"constraints": (ItemConstraint("items", after=7, renormalizes=True),)},
        {"constraints": (ItemConstraint("items", ends_with_stop=True, renormalizes=True),)},
        {"constraints": (ITEMS, PhraseBoostConstraint.of([([5], 1.0)]))},
        {"strategy": JointSamplingStrategy(False, 1, None, False)},
        {"is_controlled": True},
        {"num_logprobs": 0},
        {"stops": (1,), "are_barred": True},
    ],
    ids=str,
)
def test_what_looks_at_other_tokens_needs_all_logits(others: dict[str, Any]) -> None:
    rules: SearchRules = rules_of(3, **({"constraints": (ITEMS,)} | others))
    assert not is_narrow_search_step(rules)
