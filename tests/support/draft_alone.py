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
from tests.support.unseen import paths_before
from vllm_trie.engine.scheduler import BeamScheduler
from vllm_trie.speculation.worker.device_forests import DeviceForests
from vllm_trie.speculation.worker.draft_batch import DraftBatch, DraftInputs
from vllm_trie.speculation.worker.draft_by_model import ModelDrafter
from vllm_trie.speculation.worker.draft_model import DraftModel
from vllm_trie.speculation.worker.forest_step import ForestStep

TOLERANCE = 1e-3
MOST_WRONG = 100  # rows, after which the rest is not compared


class Alone:
    """Compares every row of logits that is drafted from with the draft model run alone on the row's whole text."""

    def __init__(self, engine: Engine, draft_alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine, self.model = engine, draft_alone
        self.num_compared = self.num_wrong = self.num_caught_up = 0
        self.num_unseen = 0  # of those that are compared
        self._are_unseen = False
        self._texts: list[tuple[list[int], list[int]]] = []  # of the rows of the next logits, up to its root and after
        draft_layer, logits, add_pending = ModelDrafter._draft_layer, DraftModel.logits, DraftBatch.add_pending

        def layer_after(drafts: ModelDrafter, forests: dict[str, ForestStep], number: int) -> None:
            active = [one for one in forests.values() if one.budget.num_layers >= number and one.layer.nodes]
            self._texts = [self._text(one, node) for one in active for node in one.layer.nodes]
            draft_layer(drafts, forests, number)
            assert not self._texts

        def compared(model: DraftModel, inputs: DraftInputs) -> torch.Tensor:
            found = logits(model, inputs)
            if self._are_unseen:
                return found
            texts, self._texts = self._texts, []
            assert inputs.wanted is not None
            tokens, positions = inputs.tokens.tolist(), inputs.positions.tolist()
            for (history, path), at in zip(texts, inputs.wanted.tolist(), strict=True):
                text = history + path
                assert (text[-1], len(text) - 1) == (tokens[at], positions[at])
            self._compare_all(texts, found)
            return found

        def caught_up(batch: DraftBatch, forest_step: ForestStep, most: int | None = None) -> None:
            self.num_caught_up += most is not None
            add_pending(batch, forest_step, most)

        all_unseen, draft_unseen = ModelDrafter._draft_unseen, DeviceForests.draft

        def all_layers(drafts: ModelDrafter, forests: dict[str, ForestStep]) -> None:
            self._are_unseen = True
            all_unseen(drafts, forests)
            self._are_unseen = False

        def unseen_after(unseen: DeviceForests, found: torch.Tensor, number: int) -> None:
            """The device is seen by this test alone."""
            self._compare_unseen(unseen, found, number)
            draft_unseen(unseen, found, number)

        monkeypatch.setattr(ModelDrafter, "_draft_unseen", all_layers)
        monkeypatch.setattr(DeviceForests, "draft", unseen_after)
        monkeypatch.setattr(ModelDrafter, "_draft_layer", layer_after)
        monkeypatch.setattr(DraftModel, "logits", compared)
        monkeypatch.setattr(DraftBatch, "add_pending", caught_up)

    def says(self, texts: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """[B, V] logits after texts [B, T], which end with so many drafts."""
        logits: torch.Tensor = self.model(texts).logits[:, -1]
        return logits

    def _compare_all(self, texts: list[tuple[list[int], list[int]]], found: torch.Tensor) -> None:
        of_lengths: dict[tuple[int, int], list[int]] = {}  # rows that the model reads together
        for number, (history, path) in enumerate(texts):
            of_lengths.setdefault((len(history), len(path)), []).append(number)
        assert len(found) == len(texts)
        for (_, num_drafts), numbers in of_lengths.items():
            self._compare([[*texts[number][0], *texts[number][1]] for number in numbers], num_drafts, found[numbers])

    def _compare_unseen(self, unseen: DeviceForests, found: torch.Tensor, number: int) -> None:
        texts, at = [], []
        for row, (plan, path) in enumerate(paths_before(unseen, number)):
            if path is not None:
                history, _ = self._text(plan.forest_step, path[0])
                texts.append((history, path[1:]))
                at.append(row)
        before = self.num_compared
        self._compare_all(texts, found[at])
        self.num_unseen += self.num_compared - before

    def _text(self, one: ForestStep, node: int) -> tuple[list[int], list[int]]:
        root, *path = one.forest.path(node)
        tokens = self.engine.runner.req_states.all_token_ids.gpu
        history = tokens[one.group.slots[root], : one.start + 1].tolist()
        assert history[-1] == one.forest.tokens[root]
        return history, [one.forest.tokens[node] for node in path]

    @one_thread()
    @torch.inference_mode()
    def _compare(self, texts: list[list[int]], num_drafts: int, rows: torch.Tensor) -> None:
        if self.num_wrong >= MOST_WRONG:
            return
        self.num_compared += len(texts)
        differences = (self.says(torch.tensor(texts), num_drafts) - rows).abs().amax(-1)
        self.num_wrong += int((differences > TOLERANCE).sum())


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

    stock = BeamScheduler._growing
    monkeypatch.setattr(BeamScheduler, "_growing", lambda *asked: stock(*asked) if is_on else ())
    outputs = run(engine, searches(asked), after_step)
    assert steps > 40
    return outputs, plain
