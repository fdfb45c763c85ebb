"""Counts what beam groups do, in the scheduler, and sends it to the front end with vLLM's statistics.

The scheduler may run in another process. vLLM sends its `SchedulerStats` of each step to one front end, marked with the
engine. `kv_connector_stats` is the only field that is an open dictionary: the counts travel there under the plugin's
name, next to those of a KV connector. A field of a subclass would be lost, as the front end decodes only the fields of
vLLM's class. Reports hold changes since the last report, not totals: each of several API servers sees a part of them,
perhaps late, and the parts add up.
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
    """A number: a "counter" of events, a change of what is "running", or a "peak", which is no change but a total."""
    return field(default=0, metadata={"kind": kind, "meaning": meaning})


@dataclass
class GroupCounts:
    """Counts of one search, or of all of them."""

    steps: int = _group_count("counter", "Steps of beam groups: each takes one per token.")
    target_forwards: int = _group_count(
        "counter", "Forward passes of the model for these steps; speculation makes them fewer."
    )
    prefill_forwards: int = _group_count(
        "counter",
        "Forward passes that led to a group's first beams. Without them, which take one step each, "
        "(steps - prefill_forwards) / (target_forwards - prefill_forwards) is the steps per forward pass.",
    )
    drafted: int = _group_count("counter", "Tokens that the draft model proposed to beam groups.")
    accepted: int = _group_count("counter", "Drafted tokens that became the newest token of a beam.")
    beams: int = _group_count("counter", "Beams after each step, summed over steps; per step, the mean width.")

    @property
    def steps_per_forward(self) -> float:
        """Steps per forward pass of the target, 1.0 without speculation. Prefills, with one step each, do not count."""
        forwards = self.target_forwards - self.prefill_forwards
        return (self.steps - self.prefill_forwards) / forwards if forwards else 1.0

    @property
    def mean_width(self) -> float:
        """Mean number of beams after a step."""
        return self.beams / max(self.steps, 1)

    def add(self, other: GroupCounts) -> None:
        """Add other counts to these."""
        for name, count in vars(other).items():
            if isinstance(count, int):
                setattr(self, name, getattr(self, name) + count)

    def as_dict(self) -> dict[str, Any]:
        """The counts and their ratios, for the answer to a request."""
        return {**vars(self), "steps_per_forward": self.steps_per_forward, "mean_width": self.mean_width}


@dataclass(kw_only=True)
class GroupStats(GroupCounts):
    """Changes since the last report, or over several reports. Fields are named as their metrics."""

    groups_running: int = _group_count("running", "Running beam groups.")
    rows_running: int = _group_count("running", "Rows of max_num_seqs that running beam groups occupy.")
    kv_blocks_peak: int = _group_count("peak", "The most KV blocks that decoding beam groups have held at a time.")
    kv_blocks_shared: int = _group_count("counter", "Full KV blocks that forks took over by reference.")
    kv_blocks_copied: int = _group_count("counter", "Partly filled KV blocks that forks copied.")
    kv_blocks_reclaimed: int = _group_count(
        "counter", "KV blocks returned during a search because no beam used them any more."
    )
    kv_blocks_cached: int = _group_count(
        "counter", "Full KV blocks of the best hypotheses of searches that entered the prefix cache."
    )
    preemptions: int = _group_count("counter", "Preemptions of beam groups.")
    catalog_items: int = _group_count(
        "peak", "Items of all catalogs that workers hold, including sets that came with requests."
    )
    catalog_bytes: int = _group_count("peak", "Bytes of these catalogs on each device.")
    catalog_loads: int = _group_count("counter", "Catalog files that were loaded, at the start and as new versions.")
    groups_finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def add_report(self, other: GroupStats) -> None:
        """Add a later report."""
        peak = max(self.kv_blocks_peak, other.kv_blocks_peak)
        self.add(other)
        self.kv_blocks_peak, self.catalog_items, self.catalog_bytes = peak, other.catalog_items, other.catalog_bytes
        for reason, count in other.groups_finished.items():
            self.groups_finished[reason] += count


class GroupTally:
    """Collects counts for the next report."""

    def __init__(self) -> None:
        self.stats = GroupStats()  # since the last report
        self.has_news = False  # even if no group is left
        self._totals = Counter[str]()  # of counts kept elsewhere, at the last report

    def finish(self, reason: str) -> None:
        """Count a group that ended, for one of `REASONS`."""
        self.stats.groups_finished[reason] += 1
        self.has_news = True

    def report(self, widths: Sequence[int], blocks: TrieBlockCounts, peak: int, catalogs: CatalogCounts) -> GroupStats:
        """All changes since the last report.

        Args:
            widths: Rows of each running group.
            blocks: Block counts of all tries so far.
            peak: The most KV blocks that groups have held so far.
            catalogs: The catalogs that workers hold.
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
    """Attach `stats` to vLLM's statistics."""
    carrier.kv_connector_stats = {**(carrier.kv_connector_stats or {}), PLUGIN_NAME: vars(stats)}


def take_group_stats(carrier: SchedulerStats) -> GroupStats | None:
    """Remove and return attached stats: vLLM's loggers would take them for a KV connector's."""
    if PLUGIN_NAME not in (carried := carrier.kv_connector_stats or {}):
        return None
    carrier.kv_connector_stats = {key: value for key, value in carried.items() if key != PLUGIN_NAME} or None
    return GroupStats(**carried[PLUGIN_NAME])
