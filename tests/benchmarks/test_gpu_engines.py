"""Engines on a GPU, rehearsed without one: which cases run, in which order, and what they ask for and tell."""

from __future__ import annotations

import argparse
import json
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

from benchmarks.gpu_engines import __main__ as gpu_engines
from benchmarks.gpu_engines import by_sglang, offline, options, pair, served
from tests.support.engine import Engines
from tests.support.pairs import TRAINED, speculating

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ARGS = argparse.Namespace(
    rehearse=True, repeats=1, no_compile=False, kv_cache_gib=1, shared_prefix_attention="auto", minutes=1
)
PEERS = slice(-2, None)  # the last columns


def names(groups: Sequence[gpu_engines.Group]) -> list[str]:
    return [case.name for group in groups for case in group.cases]


EVERY = gpu_engines.groups(rehearse=False)


def test_each_case_alone_can_be_asked_for() -> None:
    assert len(set(names(EVERY))) == len(names(EVERY))
    for name in names(EVERY):
        found = names(gpu_engines.chosen(EVERY, [name]))
        assert found[0] == name
        assert all(other.startswith(f"{name}:") for other in found[1:])
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
    assert run_all(monkeypatch, kinds, tmp_path, "--minutes", "2") == 0
    assert table(tmp_path, "first") == ([["first:0", "first"], ["first:1", "first"]], "a note")
    assert clock.now == 120.0 + 10.0
    rows, note = table(tmp_path, "second")
    assert rows == [["second:0", "second"]]
    assert note == "a note; not run, for want of time: second:1"
    assert table(tmp_path, "third") == ([], "a note; not run, for want of time: third:0, third:1")


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


def test_computed_prompts_are_always_others_and_cached_ones_the_same() -> None:
    def asked(name: str, kind: str) -> list[tuple[int, ...]]:
        calls = islice(options.prompts_of(name, kind, 9, 2), 3)
        return [tuple(prompt["prompt_token_ids"]) for prompt in chain.from_iterable(calls)]

    computed, cached = asked("a", options.COMPUTED), asked("a", options.CACHED)
    assert len({*computed, *cached, *asked("b", options.COMPUTED)}) == 6 + 2 + 6
    assert cached == cached[:2] * 3


class StandIn:
    """An `LLM` that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, Any]] = []

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> list[Any]:
        self.asked.append((prompts, params))
        return []


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
    assert [isinstance(row[5], float) for row in found] == [False, False, True, True]
    assert {params.n for _, params in llm.asked} == {1, 256}
    assert {(len(prompts), len(prompts[0]["prompt_token_ids"])) for prompts, _ in llm.asked} == {(8, 5000)}


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

    speed, seconds = served.requests_per_second(ask, range(8), 2)
    assert most == 2
    assert speed > 0 < seconds


def test_a_server_is_asked_for_tokens_in_words_that_it_understands() -> None:
    bodies = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == served.ENDPOINT
        bodies.append(GenerateRequest.model_validate_json(request.content))
        return httpx.Response(200)

    (case,) = [case for case in served.CASES if case.name == "http:50x32"]
    client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://server")
    found = [*served.rows(client, case, ARGS)]
    assert all(len(row) == len(served.COLUMNS) for row in found)
    assert [row[1:3] for row in found] == [(32, "computed"), (32, "cached")]
    assert "FlashRec 28.1, SGLang 18.2" in found[0][-2]
    assert len(bodies) == 4 * 32
    params = bodies[0].sampling_params
    assert (len(bodies[0].token_ids), params.max_tokens, params.n) == (2465, 4, 1)
    along = {"catalog": "items_4", "catalog_renormalize": True}
    assert params.extra_args == {"beam_width": 50, "compact": True} | along


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
    llm = speculating(engines, TRAINED, 3).llm
    for case in pair.SMALL:
        ((label, plain, drafted, times, per_forward),) = pair.rows(llm, case, ARGS)
        assert label == f"{case.way}, a target 2x deeper"
        assert times == pytest.approx(plain / drafted)
        assert per_forward > 1


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
