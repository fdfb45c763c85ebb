"""Forests as on a GPU, where a host that looks at what the device has would wait."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest

from vllm_trie.speculation.worker import draft_by_model, forest_walk, searched_forest
from vllm_trie.speculation.worker.device_forests import DeviceForests
from vllm_trie.speculation.worker.forest_growth import NO_NODE, ForestGrowthPlan, GrowthPart


def pretend_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host see nothing of what the device has of forests."""
    for module in (draft_by_model, forest_walk, searched_forest):
        monkeypatch.setattr(module, "is_searched_on_host", lambda _: False)


def grow_unseen_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forests grow as on a GPU in every other step."""
    turns = cycle([False, True])
    monkeypatch.setattr(draft_by_model, "is_searched_on_host", lambda _: next(turns))


def paths_before(unseen: DeviceForests, number: int) -> Iterator[tuple[ForestGrowthPlan, list[int] | None]]:
    """The beam and the drafts that lead to each node after which layer `number` grows; None for what is no node."""
    for plan in unseen._active(number):
        for at in range(plan.parts[number - 1].size):
            yield plan, _path(unseen, plan.parts[:number], at)


def _path(unseen: DeviceForests, parts: list[GrowthPart], at: int) -> list[int] | None:
    path = list[int]()
    for part in reversed(parts[1:]):
        path.insert(0, int(unseen._growing.tokens[part.first + at]))
        at = int(unseen._growing.parents[part.first + at])
        if at == NO_NODE:
            return None
    return [at, *path]
