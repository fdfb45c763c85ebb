"""What beam groups do, counted by the scheduler and sent to the front end with vLLM's own statistics.

The scheduler may live in a process of its own. What reaches the front end, in that process or in
another, is vLLM's `SchedulerStats` of each step: to one front end per step, marked with its engine.
Of its fields `kv_connector_stats` alone is an open dictionary that survives the way, and it is free:
engines with beam groups have no KV connector. A field of our own in a subclass does not arrive, as
the front end's decoder knows the fields of vLLM's class only. Reports hold changes since the last
one, not totals: of several API servers each sees a part, and may be late, but they add up to the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats

from vllm_trie.engine.catalogs import CatalogCounts
from vllm_trie.messages import Decided
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.trie.blocks import BlockCounts

REASONS = ("stop", "length", "abort", "error")


@dataclass
class SearchCounts:
    """What one search, or all of them, took."""

    steps: int = 0  # taken: each makes the beams one token longer
    target_forwards: int = 0  # that led to them
    prefill_forwards: int = 0  # of these forwards, those that led to first beams: a prompt's last
    drafted: int = 0  # tokens that the draft model proposed
    accepted: int = 0  # of these, those that became beams
    beams: int = 0  # that all steps together led to

    @classmethod
    def of(cls, decided: Decided, num_steps: int, is_prompt: bool) -> Self:
        """What one target forward came to.

        Args:
            num_steps: So many of its steps, the first ones, were replayed.
            is_prompt: It led to the group's first beams.
        """
        beams = sum(step.num_beams for step in decided.steps[:num_steps])
        counts = cls(steps=num_steps, target_forwards=1, prefill_forwards=int(is_prompt), beams=beams)
        if decided.drafted is not None:
            counts.drafted = decided.drafted.num_drafts
            counts.accepted = sum(decided.drafted.num_accepted[:num_steps])
        return counts

    @property
    def steps_per_forward(self) -> float:
        """Taken per target forward, 1.0 without speculation. Those of prompts are left out: they are one to one."""
        forwards = self.target_forwards - self.prefill_forwards
        return (self.steps - self.prefill_forwards) / forwards if forwards else 1.0

    @property
    def mean_width(self) -> float:
        """Beams after a step, over all of them."""
        return self.beams / max(self.steps, 1)

    def add(self, other: Self) -> None:
        """Include those of another search, or of further ones."""
        for name, count in vars(other).items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, Any]:
        """For the request's user."""
        return {**vars(self), "steps_per_forward": self.steps_per_forward, "mean_width": self.mean_width}


@dataclass(kw_only=True)
class BeamStats(SearchCounts):
    """What changed since the last report, or over some. A name is that of its metric."""

    groups_running: int = 0  # more than before, or fewer
    rows_running: int = 0
    kv_blocks_peak: int = 0  # not a change: the most, ever
    kv_blocks_shared: int = 0
    kv_blocks_copied: int = 0
    kv_blocks_reclaimed: int = 0
    kv_blocks_cached: int = 0
    preemptions: int = 0
    catalog_items: int = 0  # not a change, nor are bytes
    catalog_bytes: int = 0
    catalog_loads: int = 0
    groups_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def add(self, other: Self) -> None:
        """Include another report."""
        peak = max(self.kv_blocks_peak, other.kv_blocks_peak)
        super().add(other)
        self.kv_blocks_peak, self.catalog_items, self.catalog_bytes = peak, other.catalog_items, other.catalog_bytes
        for reason, count in other.groups_finished.items():
            self.groups_finished[reason] += count


class BeamTally:
    """Counts for the next report, in plain additions."""

    def __init__(self) -> None:
        self.counts = SearchCounts()
        self.preemptions = 0
        self.has_news = False  # although there may be no group any more
        self._finished = dict.fromkeys(REASONS, 0)
        self._running = (0, 0)  # groups and rows, as reported
        self._blocks = BlockCounts()  # likewise
        self._catalog_loads = 0  # likewise

    def finish(self, reason: str) -> None:
        """A group has ended, for one of `REASONS`."""
        self._finished[reason] += 1
        self.has_news = True

    def report(self, widths: Sequence[int], blocks: BlockCounts, peak: int, catalogs: CatalogCounts) -> BeamStats:
        """All since the last report.

        Args:
            widths: Rows of each running group.
            blocks: What all tries have done so far.
            peak: Most KV blocks that groups have held so far.
            catalogs: What there is of them.
        """
        running = len(widths), sum(widths)
        stats = BeamStats(
            **vars(self.counts),
            groups_running=running[0] - self._running[0],
            rows_running=running[1] - self._running[1],
            kv_blocks_peak=peak,
            kv_blocks_shared=blocks.shared - self._blocks.shared,
            kv_blocks_copied=blocks.copied - self._blocks.copied,
            kv_blocks_reclaimed=blocks.reclaimed - self._blocks.reclaimed,
            kv_blocks_cached=blocks.cached - self._blocks.cached,
            preemptions=self.preemptions,
            catalog_items=catalogs.items,
            catalog_bytes=catalogs.bytes,
            catalog_loads=catalogs.loads - self._catalog_loads,
            groups_finished=self._finished,
        )
        self._running, self._blocks, self._catalog_loads = running, blocks, catalogs.loads
        self.counts, self.preemptions = SearchCounts(), 0
        self._finished = dict.fromkeys(REASONS, 0)
        self.has_news = False
        return stats


def statistics_among(outputs: Iterable[EngineCoreOutputs]) -> SchedulerStats | None:
    """Where vLLM's statistics of a step go; None where it keeps none."""
    return next((output.scheduler_stats for output in outputs if output.scheduler_stats is not None), None)


def attach_stats(carrier: SchedulerStats, stats: BeamStats) -> None:
    """Send `stats` along."""
    assert carrier.kv_connector_stats is None, "a KV connector in an engine with beam groups"
    carrier.kv_connector_stats = {PLUGIN_NAME: vars(stats)}


def take_stats(carrier: SchedulerStats) -> BeamStats | None:
    """What was sent along. It is gone from the carrier then: vLLM's loggers would look for its KV connector."""
    carried, carrier.kv_connector_stats = carrier.kv_connector_stats, None
    return None if carried is None else BeamStats(**carried[PLUGIN_NAME])
