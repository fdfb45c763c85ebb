"""A contrast is told apart whose prefix others compute in the very step that it begins in, and no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.steps import rules_of
from vllm_trie.engine.kv_cache import BeamKVCacheManager
from vllm_trie.engine.new_prefixes import mark_new_group_prefixes
from vllm_trie.messages import GroupStep
from vllm_trie.search.constraints.contrast import ContrastConstraint
from vllm_trie.search.rules import SearchPhase

BLOCK_SIZE = 16
PLAIN, CONTRAST = rules_of(2), rules_of(2, constraints=(ContrastConstraint(0.1, 0.5),))


class Row(SimpleNamespace):
    """A request of a step: its blocks, the tokens that were computed before, and those that are computed in it."""

    def __init__(self, blocks: list[int], before: int, scheduled: int, rules: Any = None, is_new: bool = True) -> None:
        super().__init__(blocks=blocks, before=before, scheduled=scheduled, rules=rules, is_new=is_new)


def marked(**rows: Row) -> set[str]:
    """The groups of a step that are marked."""
    manager = object.__new__(BeamKVCacheManager)
    blocks = {name: [SimpleNamespace(block_id=block_id) for block_id in row.blocks] for name, row in rows.items()}
    of_tokens = SimpleNamespace(block_size=BLOCK_SIZE, req_to_blocks=blocks)
    manager._managers = (of_tokens,)
    steps = {name: GroupStep(SearchPhase(), selects=True) for name, row in rows.items() if row.rules}
    new = [SimpleNamespace(req_id=name, num_computed_tokens=row.before) for name, row in rows.items() if row.is_new]
    scheduled = {name: row.scheduled for name, row in rows.items()}
    output = SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens=scheduled)
    requests = {name: SimpleNamespace(num_computed_tokens=row.before + row.scheduled) for name, row in rows.items()}
    groups = {name: SimpleNamespace(plan=SimpleNamespace(search=rows[name].rules)) for name in steps}
    mark_new_group_prefixes(steps, groups, output, requests, manager)
    return {name for name, step in steps.items() if step.has_new_prefix}


@pytest.mark.parametrize(
    "other",
    [Row([1, 2, 3], 0, 40), Row([1, 2, 3], 0, 40, PLAIN), Row([1, 2], 20, 12, is_new=False)],
    ids=["a prompt", "a group's prompt", "the rest of a prompt"],
)
def test_blocks_that_others_fill_in_the_step_mark_it(other: Row) -> None:
    assert marked(other=other, group=Row([1, 2, 7], 32, 5, CONTRAST)) == {"group"}


@pytest.mark.parametrize(
    "other",
    [
        Row([1, 2, 3], 32, 8, is_new=False),
        Row([1, 2, 3], 0, 40, CONTRAST),
        Row([4, 5, 6], 0, 40),
        Row([], 40, 1, PLAIN, is_new=False),
    ],
    ids=["filled before", "a contrast's own", "of another prompt", "of a group that has fanned out"],
)
def test_other_blocks_mark_nothing(other: Row) -> None:
    assert marked(other=other, group=Row([1, 2, 7], 32, 5, CONTRAST)) == set()


def test_groups_that_do_not_contrast_or_went_on_are_not_marked() -> None:
    first = Row([1, 2, 3], 0, 40)
    assert marked(first=first, group=Row([1, 2, 7], 32, 5, PLAIN)) == set()
    assert marked(first=first, group=Row([1, 2, 7], 32, 5, CONTRAST, is_new=False)) == set()
