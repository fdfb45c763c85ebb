"""Engines on a GPU, rehearsed without one: which cases run, in which order, and what they ask for and tell."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from benchmarks import server
from benchmarks.gpu_engines import __main__ as gpu_engines
from benchmarks.gpu_engines import by_sglang, offline, options, pair, served
from benchmarks.watch import total_counts
from tests.support.engine import ROOT, Engines
from tests.support.pairs import TRAINED, speculating

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ARGS = argparse.Namespace(
    rehearse=True, repeats=1, no_compile=False, kv_cache_gib=1, shared_prefix_attention="auto", end=math.inf
)
PEERS = slice(-2, None)  # the last columns


def names(groups: Sequence[gpu_engines.Group]) -> list[str]:
    return [case.name for group in groups for case in group.cases]


EVERY = gpu_engines.groups(rehearse=False)


def test_it_is_imported_without_what_its_cases_or_other_tables_need() -> None:
    """Nor with vLLM, whose log is to be quiet, and whose engines are to be spawned: a forked one would wait for the
    threads with which models are made."""
    absent = "scipy", "vllm", "openai", "httpx"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import benchmarks.gpu_engines.__main__, os; print(os.environ['VLLM_WORKER_MULTIPROC_METHOD'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_WORKER_MULTIPROC_METHOD"}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.stdout == "spawn\n", result.stderr


def test_each_case_alone_can_be_asked_for() -> None:
    assert len(set(names(EVERY))) == len(names(EVERY))
    for name in names(EVERY):
        found = names(gpu_engines.chosen(EVERY, [name]))
        assert name in found
        assert all(other.startswith(f"{name}:") for other in found if other != name)
    assert names(gpu_engines.chosen(EVERY, ["0.6B:5000x1:3", "http:50x1"])) == ["0.6B:5000x1:3@1000", "http:50x1"]
    assert names(gpu_engines.chosen(EVERY, [])) == names(EVERY)


def test_what_no_case_is_called_is_refused_with_all_names() -> None:
    with pytest.raises(SystemExit, match=r"no case begins with 'htp'; known: 1\.7B:256x1:3@1000, .*pair:sampled"):
        gpu_engines.chosen(EVERY, ["pair", "htp"])


class Clock:
    """Time that passes as it is told."""

    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gpu_engines, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def kind(name: str, clock: Clock, start: Callable[[], float], run: Callable[[str], float]) -> ModuleType:
    """A kind of cases whose engine takes so many seconds to start, and whose cases take so many."""
    module = ModuleType(f"stand_in.{name}")

    @contextmanager
    def running(cases: Sequence[Any], _: Any) -> Iterator[str]:
        clock.now += start()
        yield name

    def rows(engine: str, case: Any, _: Any) -> Iterator[tuple[Any, ...]]:
        clock.now += run(case.name)
        yield case.name, engine

    vars(module).update(TITLE=name, COLUMNS=("case", "engine"), NOTE="a note", running=running, rows=rows)
    return module


def run_all(monkeypatch: pytest.MonkeyPatch, kinds: Sequence[Any], out: Path, *more: str) -> int:
    """The command, with two cases of each kind."""
    groups = [
        gpu_engines.Group(one, [SimpleNamespace(name=f"{one.TITLE}:{number}") for number in range(2)]) for one in kinds
    ]
    monkeypatch.setattr(gpu_engines, "groups", lambda rehearse: groups)
    return gpu_engines.main(["--out", str(out), *more])


def table(out: Path, name: str) -> tuple[list[list[Any]], str]:
    content = json.loads((out / f"gpu_{name}.json").read_text())
    return content["cells"][0]["rows"], content["note"]


def test_what_does_not_fit_into_the_time_is_listed_and_no_engine_starts_in_vain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    kinds = [kind(name, clock, lambda: 50.0, lambda _: 10.0) for name in ("first", "second", "third")]
    assert run_all(monkeypatch, kinds, tmp_path, "--minutes", "2.1") == 0
    assert table(tmp_path, "first") == ([["first:0", "first"], ["first:1", "first"]], "a note")
    assert clock.now == 50.0 + 2 * 10.0 + 50.0 + 10.0
    assert table(tmp_path, "second") == ([["second:0", "second"]], "a note; not run, for want of time: second:1")
    assert table(tmp_path, "third") == ([], "a note; not run, for want of time: third:0, third:1")


def test_an_engine_that_does_not_end_well_fails_no_case(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    only = kind("only", clock, lambda: 0.0, lambda _: 0.0)

    @contextmanager
    def running(*_: Any) -> Iterator[str]:
        yield "engine"
        raise RuntimeError("busy")

    vars(only)["running"] = running
    assert run_all(monkeypatch, [only], tmp_path) == 0
    assert "the engine of only:0, only:1 did not end well: RuntimeError: busy" in capsys.readouterr().out
    assert len(table(tmp_path, "only")[0]) == 2


def test_a_case_or_an_engine_that_fails_ends_no_other_and_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture
) -> None:
    def fail(_: Any = None) -> float:
        raise RuntimeError("no such catalog")

    kinds = [
        kind("cases", clock, lambda: 0.0, lambda name: fail() if name == "cases:0" else 0.0),
        kind("starts", clock, fail, lambda _: 0.0),
        kind("last", clock, lambda: 0.0, lambda _: 0.0),
    ]
    assert run_all(monkeypatch, kinds, tmp_path, "--shared-prefix-attention", "off") == 1
    out = capsys.readouterr().out
    assert "FAILED cases:0: RuntimeError: no such catalog" in out
    assert "FAILED starts:0, starts:1: RuntimeError" in out
    assert table(tmp_path, "cases_rows")[0] == [["cases:1", "cases"]]
    assert len(table(tmp_path, "last_rows")[0]) == 2
    for words in (["last"], ["last:1", "cases:1"]):
        run_all(monkeypatch, kinds, tmp_path, "--only", *words)
    assert len(table(tmp_path, "last_last")[0]) == 2  # other cases, another file
    assert len(table(tmp_path, "last_last-1_cases-1")[0]) == 1


def test_computed_prompts_are_always_others_and_cached_ones_the_same() -> None:
    def asked(name: str, kind: str) -> list[tuple[int, ...]]:
        calls = islice(options.prompts_of(name, kind, 9, 2), 3)
        return [tuple(prompt["prompt_token_ids"]) for prompt in chain.from_iterable(calls)]

    computed, cached = asked("a", options.COMPUTED), asked("a", options.CACHED)
    assert len({*computed, *cached, *asked("b", options.COMPUTED)}) == 6 + 2 + 6
    assert cached == cached[:2] * 3


FAULTS = {
    "fewer beams": "2 hypotheses|255 hypotheses",
    "without the plugin": "0 hypotheses",
    "others in the cache": "tokens of a prompt that is to be (computed|cached) were cached",
}


class Answers:
    """Those of a plugin, which has seen some prompts before.

    Args:
        fault: Of `FAULTS`, or none.
    """

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        self._seen = set[tuple[int, ...]]()

    def arrays(self, width: int, num_tokens: int) -> dict[str, Any] | None:
        """In `kv_transfer_params`."""
        found = [[beam] * num_tokens for beam in range(width - (self._fault == "fewer beams"))]
        return None if self._fault == "without the plugin" else {"trie_beam": {"token_ids": found}}

    def num_cached(self, prompt: Sequence[int]) -> int:
        is_new = tuple(prompt) not in self._seen
        self._seen.add(tuple(prompt))
        return 0 if is_new != (self._fault == "others in the cache") else len(prompt) - 1


class StandIn:
    """An `LLM` that notes what it is asked for."""

    def __init__(self, fault: str = "") -> None:
        self.asked: list[tuple[Any, Any]] = []
        self._answers = Answers(fault)

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        width = (params.extra_args or {}).get("beam_width", 0)
        one = {"finish_reason": "length", "cumulative_logprob": -1.0 if width else None}
        outputs = [SimpleNamespace(token_ids=[beam] * params.max_tokens, **one) for beam in range(params.n)]
        return [
            SimpleNamespace(
                outputs=outputs,
                kv_transfer_params=self._answers.arrays(width, params.max_tokens),
                num_cached_tokens=self._answers.num_cached(prompt["prompt_token_ids"]),
            )
            for prompt in prompts
        ]


def test_a_case_has_a_row_for_each_kind_of_prompt_and_answer_and_peers_where_theirs_is_alike() -> None:
    llm, (case,) = StandIn(), [case for case in offline.RETRIEVAL if case.name == "1.7B:256x8:3@5000:catalog"]
    found = [*offline.rows(llm, case, ARGS)]
    assert all(len(row) == len(offline.COLUMNS) for row in found)
    assert [row[1:3] for row in found] == [
        ("computed", "arrays"),
        ("computed", "n outputs"),
        ("cached", "arrays"),
        ("cached", "n outputs"),
    ]
    assert [row[PEERS] for row in found] == 2 * [tuple(case.published)] + 2 * [("-", "-")]
    assert "sid-gr 308, SGLang 685" in found[0]
    assert [isinstance(row[6], float) for row in found] == [False, False, True, True]
    assert {params.n for _, params in llm.asked} == {1, 256}
    assert {(len(prompts), len(prompts[0]["prompt_token_ids"])) for prompts, _ in llm.asked} == {(8, 5000)}


def test_thousands_of_samples_are_taken_once() -> None:
    llm, case, args = StandIn(), offline.WIDE[0], argparse.Namespace(**vars(ARGS) | {"repeats": 3})
    found = [*offline.rows(llm, case, args)]
    assert [row[4] for row in found] == [3, 3, 3, 3]
    assert [params.n for _, params in llm.asked if params.extra_args is None] == [1, 5000]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_case_that_times_no_such_search_has_no_row(fault: str) -> None:
    case = offline.RETRIEVAL[0]
    with pytest.raises(RuntimeError, match=FAULTS[fault]):
        next(offline.rows(StandIn(fault), case, ARGS))


def test_samples_are_no_hypotheses() -> None:
    case = offline.Case("tiny", 3, 4, 70)
    sampled = StandIn().generate(
        [{"prompt_token_ids": [1]}], offline.params_of(case, options.CACHED)["sampling"], False
    )
    answers = {"arrays": [], "n outputs": sampled}
    with pytest.raises(RuntimeError, match="it was sampled, and not searched"):
        offline.check_replies(answers, case, options.COMPUTED)


def test_a_server_is_asked_by_so_many_clients_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, at_a_time, most = threading.Lock(), 0, 0
    both_ask = threading.Barrier(2, timeout=10)

    def ask(_: int) -> None:
        nonlocal at_a_time, most
        with lock:
            at_a_time += 1
            most = max(most, at_a_time)
        both_ask.wait()
        with lock:
            at_a_time -= 1

    run = served.asked_by_clients(ask, range(8), 2)
    assert most == 2
    assert run.speed > 0 < run.seconds
    assert len(run.replies) == 8


def client_of(answers: Answers, asked: list[GenerateRequest], reason: str = "length") -> httpx.Client:
    """A client of a server that answers so."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == served.ENDPOINT
        asked.append(GenerateRequest.model_validate_json(request.content))
        params = asked[-1].sampling_params
        assert params.extra_args is not None
        reply = {
            "choices": [{"finish_reason": reason, "stop_reason": "no KV blocks"}],
            "kv_transfer_params": answers.arrays(params.extra_args["beam_width"], params.max_tokens),
            "usage": {"prompt_tokens_details": {"cached_tokens": answers.num_cached(asked[-1].token_ids)}},
        }
        return httpx.Response(200, json=reply)

    return httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")


def test_a_server_is_asked_for_tokens_in_words_that_it_understands() -> None:
    bodies: list[GenerateRequest] = []
    (case,) = [case for case in served.CASES if case.name == "http:50x32"]
    found = [*served.rows(client_of(Answers(), bodies), case, ARGS)]
    assert all(len(row) == len(served.COLUMNS) for row in found)
    assert [row[1:3] for row in found] == [(32, "computed"), (32, "cached")]
    assert [row[5] for row in found] == [served.RUNS, served.RUNS]
    assert "FlashRec 28.1, SGLang 18.2" in found[0][-2]
    assert len(bodies) == 2 * 3 * 32  # of them a third warms up
    params = bodies[0].sampling_params
    assert (len(bodies[0].token_ids), params.max_tokens, params.n) == (2465, 4, 1)
    along = {"catalog": "items_4", "catalog_renormalize": True}
    assert params.extra_args == {"beam_width": 50, "compact": True} | along
    (case,) = [case for case in served.CASES if case.name == "http:256x4:open"]
    next(served.rows(client_of(Answers(), bodies), case, ARGS))
    assert bodies[-1].sampling_params.extra_args == {"beam_width": 256, "compact": True}
    assert bodies[-1].sampling_params.ignore_eos


@pytest.mark.parametrize(
    ("fault", "reason", "message"),
    [*((fault, "length", message) for fault, message in FAULTS.items()), ("", "error", "no KV blocks")],
)
def test_a_server_that_ran_no_such_search_has_no_row(fault: str, reason: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        next(served.rows(client_of(Answers(fault), [], reason), served.SMALL[0], ARGS))


def test_who_ends_the_command_ends_the_server_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = subprocess.Popen(["sleep", "100"], start_new_session=True)
    monkeypatch.setattr(server.Server, "wait_until_ready", lambda *_: None)
    with pytest.raises(SystemExit), server.serving(tmp_path / "log", start=lambda *_: started):
        sys.exit(128 + signal.SIGTERM)
    assert started.returncode == -signal.SIGKILL


def test_a_server_has_the_options_of_an_engine_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(options, "ITEMS", 10)
    args = argparse.Namespace(**vars(ARGS) | {"rehearse": False, "no_compile": True})
    wanted = options.engine_options("1.7B", 512, tmp_path, args)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--enforce-eager", *options.as_flags(wanted)])
    compilation = parsed.compilation_config
    assert {name: getattr(parsed, name) for name in wanted} == wanted | {"compilation_config": compilation}
    assert (compilation.mode, compilation.cudagraph_mode.name) == (0, "FULL_DECODE_ONLY")
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 28


def test_drafts_are_held_against_the_same_search_without(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, found = speculating(engines, TRAINED, 3).llm, dict[str, list[Any]]()

    def alternate(runs: dict[str, Callable[[], Any]], *_: Any) -> dict[str, list[float]]:
        found.update({name: run() for name, run in runs.items()})
        return {"without": [8.0, 4.0, 6.0], "with": [2.0, 3.0, 1.0]}

    monkeypatch.setattr(pair, "alternate", alternate)
    for case in pair.SMALL:
        ((_, plain, drafted, num_runs, times, per_forward),) = pair.rows(llm, case, ARGS)
        assert (plain, drafted, num_runs, times) == (3000.0, 1000.0, 3, 3.0)  # of each of two prompts
        without, with_drafts = (
            [(output.prompt_token_ids, output.outputs[0].token_ids) for output in found[name]] for name in found
        )
        assert [prompt for prompt, _ in without] == [prompt for prompt, _ in with_drafts]
        assert case.way != "exact" or without == with_drafts
        assert per_forward == total_counts(found["with"]).steps_per_forward > 1


@pytest.mark.parametrize("no_compile", [False, True])
def test_drafts_have_graphs_unless_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, no_compile: bool) -> None:
    wanted: dict[str, Any] = {}
    monkeypatch.setattr("vllm.LLM", lambda _, **options: wanted.update(options))
    monkeypatch.setattr(pair, "stop", lambda _: None)
    monkeypatch.setattr(pair.models, "make", lambda *_: "a folder")
    args = argparse.Namespace(**vars(ARGS) | {"rehearse": False, "no_compile": no_compile})
    with pair.running(pair.CASES, args):
        assert wanted["compilation_config"] == (options.GRAPHS_ALONE if no_compile else None)
        assert (wanted["enforce_eager"], wanted["gpu_memory_utilization"]) == (False, options.MEMORY_SHARE)


def test_sglang_is_asked_for_our_open_cases_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By a stand-in for it, which times nothing."""
    (tmp_path / "sglang.py").write_text(
        "class Engine:\n"
        "    def __init__(self, **options): self.options = options\n"
        "    def generate(self, input_ids, sampling_params):\n"
        "        assert len(input_ids) == 1 and len(input_ids[0]) == 1000 and sampling_params['beam_width'] == 256\n"
        "        assert self.options['max_running_requests'] == 257\n"
        "    def shutdown(self): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(by_sglang, "find_spec", lambda _: True)
    (first, *_), _ = by_sglang.cases_by_model()
    assert first.name == "sglang:1.7B:256x1:3@1000"
    with by_sglang.running([first], ARGS) as folder:
        found = [*by_sglang.rows(folder, first, ARGS)]
    assert [row[:2] for row in found] == [(first.label, "computed"), (first.label, "cached")]


def test_all_of_it_runs_on_any_machine(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    command = [sys.executable, "-m", "benchmarks.gpu_engines", "--rehearse", "--repeats", "1", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {path.stem: len(json.loads(path.read_text())["cells"][0]["rows"]) for path in tmp_path.glob("*.json")}
    wanted = {"offline": 4 * len(offline.SMALL), "served": 2 * len(served.SMALL), "pair": len(pair.SMALL)}
    assert rows == {f"gpu_{name}_tiny": number for name, number in wanted.items()}
    assert len([line for line in result.stdout.splitlines() if " | " in line]) == sum(wanted.values())
    assert (tmp_path / "server.log").stat().st_size > 0
