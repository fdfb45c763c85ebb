"""What a draft model says in an engine, beside what it says alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.disturb import preempt_all
from tests.support.engine import BLOCK_SIZE, Engine
from tests.support.loop import one_thread
from tests.support.pairs import searches
from tests.support.running import prompt_of, run
from vllm_trie.engine.scheduler import BeamScheduler
from vllm_trie.worker.draft_by_model import ModelDrafts
from vllm_trie.worker.draft_model import DraftBatch, DraftModel
from vllm_trie.worker.forest_step import ForestStep

TOLERANCE = 1e-3
MOST_WRONG = 100  # rows, after which the rest is not compared


class Alone:
    """Compares every row of logits that is drafted from with the draft model run alone on the row's whole text."""

    def __init__(self, engine: Engine, draft_alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.model = engine, draft_alone
        self.num_compared = self.num_wrong = self.num_caught_up = 0
        self._texts: list[tuple[list[int], list[int]]] = []  # of the rows of the next logits, up to its root and after
        draft_layer, logits, add_pending = ModelDrafts._draft_layer, DraftModel.logits, DraftBatch.add_pending

        def layer_after(drafts: ModelDrafts, forests: dict[str, ForestStep], number: int) -> None:
            active = [one for one in forests.values() if one.budget.num_layers >= number and one.layer.nodes]
            self._texts = [self._text(one, node) for one in active for node in one.layer.nodes]
            draft_layer(drafts, forests, number)
            assert not self._texts

        def compared(model: DraftModel, batch: DraftBatch) -> torch.Tensor:
            found = logits(model, batch)
            texts, self._texts = self._texts, []
            tokens = [token for of_row in batch.tokens for token in of_row]
            for (history, path), at, row in zip(texts, batch.wanted, found, strict=True):
                text = history + path
                assert (text[-1], len(text) - 1) == (tokens[at], batch.positions[at])
                self._compare(history, path, row)
            return found

        def caught_up(batch: DraftBatch, forest_step: ForestStep, most: int | None = None) -> None:
            self.num_caught_up += most is not None
            add_pending(batch, forest_step, most)

        monkeypatch.setattr(ModelDrafts, "_draft_layer", layer_after)
        monkeypatch.setattr(DraftModel, "logits", compared)
        monkeypatch.setattr(DraftBatch, "add_pending", caught_up)

    def says(self, history: list[int], path: list[int]) -> torch.Tensor:
        """[V] logits after a path of drafts behind a history."""
        logits: torch.Tensor = self.model(torch.tensor([history + path])).logits[0, -1]
        return logits

    def _text(self, one: ForestStep, node: int) -> tuple[list[int], list[int]]:
        root, *path = one.forest.path(node)
        tokens = self.engine.runner.req_states.all_token_ids.gpu
        history = tokens[one.group.slots[root], : one.start + 1].tolist()
        assert history[-1] == one.forest.tokens[root]
        return history, [one.forest.tokens[node] for node in path]

    @one_thread()
    @torch.inference_mode()
    def _compare(self, history: list[int], path: list[int], row: torch.Tensor) -> None:
        if self.num_wrong == MOST_WRONG:
            return
        self.num_compared += 1
        self.num_wrong += bool((self.says(history, path) - row).abs().max() > TOLERANCE)


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

    stock = BeamScheduler._speculating
    monkeypatch.setattr(BeamScheduler, "_speculating", lambda *asked: stock(*asked) if is_on else ())
    outputs = run(engine, searches(asked), after_step)
    assert steps > 40
    return outputs, plain
