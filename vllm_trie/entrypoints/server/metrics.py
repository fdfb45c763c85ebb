"""Prometheus metrics of beam groups, in addition to vLLM's, and a line of its log.

vLLM's front ends, `LLM` and each API server, pass the statistics of every step to the loggers of their
`StatLoggerManager`. If the engine has beam groups, the logger here is one of them. (vLLM's entry point for such loggers
does not suit: an installed one acts on every engine, enables statistics where they are disabled, and is not loaded by
`LLM`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_trie.compat.patch import arguments_to_vllm, wraps_vllm
from vllm_trie.engine.stats import REASONS, GroupStats, take_group_stats
from vllm_trie.supported_engines import has_beams

logger = init_logger("vllm.trie_beam.metrics")

PREFIX = "vllm:trie_beam_"
METRICS = {
    kind: {field.name: field.metadata["meaning"] for field in fields(GroupStats) if field.metadata.get("kind") == kind}
    for kind in ("running", "peak", "counter")
}
FINISHED = "groups_finished"
_FINISHED_DOCUMENTATION = (
    "Beam groups that ended: stop, done before max_tokens; length, at max_tokens; abort, by the client; "
    "error, for lack of rows or KV blocks."
)


@wraps_vllm("__init__", StatLoggerManager)
def add_server_metrics_logger(
    original: Callable[..., None], self: StatLoggerManager, *args: Any, **kwargs: Any
) -> None:
    """Add the logger of beam groups to a front end whose engine has beams."""
    original(self, *args, **kwargs)
    call = arguments_to_vllm(original, self, *args, **kwargs)
    if not has_beams(call["vllm_config"]):
        return
    prometheus = next(known for known in self.stat_loggers if isinstance(known, PrometheusStatLogger))
    writes_lines = call["enable_default_loggers"] and call["client_count"] == 1  # as in vLLM: several see a part each
    beams = ServerMetricsLogger(prometheus, writes_lines, call["aggregate_engine_logging"])
    self.stat_loggers.insert(0, beams)  # first, as it removes what the others must not see


class ServerMetricsLogger(AggregateStatLoggerBase):
    """Records what the scheduler reports about beam groups.

    Args:
        prometheus: vLLM's logger, whose kind of metrics (Ray has others), labels and engines are used.
        writes_lines: Whether `log`, which vLLM calls once per interval, writes a line for each engine that had beam
            groups in it.
        aggregates: Whether it writes one line for all engines instead.
    """

    def __init__(self, prometheus: PrometheusStatLogger, writes_lines: bool, aggregates: bool) -> None:
        self._metrics = _ServerMetrics(prometheus)
        self._writes_lines = writes_lines
        self._aggregates = aggregates
        self._running = {engine: GroupStats() for engine in prometheus.engine_indexes}
        self._interval: dict[int, GroupStats] = {}  # by engine, if it had beam groups

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        stats = None if scheduler_stats is None else take_group_stats(scheduler_stats)
        if stats is None:
            return
        running = self._running[engine_idx]
        running.groups_running += stats.groups_running
        running.rows_running += stats.rows_running
        self._metrics.record(stats, running, engine_idx)
        if self._writes_lines:
            self._interval.setdefault(engine_idx, GroupStats()).add_report(stats)

    def log(self) -> None:
        intervals, self._interval = self._interval, {}
        for engine, stats in intervals.items():
            running = self._running[engine]
            stats.groups_running, stats.rows_running = running.groups_running, running.rows_running
        if self._aggregates and intervals:
            total = GroupStats()
            for stats in intervals.values():
                total.add_report(stats)
            logger.info("%d Engines Aggregated: %s", len(self._running), describe_server_metrics(total))
        elif not self._aggregates:
            for engine, stats in sorted(intervals.items()):
                logger.info("Engine %03d: %s", engine, describe_server_metrics(stats))

    def log_engine_initialized(self) -> None:
        """Log nothing."""


class _ServerMetrics:
    """The Prometheus metrics of all engines of one front end.

    Each of several API servers has its own metrics, which /metrics combines: counters and gauges of what is running are
    summed, and of peaks it takes the highest.
    """

    def __init__(self, prometheus: PrometheusStatLogger) -> None:
        engines, labels = prometheus.per_engine_labelvalues, ["model_name", "engine"]

        def metrics(cls: type, kind: str, **options: Any) -> dict[str, dict[int, Any]]:
            named = {
                name: cls(name=PREFIX + name, documentation=text, labelnames=labels, **options)
                for name, text in METRICS[kind].items()
            }
            return {name: create_metric_per_engine(metric, engines) for name, metric in named.items()}

        self._running = metrics(prometheus._gauge_cls, "running", multiprocess_mode="sum")
        self._peaks = metrics(prometheus._gauge_cls, "peak", multiprocess_mode="max")
        self._counters = metrics(prometheus._counter_cls, "counter")
        finished = prometheus._counter_cls(
            name=PREFIX + FINISHED, documentation=_FINISHED_DOCUMENTATION, labelnames=[*labels, "finished_reason"]
        )
        self._finished = {
            reason: {engine: finished.labels(*values, reason) for engine, values in engines.items()}
            for reason in REASONS
        }

    def record(self, stats: GroupStats, running: GroupStats, engine: int) -> None:
        for name, gauges in self._running.items():
            gauges[engine].set(getattr(running, name))
        for name, gauges in self._peaks.items():
            gauges[engine].set(getattr(stats, name))
        for name, counters in self._counters.items():
            counters[engine].inc(getattr(stats, name))
        for reason, counters in self._finished.items():
            counters[engine].inc(stats.groups_finished[reason])


def describe_server_metrics(stats: GroupStats) -> str:
    """The log line for one interval and what is running at its end, in the style of vLLM's."""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in stats.groups_finished.items() if count)
    parts = {
        f"Beam groups running: {stats.groups_running} in {stats.rows_running} rows": True,
        f"finished: {sum(stats.groups_finished.values())}" + (f" ({reasons})" if reasons else ""): True,
        f"steps: {stats.steps}": True,
        f"per forward pass: {stats.steps_per_forward:.2f}, drafted: {stats.drafted}, accepted: {stats.accepted}, "
        f"mean width: {stats.mean_width:.2f}": stats.drafted > 0,
        f"preemptions: {stats.preemptions}": stats.preemptions > 0,
        f"KV blocks shared: {stats.kv_blocks_shared}": True,
        f"copied: {stats.kv_blocks_copied}": True,
        f"reclaimed: {stats.kv_blocks_reclaimed}": True,
        f"peak: {stats.kv_blocks_peak}": True,
    }
    return ", ".join(part for part, is_shown in parts.items() if is_shown)
