"""What metrics and the log say of beam groups is what the scheduler's tries did."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import SchedulerStats

from tests.support.engine import BLOCK_SIZE, ROOT, Engine, Engines
from tests.support.models import make_draft
from vllm_trie import beam_params
from vllm_trie.engine.stats import GroupStats, attach_group_stats, take_group_stats
from vllm_trie.entrypoints.server.metrics import FINISHED, METRICS, PREFIX, ServerMetricsLogger

pytestmark = pytest.mark.slow

BYTES_PER_BLOCK = 2 * 2 * 2 * 32 * BLOCK_SIZE * 4  # layers, K and V, KV heads, head size, tokens, float32
PROMPT = list(range(2, 42))  # a full block and a partly filled one
OPTIONS = {"disable_log_stats": False, "kv_cache_memory_bytes": 26 * BYTES_PER_BLOCK, "max_num_seqs": 24}


@pytest.fixture
def model(random_model: Callable[[str], Path]) -> Path:
    return random_model("gqa")


@pytest.fixture
def engine(engines: Engines, model: Path) -> Engine:
    return from_zero(engines(model, **OPTIONS))


@pytest.fixture
def speculating(engines: Engines, model: Path, tmp_path: Path) -> Engine:
    draft = make_draft(model, tmp_path, 0.01, seed=3)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    return from_zero(engines(model, speculative_config=speculative, disable_log_stats=False))


def from_zero(engine: Engine) -> Engine:
    """Lets its metrics begin anew."""
    front_end = engine.llm.llm_engine
    front_end.step()  # reports what earlier tests left unreported
    front_end.logger_manager = StatLoggerManager(front_end.vllm_config)
    engine.scheduler.kv_cache_manager.peak_group_blocks = 0
    return engine


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What is logged about beam groups."""
    written: list[str] = []
    logger = logging.getLogger("vllm.trie_beam.metrics")
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield written
    logger.removeHandler(handler)
    logger.setLevel(level)


def metrics_of(engine: Engine) -> dict[str, float]:
    """By name without prefix, finished groups by their reason."""
    ours = [metric for metric in engine.llm.get_metrics() if metric.name.startswith(PREFIX)]
    assert {metric.labels["engine"] for metric in ours} == {"0"}
    assert {metric.labels["model_name"] for metric in ours} == {str(engine.llm.model_config.served_model_name)}
    return {metric.labels.get("finished_reason", metric.name.removeprefix(PREFIX)): metric.value for metric in ours}


def test_a_search_of_known_shape_is_counted_exactly(engine: Engine) -> None:
    engine.generate([PROMPT], beam_params(6, n=2, max_tokens=10, ignore_eos=True))
    metrics = metrics_of(engine)
    assert metrics["steps"] == metrics["target_forwards"] == 10
    assert metrics["prefill_forwards"] == 1
    assert (metrics["drafted"], metrics["accepted"], metrics["beams"]) == (0, 0, 60)
    assert metrics["kv_blocks_peak"] == 1 + 6, "the prompt's full block, and one block per row"
    assert metrics["kv_blocks_reclaimed"] == 0, "no row has filled a block of its own"
    assert metrics["kv_blocks_copied"] - metrics["kv_blocks_shared"] == 5, "each fork does both, fanning out copies"
    finished = {reason: metrics[reason] for reason in ("stop", "length", "abort", "error")}
    assert finished == {"stop": 0, "length": 1, "abort": 0, "error": 0}
    assert (metrics["groups_running"], metrics["rows_running"], metrics["preemptions"]) == (0, 0, 0)


def test_vllms_metrics_count_a_search_that_is_not_streamed_at_its_end(engine: Engine) -> None:
    (output,) = engine.generate([PROMPT], beam_params(6, n=2, max_tokens=10, ignore_eos=True))
    counted = {metric.name: vars(metric).get("sum", vars(metric).get("value")) for metric in engine.llm.get_metrics()}
    assert counted["vllm:generation_tokens"] == sum(len(answer.token_ids) for answer in output.outputs) == 20
    assert counted["vllm:request_decode_time_seconds"] == counted["vllm:request_time_per_output_token_seconds"] == 0
    until_first, whole = (counted[f"vllm:{of}_seconds"] for of in ("time_to_first_token", "e2e_request_latency"))
    assert until_first == pytest.approx(whole, rel=1e-3)


def test_blocks_of_the_answer_that_enter_the_prefix_cache_are_counted(engine: Engine) -> None:
    assert engine.llm.llm_engine.reset_prefix_cache()
    engine.generate([PROMPT], beam_params(4, n=2, max_tokens=60, ignore_eos=True))
    assert metrics_of(engine)["kv_blocks_cached"] == (len(PROMPT) + 59) // BLOCK_SIZE - len(PROMPT) // BLOCK_SIZE == 2


def test_metrics_are_the_counts_of_the_tries_whatever_happens(engine: Engine) -> None:
    manager = engine.scheduler.kv_cache_manager
    before = manager.total_counts()
    prompts = [[(seed + 3) * token % 298 + 2 for token in PROMPT] for seed in range(4)]
    params = [beam_params(width, n=width, max_tokens=90, ignore_eos=True) for width in (6, 4, 6, 5)]
    engine.generate(prompts, params)
    metrics, after = metrics_of(engine), manager.total_counts()
    assert metrics["kv_blocks_shared"] == after.shared - before.shared > 0
    assert metrics["kv_blocks_copied"] == after.copied - before.copied > 0
    assert metrics["kv_blocks_reclaimed"] == after.reclaimed - before.reclaimed > 0
    assert metrics["preemptions"] > 0, "the pool is not small enough"
    assert metrics["steps"] == 4 * 90, "preempted groups do not go on where they were"
    assert metrics["length"] == 4
    assert 20 < metrics["kv_blocks_peak"] == manager.peak_group_blocks <= manager.num_usable_blocks


def test_gauges_follow_groups_that_run_and_leave_out_ordinary_requests(engine: Engine) -> None:
    core = engine.llm.llm_engine
    core.add_request("wide", {"prompt_token_ids": PROMPT}, beam_params(8, max_tokens=20, ignore_eos=True))
    core.add_request("plain", {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0, max_tokens=40))
    core.add_request("short", {"prompt_token_ids": PROMPT}, beam_params(5, n=2, max_tokens=5, ignore_eos=True))
    seen = []
    while core.has_unfinished_requests():
        core.step()
        metrics = metrics_of(engine)
        seen.append((metrics["groups_running"], metrics["rows_running"]))
    assert list(dict.fromkeys(seen)) == [(2, 13), (1, 8), (0, 0)]
    assert metrics["steps"] == 20 + 5


def test_groups_end_by_a_stop_an_abort_or_an_error(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    core = engine.llm.llm_engine
    engine.generate([PROMPT], beam_params(4, max_tokens=60, early_stopping=True, stop_token_ids=list(range(2, 40))))
    for request_id in ("aborted", "aborted too"):
        core.add_request(request_id, {"prompt_token_ids": PROMPT}, beam_params(4, n=3, max_tokens=60))
    core.step()
    core.abort_request(["aborted"])
    core.step()
    assert metrics_of(engine)["abort"] == 1, "one group, though three outputs"
    core.abort_request(["aborted too"])
    engine.generate([PROMPT], beam_params(20, n=2, max_tokens=200, ignore_eos=True))  # starves
    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "max_num_running_reqs", 3)
        engine.generate([PROMPT], beam_params(4, max_tokens=5))  # cannot even start
    metrics = metrics_of(engine)
    assert {r: metrics[r] for r in ("stop", "length", "abort", "error")} == {
        "stop": 1,
        "length": 0,
        "abort": 2,
        "error": 2,
    }
    assert metrics["groups_running"] == 0


def test_one_line_per_interval_and_none_without_beams(engine: Engine, lines: list[str]) -> None:
    front_end = engine.llm.llm_engine
    front_end.do_log_stats()
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
    front_end.do_log_stats()
    assert lines == []
    engine.generate([PROMPT, PROMPT], beam_params(3, n=2, max_tokens=7, ignore_eos=True))
    front_end.do_log_stats()
    (line,) = lines
    beginning = "Engine 000: Beam groups running: 0 in 0 rows, finished: 2 (length: 2), steps: 14, KV blocks shared: "
    assert line.startswith(beginning)
    front_end.do_log_stats()
    assert lines == [line]
    engine.generate([PROMPT], beam_params(3, n=2, max_tokens=2, ignore_eos=True))
    front_end.do_log_stats()
    assert "finished: 1 (length: 1), steps: 2," in lines[1], "an interval says what happened in it"


def test_no_step_is_reported_twice_or_without_need(engine: Engine) -> None:
    """Where no group is, vLLM's statistics carry nothing of ours."""
    core, reports = engine.llm.llm_engine, []
    core.logger_manager.stat_loggers[0].record = lambda scheduler_stats, *args, **kwargs: reports.append(
        take_group_stats(scheduler_stats)
    )
    engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))
    assert len(reports) >= 8
    assert set(map(str, reports)) == {"None"}
    engine.generate([PROMPT], beam_params(3, max_tokens=8, ignore_eos=True))
    reports = [report for report in reports if report is not None]
    # The first report comes while the first step is on its way.
    assert [report.steps for report in reports] == [0] + [1] * 8
    assert [report.groups_running for report in reports] == [1] + [0] * 7 + [-1]


def test_an_engine_that_keeps_no_statistics_sends_none(engines: Engines, model: Path) -> None:
    engine = engines(model, **{**OPTIONS, "disable_log_stats": True})
    core = engine.llm.llm_engine
    assert core.logger_manager is None
    core.add_request("g", {"prompt_token_ids": PROMPT}, beam_params(3, max_tokens=4))
    while core.has_unfinished_requests():
        assert engine.core.scheduler.make_stats() is None
        core.step()


def test_an_engine_that_was_not_asked_for_beams_shows_none(engines: Engines, model: Path) -> None:
    """Although one that was asked, in the same process, did."""
    engine = engines(model, **OPTIONS, additional_config={})
    core = engine.llm.llm_engine
    try:
        assert not any(isinstance(one, ServerMetricsLogger) for one in core.logger_manager.stat_loggers)
        engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4))
        assert not any("trie" in metric.name for metric in engine.llm.get_metrics())
    finally:
        engines.close()  # it has nothing of ours in which something could be left


def test_speculation_is_counted_as_each_request_is_told(speculating: Engine, lines: list[str]) -> None:
    names = ("steps", "target_forwards", "prefill_forwards", "drafted", "accepted", "beams")
    params = [
        beam_params(4, n=2, max_tokens=30, ignore_eos=True),
        beam_params(2, n=2, max_tokens=20, speculation="sample", threshold=0.7, seed=1),
        beam_params(3, n=3, max_tokens=9, speculation="sample", memory_mode=True, seed=2),
    ]
    answers = [one.kv_transfer_params["trie_beam"] for one in speculating.generate([PROMPT] * 3, params)]
    metrics = metrics_of(speculating)
    assert {name: metrics[name] for name in names} == {name: sum(one[name] for one in answers) for name in names}
    assert metrics["steps"] > metrics["target_forwards"]
    assert metrics["drafted"] > metrics["accepted"] > 0
    speculating.llm.llm_engine.do_log_stats()
    assert metrics["prefill_forwards"] == len(params)
    per_forward = (metrics["steps"] - metrics["prefill_forwards"]) / (
        metrics["target_forwards"] - metrics["prefill_forwards"]
    )
    mean_width = metrics["beams"] / metrics["steps"]
    assert (
        f"steps: {metrics['steps']}, per forward pass: {per_forward:.2f}, drafted: {metrics['drafted']}, "
        f"accepted: {metrics['accepted']}, mean width: {mean_width:.2f}, KV blocks shared: "
    ) in lines[0]
    speculating.generate([PROMPT], beam_params(4, max_tokens=6, speculation="off"))
    speculating.llm.llm_engine.do_log_stats()
    assert "steps: 6, KV blocks shared" in lines[1], "who does not speculate need not read of it"
    assert metrics_of(speculating)["target_forwards"] == metrics["target_forwards"] + 6


@pytest.mark.parametrize(
    ("aggregates", "beginnings"),
    [
        (
            False,
            [
                "Engine 000: Beam groups running: 1 in 4 rows, finished: 0, steps: 3, KV blocks shared: 0",
                "Engine 001: Beam groups running: 2 in 9 rows, finished: 3 (stop: 1, error: 2), steps: 5, preemptions",
            ],
        ),
        (
            True,
            [
                "3 Engines Aggregated: Beam groups running: 3 in 13 rows, finished: 3 (stop: 1, error: 2), steps: 8, "
                "preemptions: 2"
            ],
        ),
    ],
)
def test_data_parallel_engines_have_a_line_each_or_one_together(
    engine: Engine, lines: list[str], aggregates: bool, beginnings: list[str]
) -> None:
    config = engine.llm.llm_engine.vllm_config
    manager = StatLoggerManager(config, [0, 1, 2], aggregate_engine_logging=aggregates)
    finished = {"stop": 1, "length": 0, "abort": 0, "error": 1}
    failed = {"stop": 0, "length": 0, "abort": 0, "error": 1}
    for index, stats in [
        (0, GroupStats(groups_running=1, rows_running=4, steps=3)),
        (1, GroupStats(groups_running=5, rows_running=12, steps=1, preemptions=2, groups_finished=finished)),
        (1, GroupStats(groups_running=-3, rows_running=-3, steps=4, groups_finished=failed)),
    ]:
        carrier = SchedulerStats()
        attach_group_stats(carrier, stats)
        manager.record(carrier, None, engine_idx=index)
    manager.log()
    assert [line.startswith(start) for line, start in zip(lines, beginnings, strict=True)] == [True] * len(beginnings)
    by_engine = {m.labels["engine"]: m.value for m in engine.llm.get_metrics() if m.name == PREFIX + "steps"}
    assert by_engine == {"0": 3, "1": 5, "2": 0}


def test_several_api_servers_write_no_lines_as_each_sees_a_part(engine: Engine, lines: list[str]) -> None:
    manager = StatLoggerManager(engine.llm.llm_engine.vllm_config, [0], client_count=2)
    carrier = SchedulerStats()
    attach_group_stats(carrier, GroupStats(groups_running=1, rows_running=4, steps=3))
    manager.record(carrier, None)
    manager.log()
    assert lines == []
    assert metrics_of(engine)["steps"] == 3


def test_the_document_names_every_metric_with_its_labels_and_shows_a_true_line(
    engine: Engine, lines: list[str]
) -> None:
    document = (ROOT / "docs/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(vllm:trie_beam_\w+)` \| (\w+)", document, re.MULTILINE))
    running, peaks, counted = (METRICS[kind] for kind in ("running", "peak", "counter"))
    gauges, counters = ({PREFIX + name for name in names} for names in ([*running, *peaks], [*counted, FINISHED]))
    expected = dict.fromkeys(gauges, "gauge") | {f"{name}_total": "counter" for name in counters}
    assert documented == expected
    (example,) = re.findall(r"^.*(Engine 000: Beam groups.*)$", document, re.MULTILINE)
    engine.generate([PROMPT], beam_params(3, max_tokens=4, ignore_eos=True))
    engine.llm.llm_engine.do_log_stats()
    words = re.compile(r"[^\d, ()]+")
    assert [word for word in words.findall(lines[0]) if word != "preemptions:"] == [
        word for word in words.findall(example) if word not in ("preemptions:", "stop:")
    ]
