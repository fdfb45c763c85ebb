"""Engines whose workers are processes of their own, and a way to look into these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.v1.executor import multiproc_executor

from tests.support import forks
from tests.support.engine import Engine
from tests.support.rows import Row, rows_of
from vllm_trie.speculation.search.draft_lookup import NGrams

RANKS = 2


class LookedInto:
    """Becomes a base class of the worker, by vLLM's `worker_extension_cls`."""

    rank: int
    model_runner: Any

    def rows_of_groups(self) -> dict[str, list[Row]]:
        return rows_of(self.model_runner)

    def ignore_parents(self, rank: int) -> None:
        """From now on, let the rows of one stage of a pipeline continue their own histories."""
        if self.rank == rank:
            self.model_runner.rows.fork = lambda *_: None

    def go_astray(self, what: str, rank: int) -> None:
        """From now on, let one rank decide about "beams" or "drafts" by logits that no other rank sees.

        Or let it draft by other "n-grams".
        """
        if self.rank != rank:
            return
        if what == "beams":
            selector = self.model_runner.selector
            select = selector.select
            selector.select = lambda step, rows, logits, *args: select(step, rows, logits.roll(1, dims=-1), *args)
        elif what == "n-grams":
            self.model_runner.speculation.drafter._ngrams = NGrams(9, 9)
        else:
            draft_model = self.model_runner.speculation.drafter.draft_model
            logits_of = draft_model.logits
            draft_model.logits = lambda *args: logits_of(*args).roll(1, dims=-1)


class ParallelEngine(Engine):
    """An engine whose scheduler is in this process, and whose ranks are not.

    Args:
        catalogs: Files, by name.
    """

    def __init__(
        self, model: Path, parallel: str = "tensor", catalogs: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        checks = {"check_invariants": True, "debug_rank_check": True, "catalogs": dict(catalogs or {})}
        with mock.patch.object(multiproc_executor, "get_mp_context", forks.context):
            super().__init__(
                model,
                **{f"{parallel}_parallel_size": RANKS},
                worker_extension_cls=f"{LookedInto.__module__}.{LookedInto.__name__}",
                additional_config={"trie_beam": checks},
                **options,
            )

    def watch(self) -> None:
        """The runners are elsewhere: see `check_rows`."""

    def check_rows(self) -> None:
        """Raise AssertionError unless the rows of all ranks hold the tokens and blocks that the scheduler believes.

        While results are on their way the scheduler cannot know.
        """
        ranks = self.core.model_executor.collective_rpc("rows_of_groups")
        assert len(ranks) == RANKS
        for rows in ranks:
            for group_id, group in self.scheduler.groups.items():
                tries = self.scheduler.kv_cache_manager._groups[group_id].tries
                for number, row in enumerate(rows[group_id] if tries and not group.num_pending else []):
                    assert row.tokens == group.history(number), (group_id, number)
                    for trie, blocks in zip(tries, row.blocks, strict=True):
                        assert blocks[trie.num_skipped :] == trie.row_blocks(number), (group_id, number)
