"""What the draft model says in the engine is what it says alone: its KV follows forks, plain steps and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, Engine, Engines
from tests.support.loop import one_thread
from tests.support.pairs import NOISE, Pair, count_differing, searches, speculating
from tests.support.reference import load
from tests.support.running import prompt_of, run
from vllm_trie.engine.group import BeamGroup
from vllm_trie.worker.draft import Drafter
from vllm_trie.worker.draft_by_model import ModelDrafts
from vllm_trie.worker.draft_model import DraftModel
from vllm_trie.worker.forest_step import ForestStep
from vllm_trie.worker.rows import GroupRows

pytestmark = pytest.mark.slow

TOLERANCE = 1e-3


class Alone:
    """Compares every row of logits that is drafted from with the draft model run alone on the row's whole text."""

    def __init__(self, engine: Engine, draft_alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.model = engine, draft_alone
        self.num_compared = self.num_wrong = self.num_caught_up = 0
        self._texts: list[list[int]] = []  # of the rows of the next forward; none while rows catch up
        draft_layer, logits = ModelDrafts._draft_layer, DraftModel.logits

        def layer_after(drafts: ModelDrafts, forests: dict[str, ForestStep], number: int) -> None:
            active = [one for one in forests.values() if one.budget.num_layers >= number and one.layer.nodes]
            self._texts = [self._text(one, node) for one in active for node in one.layer.nodes]
            draft_layer(drafts, forests, number)
            assert not self._texts

        def compared(model: DraftModel, tokens: Any, starts: Any, blocks: Any) -> torch.Tensor:
            found = logits(model, tokens, starts, blocks)
            texts, self._texts = self._texts, []
            self.num_caught_up += not texts
            for position, text in enumerate(texts):
                assert text[starts[position] :] == tokens[position]
                self._compare(text, found[position])
            return found

        monkeypatch.setattr(ModelDrafts, "_draft_layer", layer_after)
        monkeypatch.setattr(DraftModel, "logits", compared)

    def _text(self, one: ForestStep, node: int) -> list[int]:
        root, *path = one.forest.path(node)
        tokens = self.engine.runner.req_states.all_token_ids.gpu
        history = tokens[one.group.slots[root], : one.start + 1].tolist()
        assert history[-1] == one.forest.tokens[root]
        return history + [one.forest.tokens[node] for node in path]

    @one_thread()
    @torch.inference_mode()
    def _compare(self, text: list[int], row: torch.Tensor) -> None:
        alone = self.model(torch.tensor([text])).logits[0, -1]
        self.num_compared += 1
        self.num_wrong += bool((alone - row).abs().max() > TOLERANCE)


@pytest.fixture
def pair(random_pair: Callable[[str, float], Pair]) -> Pair:
    return random_pair("gqa", NOISE)


@pytest.fixture
def engine(engines: Engines, pair: Pair) -> Engine:
    return speculating(engines, pair, 3, max_num_batched_tokens=64)


@pytest.fixture
def alone(engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Alone:
    return Alone(engine, load(pair[1]), monkeypatch)


WIDTHS = (1, 4, 6)
MAX_TOKENS = 2 * BLOCK_SIZE + 10


def search(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any]]:
    """What speculation finds, with plain steps and a preemption in between, and what plain steps find."""
    options = {"ignore_eos": True, "max_tokens": MAX_TOKENS}
    asked = [(prompt_of(25 + w, w), {"beam_width": w, "draft_width": 3 * w, **options}) for w in WIDTHS]
    plain = run(engine, searches(asked, "off"))
    steps, is_on = 0, True

    def after_step() -> None:
        nonlocal steps, is_on
        steps += 1
        is_on = steps % 25 < 9
        if steps == 40:
            preempt_all(engine)

    stock = BeamGroup.speculates.fget
    monkeypatch.setattr(BeamGroup, "speculates", property(lambda group: is_on and stock(group)))
    outputs = run(engine, searches(asked), after_step)
    assert steps > 40
    return outputs, plain


def test_the_draft_model_says_what_it_says_alone(engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_differing(*search(engine, monkeypatch)) == 0
    assert alone.num_wrong == 0
    assert alone.num_compared > 500
    assert alone.num_caught_up > 0, "no rows had more to catch up with than one forward takes"


def test_without_catching_up_it_says_something_else_and_the_search_finds_the_same(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant = Drafter._plant

    def plant_at_the_newest(drafter: Drafter, step: Any, group: GroupRows) -> ForestStep:
        group.num_drafted = int(engine.runner.req_states.num_computed_tokens_np[group.slots[0]])
        return plant(drafter, step, group)

    monkeypatch.setattr(Drafter, "_plant", plant_at_the_newest)
    assert count_differing(*search(engine, monkeypatch)) == 0
    assert alone.num_wrong > alone.num_compared // 10


def test_without_the_copies_of_drafted_forks_it_says_something_else(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = ForestStep.fork
    monkeypatch.setattr(ForestStep, "fork", lambda *args: fork(*args)[:0])
    search(engine, monkeypatch)
    assert alone.num_wrong > 0


def test_without_any_copies_of_tail_blocks_it_says_something_else(
    engine: Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.runner.histories.kv_blocks, "copy", lambda *_: None)
    search(engine, monkeypatch)
    assert alone.num_wrong > 0
