"""What /metrics shows is what the requests made the engine do."""

from __future__ import annotations

import re

import pytest

from benchmarks.server import Server
from tests.support.engine import ROOT
from tests.support.served import beams, complete, finished_groups

pytestmark = pytest.mark.slow


def test_prompt_and_generated_tokens_are_counted_once(server: Server) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [server.gauge(name) for name in names]
    usage = complete(server, "def count(", n=3, **beams(5)).usage
    server.wait_until_idle()
    after = [server.gauge(name) for name in names]
    assert [a - b for a, b in zip(after, before, strict=True)] == [usage.prompt_tokens, usage.completion_tokens]


def test_metrics_move_by_what_a_request_must_do(server: Server) -> None:
    names = ["steps", "kv_blocks_shared", "kv_blocks_copied", "kv_blocks_reclaimed", "preemptions"]

    def counters() -> dict[str, float]:
        return {name: server.gauge(f"vllm:trie_beam_{name}_total") for name in names}

    server.wait_until_idle()
    before, ended_before = counters(), finished_groups(server)
    complete(server, [5] * 10, 12, n=3, ignore_eos=True, **beams(5))  # within one block
    server.wait_until_idle()
    moved = {name: after - before[name] for name, after in counters().items()}
    assert moved.pop("kv_blocks_copied") >= 4, "fanning out copies the prompt's partly filled block"
    assert moved == {"steps": 12, "kv_blocks_shared": 0, "kv_blocks_reclaimed": 0, "preemptions": 0}
    complete(server, [5] * 60, 40, n=3, ignore_eos=True, **beams(5))
    server.wait_until_idle()
    assert counters()["kv_blocks_shared"] > before["kv_blocks_shared"]
    ended = {reason: after - ended_before[reason] for reason, after in finished_groups(server).items()}
    assert ended == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert server.gauge("vllm:trie_beam_kv_blocks_peak") >= 1 + 5
    assert server.gauge("vllm:trie_beam_groups_running") == server.gauge("vllm:trie_beam_rows_running") == 0


def test_metrics_are_those_of_the_documents_and_none_without_the_plugin(server: Server, stock: Server) -> None:
    documented = re.findall(
        r"^\| `(vllm:trie_beam_\w+)` \| (\w+)", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
    )
    shown = re.findall(r"^# TYPE (vllm:trie_beam_\w+) (\w+)", server.metrics(), re.MULTILINE)
    created = [(name, kind) for name, kind in shown if name.endswith("_created")]  # when, beside each counter
    assert sorted(set(shown) - set(created)) == sorted(documented)
    assert "trie" not in stock.metrics()


@pytest.mark.parametrize("file", ["grafana.json", "alerts.yml"])
def test_dashboard_and_alerts_ask_for_metrics_that_are_shown(server: Server, file: str) -> None:
    asked = set(re.findall(r"\bvllm:\w+", (ROOT / "deploy" / file).read_text()))
    shown = set(re.findall(r"^(vllm:\w+)", server.metrics(), re.MULTILINE))
    assert asked
    assert asked <= shown
