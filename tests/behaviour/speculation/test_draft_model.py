"""What the draft model says in the engine is what it says alone: its KV follows forks, plain steps and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.draft_alone import Alone, search
from tests.support.engine import Engine, Engines
from tests.support.pairs import NOISE, Pair, count_differing, speculating
from tests.support.reference import load
from tests.support.unseen import grow_unseen_in_turn
from vllm_trie.speculation.search.forest import Forest
from vllm_trie.speculation.worker.draft_by_model import ModelDrafter
from vllm_trie.worker.rows.rows import GroupRows
from vllm_trie.worker.step_context import RunnerStepContext

pytestmark = pytest.mark.slow


@pytest.fixture
def pair(random_pair: Callable[[str, float], Pair]) -> Pair:
    return random_pair("gqa", NOISE)


@pytest.fixture
def engine(engines: Engines, pair: Pair) -> Engine:
    return speculating(engines, pair, 3, max_num_batched_tokens=64)


@pytest.fixture
def alone(engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Alone:
    return Alone(engine, load(pair[1]), monkeypatch)


def test_the_draft_model_says_what_it_says_alone(engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    grow_unseen_in_turn(monkeypatch)
    assert count_differing(*search(engine, monkeypatch)) == 0
    assert alone.num_wrong == 0
    assert min(alone.num_unseen, alone.num_compared - alone.num_unseen) > 500
    assert alone.num_caught_up > 0, "no rows had more to catch up with than one forward takes"


def test_without_catching_up_it_says_something_else_and_the_search_finds_the_same(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ModelDrafter.forests

    def drafted_from_the_newest(drafts: ModelDrafter, context: RunnerStepContext, groups: dict[str, GroupRows]) -> Any:
        for group in (groups[group_id] for group_id in context.speculating):
            group.num_drafted = int(engine.runner.req_states.num_computed_tokens_np[group.slots[0]])
        return draft(drafts, context, groups)

    monkeypatch.setattr(ModelDrafter, "forests", drafted_from_the_newest)
    assert count_differing(*search(engine, monkeypatch)) == 0
    assert alone.num_wrong > alone.num_compared // 10


@pytest.mark.nightly
def test_where_nodes_see_the_trees_of_their_siblings_it_says_something_else(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = Forest.attention_mask
    monkeypatch.setattr(Forest, "attention_mask", lambda *args: np.tril(np.ones_like(mask(*args))))
    search(engine, monkeypatch)
    assert alone.num_wrong > 0


@pytest.mark.nightly
def test_where_accepted_tokens_are_left_where_they_are_it_says_something_else(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner.rows.kv, "write_tokens", lambda *_: None)
    search(engine, monkeypatch)
    assert alone.num_wrong > 0


@pytest.mark.nightly
def test_without_any_copies_of_tail_blocks_it_says_something_else(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner.rows.kv, "copy_blocks", lambda *_: None)
    search(engine, monkeypatch)
    assert alone.num_wrong > 0
