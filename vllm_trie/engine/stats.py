"""What beam groups do, counted by the scheduler and sent to the front end with vLLM's own statistics.

The scheduler may live in a process of its own. What reaches the front end, in that process or in
another, is vLLM's `SchedulerStats` of each step: to one front end per step, marked with its engine.
Of its fields `kv_connector_stats` alone is an open dictionary that survives the way. Ours come under a key of
their own beside those of a KV connector, if there is one. A field of our own in a subclass does not arrive, as
the front end's decoder knows the fields of vLLM's class only. Reports hold changes since the last
one, not totals: of several API servers each sees a part, and may be late, but they add up to the truth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from vllm_trie.engine.catalogs import CatalogCounts
from vllm_trie.options import PLUGIN_NAME
from vllm_trie.trie.blocks import TrieBlockCounts

REASONS = ("stop", "length", "abort", "error")


def _group_count(kind: str, meaning: str) -> Any:
    """A number: a "counter" of what happened, what is "running", or a "peak", which is no change but what there is."""
    return field(default=0, metadata={"kind": kind, "meaning": meaning})


@dataclass
class GroupCounts:
    """What one search, or all of them, took."""

    steps: int = _group_count("counter", "Steps of beam groups: each takes one per token.")
    target_forwards: int = _group_count(
        "counter", "Forwards of the model that these steps took; speculation makes them fewer."
    )
    prefill_forwards: int = _group_count(
        "counter",
        "Of these, those that led to a group's first beams. Without them, which take one step each, "
        "(steps - prefill_forwards) / (target_forwards - prefill_forwards) is the steps per forward.",
    )
    drafted: int = _group_count("counter", "Tokens that the draft model proposed to beam groups.")
    accepted: int = _group_count("counter", "Of these, those that became the newest token of a beam.")
    beams: int = _group_count("counter", "Beams that all steps together led to; divided by the steps, the mean width.")

    @property
    def steps_per_forward(self) -> float:
        """Taken per target forward, 1.0 without speculation. Those of prompts are left out: they are one to one."""
        forwards = self.target_forwards - self.prefill_forwards
        return (self.steps - self.prefill_forwards) / forwards if forwards else 1.0

    @property
    def mean_width(self) -> float:
        """Beams after a step, over all of them."""
        return self.beams / max(self.steps, 1)

    def add(self, other: GroupCounts) -> None:
        """Include those of another search, or of further ones."""
        for name, count in vars(other).items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, Any]:
        """For the request's user."""
        return {**vars(self), "steps_per_forward": self.steps_per_forward, "mean_width": self.mean_width}


@dataclass(kw_only=True)
class GroupStats(GroupCounts):
    """What changed since the last report, or over some. A name is that of its metric."""

    groups_running: int = _group_count("running", "Beam groups that run.")
    rows_running: int = _group_count("running", "Rows of max_num_seqs that running beam groups take.")
    kv_blocks_peak: int = _group_count("peak", "Most KV blocks that decoding beam groups have held at a time, so far.")
    kv_blocks_shared: int = _group_count("counter", "Full KV blocks that forks took over by reference.")
    kv_blocks_copied: int = _group_count("counter", "Partly filled KV blocks that forks copied.")
    kv_blocks_reclaimed: int = _group_count(
        "counter", "KV blocks given back during a search because no beam led to them any more."
    )
    kv_blocks_cached: int = _group_count(
        "counter", "Full KV blocks of answers, the best hypotheses of searches, that entered the prefix cache."
    )
    preemptions: int = _group_count("counter", "Preemptions of beam groups.")
    catalog_items: int = _group_count(
        "peak", "Items of all catalogs that workers hold, sets that came with requests among them."
    )
    catalog_bytes: int = _group_count("peak", "Bytes that these catalogs take on each device.")
    catalog_loads: int = _group_count("counter", "Catalog files that were loaded: at the start, and as new versions.")
    groups_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def add_report(self, other: GroupStats) -> None:
        """Include a later report."""
        peak = max(self.kv_blocks_peak, other.kv_blocks_peak)
        self.add(other)
        self.kv_blocks_peak, self.catalog_items, self.catalog_bytes = peak, other.catalog_items, other.catalog_bytes
        for reason, count in other.groups_finished.items():
            self.groups_finished[reason] += count


class GroupTally:
    """Counts for the next report, in plain additions."""

    def __init__(self) -> None:
        self.stats = GroupStats()  # since the last report
        self.has_news = False  # although there may be no group any more
        self._totals = Counter[str]()  # of what others count, as reported

    def finish(self, reason: str) -> None:
        """A group has ended, for one of `REASONS`."""
        self.stats.groups_finished[reason] += 1
        self.has_news = True

    def report(self, widths: Sequence[int], blocks: TrieBlockCounts, peak: int, catalogs: CatalogCounts) -> GroupStats:
        """All since the last report.

        Args:
            widths: Rows of each running group.
            blocks: What all tries have done so far.
            peak: Most KV blocks that groups have held so far.
            catalogs: What there is of them.
        """
        totals = Counter({f"kv_blocks_{name}": count for name, count in vars(blocks).items()})
        totals.update(groups_running=len(widths), rows_running=sum(widths), catalog_loads=catalogs.loads)
        stats, self.stats, self.has_news = self.stats, GroupStats(), False
        for name, total in totals.items():
            setattr(stats, name, total - self._totals[name])
        stats.kv_blocks_peak, stats.catalog_items, stats.catalog_bytes = peak, catalogs.items, catalogs.bytes
        self._totals = totals
        return stats


def attach_group_stats(carrier: SchedulerStats, stats: GroupStats) -> None:
    """Send `stats` along."""
    carrier.kv_connector_stats = {**(carrier.kv_connector_stats or {}), PLUGIN_NAME: vars(stats)}


def take_group_stats(carrier: SchedulerStats) -> GroupStats | None:
    """What was sent along. It is gone from the carrier then: vLLM's loggers take what is there for a KV connector's."""
    if PLUGIN_NAME not in (carried := carrier.kv_connector_stats or {}):
        return None
    carrier.kv_connector_stats = {key: value for key, value in carried.items() if key != PLUGIN_NAME} or None
    return GroupStats(**carried[PLUGIN_NAME])
