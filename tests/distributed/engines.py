"""Engines whose workers are processes of their own, and a way to look into these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests import RUNS_V2
from tests.conftest import ROOT, Engine
from tests.rows import Row, rows_of
from vllm_trie.worker import v1, v2

RANKS = 2
TRITON_ON_CPU = str(ROOT / "tests" / "triton_on_cpu")


class LookedInto:
    """Becomes a base class of the worker, by vLLM's `worker_extension_cls`."""

    rank: int
    model_runner: Any

    def rows_of_groups(self) -> dict[str, list[Row]]:
        return rows_of(self.model_runner)

    def go_astray(self, what: str, rank: int) -> None:
        """From now on, let one rank decide about "beams" or "drafts" by logits that no other rank sees."""
        if self.rank != rank:
            return
        if what == "beams":
            module, place = (v2, 2) if RUNS_V2 else (v1, 1)
            select = module.select
            module.select = lambda *args: select(*args[:place], args[place].roll(1, dims=-1), *args[place + 1 :])
        else:
            draft_model = self.model_runner.speculator._draft_model
            logits_of = draft_model.logits
            draft_model.logits = lambda *args: logits_of(*args).roll(1, dims=-1)


def prepare_workers() -> None:
    """Set what workers, which are processes of their own, find in their environment; see tests.conftest."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if RUNS_V2 and TRITON_ON_CPU not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([TRITON_ON_CPU, *paths])


class ParallelEngine(Engine):
    """An engine whose scheduler is in this process, and whose ranks are not."""

    def __init__(self, model: Path, **options: Any) -> None:
        prepare_workers()
        checks = {"check_invariants": True, "debug_rank_check": True}
        super().__init__(
            model,
            tensor_parallel_size=RANKS,
            worker_extension_cls=f"{LookedInto.__module__}.{LookedInto.__name__}",
            additional_config={"trie_beam": checks},
            **options,
        )

    def rows_of_ranks(self) -> list[dict[str, list[Row]]]:
        return self.core.model_executor.collective_rpc("rows_of_groups")
