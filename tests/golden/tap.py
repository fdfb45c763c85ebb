"""What the scheduler decides for its searches, step by step: the one place that knows where the engine has it.

When the engine's records change, this file changes with them, and what is recorded stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.golden.decisions import Rows, Steps
from tests.support.engine import Engine
from vllm_trie.engine.group import BeamGroup

ADDRESS = re.compile(r"^(?:0_)?(.*)-[0-9a-f]{8}$")  # how vLLM and the plugin name the request of a search


class Tap:
    """Listens to the searches of an engine.

    Args:
        after_step: Called with the name of a search and the steps that it has taken.
    """

    def __init__(self, engine: Engine, after_step: Callable[[str, int], None]) -> None:
        self.steps: dict[str, Steps] = {}  # by request id, as the one who asks named it
        self._engine, self._after_step = engine, after_step
        self._names: dict[BeamGroup, str] = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of all steps from now on."""
        stock = BeamGroup.advance

        def advance(group: BeamGroup, step: Any) -> bool:
            is_first = group.hypotheses.width == 1
            is_over = stock(group, step)
            self._hear(group, step, is_first, is_over)
            return is_over

        with mock.patch.object(BeamGroup, "advance", advance):
            yield

    def _hear(self, group: BeamGroup, step: Any, is_first: bool, is_over: bool) -> None:
        name, ranks = self._name(group), step.rank_scores
        beams = Rows.none() if is_over else Rows.of(step.parents, step.tokens, step.scores, ranks and ranks.beams)
        finished = Rows.of(*step.finished, ranks and ranks.finished)
        if is_first:  # of the prompt there is one row, whichever slot goes on from it
            beams, finished = beams.of_one_parent(), finished.of_one_parent()
        self.steps.setdefault(name, {})[group.length] = beams, finished
        self._after_step(name, group.length)

    def _name(self, group: BeamGroup) -> str:
        if group not in self._names:
            (group_id,) = (key for key, known in self._engine.scheduler.groups.items() if known is group)
            match = ADDRESS.match(group_id)
            assert match is not None, group_id
            self._names[group] = match[1]
        return self._names[group]
