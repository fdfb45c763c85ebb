"""The check for GPUs is rehearsed on a CPU, where neither vLLM nor much else is installed, and tells what fails."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

from benchmarks import gpu_attention, gpu_check, gpu_searches, gpu_steps, gpu_tables, report
from tests.support.engine import ROOT
from tests.support.flash_attention import flash_attn_varlen_func
from tests.support.taken_again import TakenAgain
from vllm_trie.worker.attention.prefix_suffix import Calls
from vllm_trie.worker.kernels import step
from vllm_trie.worker.kv import copies

pytestmark = pytest.mark.slow

NUM_STEPS = len(gpu_steps.SMALL_SHAPES)
ABSENT = "vllm", "pydantic", "xformers", "rich", "tqdm", "transformers"
BLOCKED = f"""
import sys
from importlib.abc import MetaPathFinder

class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker())
from benchmarks import gpu_check
"""
ALL_OF_IT = """
from tests.support import language_once
sys.exit(gpu_check.main(["--interpret", "--inputs", "1", "--out", sys.argv[1]]))
"""


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit, match="gpu_check needs a GPU with CUDA"):
        gpu_check.main([])


def test_it_is_imported_without_vllm_and_what_else_a_machine_may_lack() -> None:
    result = subprocess.run([sys.executable, "-c", BLOCKED], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.nightly
def test_all_of_it_runs_without_vllm_and_what_else_a_machine_may_lack(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", BLOCKED + ALL_OF_IT, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert [*result.stdout.strip().splitlines()[-5:]] == [
        "part | passed | failed | left out",
        "kernels | 1 | 0 | 0",
        f"steps | {NUM_STEPS} | 0 | 0",
        "attention | 1 | 0 | 0",
        "trees | 1 | 0 | 0",
    ]


def checked(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str]:
    """The exit status, and what a rehearsal says."""
    code = gpu_check.main(["--interpret", "--inputs", "1", "--out", "/dev/null/none", *arguments])
    return code, capsys.readouterr().out


@pytest.fixture(autouse=True)
def without_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are not written."""
    monkeypatch.setattr(gpu_check, "tell", lambda *_: None)
    monkeypatch.setattr(gpu_steps, "SMALL_SHAPES", [gpu_steps.Shape("plain", 4), gpu_steps.Shape("plain", 3)])


def _other_tokens(*args: Any, take: Any = step.KernelStep.__call__) -> Any:
    taken = take(*args)
    taken.words[:, taken.layout.width] += 1
    return taken


@pytest.mark.parametrize(
    ("module", "name", "wrong", "says"),
    [
        pytest.param(step.KernelStep, "__call__", _other_tokens, "beams", marks=pytest.mark.nightly),
        (copies, "launch_kv_fork", lambda *_: None, "reordered"),
    ],
)
def test_a_step_that_differs_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, module: Any, name: str, wrong: Any, says: str
) -> None:
    monkeypatch.setattr(module, name, wrong)
    code, out = checked(capsys, "--only", "steps", "trees")
    assert code == 1
    assert "steps | 0 | 2 | 0" in out
    assert "trees | 1 | 0 | 0" in out
    assert says in out


@pytest.mark.nightly
def test_a_graph_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(gpu_steps, "captured", lambda run, _: (lambda: None, run().clone()))
    code, out = checked(capsys, "--only", "steps")
    assert code == 1
    assert "a graph of the step does other than the step" in out


def test_beams_that_score_otherwise_fail() -> None:
    steps = [
        gpu_steps.DeviceStep(gpu_steps.Shape("plain", 4), gpu_steps.SMALL, gpu_steps.HOST, seed) for seed in (0, 1)
    ]
    with pytest.raises(AssertionError, match="other scores"):
        gpu_steps.check(*steps)


def test_flash_attention_is_checked_beside_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    calls = Calls(flash_attn_varlen_func, gpu_attention.merge_in_torch)
    monkeypatch.setattr(gpu_attention, "load_flash", lambda *_: calls)
    assert checked(capsys, "--only", "attention", "--fa3", "library")[0] == 0
    wrong = calls._replace(merge=lambda merged, *_: merged.fill_(torch.nan))
    monkeypatch.setattr(gpu_attention, "load_flash", lambda *_: wrong)
    code, out = checked(capsys, "--only", "attention", "--fa3", "library")
    assert code == 1
    assert "once (plain) differs from torch" in out


def test_a_library_that_cannot_be_loaded_fails_and_our_kernels_go_on(capsys: pytest.CaptureFixture) -> None:
    code, out = checked(capsys, "--only", "attention", "--fa3", "nowhere.so")
    assert code == 1
    assert "FlashAttention | 0 | 1 | 0" in out
    assert "attention | 1 | 0 | 0" in out


def test_the_library_is_called_as_vllm_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fwd(*args: Any) -> tuple[Any, ...]:
        asked.append(args)
        return args[:4]

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=fwd), raising=False)
    part, numbers = torch.zeros(2, 2, 2, 2), torch.arange(3)
    options = {
        **{
            "max_seqlen_q": 7,
            "max_seqlen_k": 11,
            "softmax_scale": 0.5,
            "causal": True,
            "softcap": 3.0,
            "fa_version": 3,
        },
        **{"cu_seqlens_q": numbers, "seqused_k": numbers + 1, "block_table": numbers + 2, "s_aux": numbers + 3},
        **{"q_descale": numbers + 4, "k_descale": numbers + 5, "v_descale": numbers + 6, "return_softmax_lse": True},
        "fa_version": 3,
    }
    interface = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    for attend in (runpy.run_path(str(interface))["flash_attn_varlen_func"], gpu_attention.attend_by_library):
        attend(q=part, k=part + 1, v=part + 2, **options)
    theirs, ours = ([value.tolist() if isinstance(value, torch.Tensor) else value for value in args] for args in asked)
    assert ours == theirs


def test_what_does_not_fit_into_the_time_is_left_out(capsys: pytest.CaptureFixture) -> None:
    code, out = checked(capsys, "--only", "steps", "--seconds", "-1")
    assert code == 0
    assert "steps | 0 | 0 | 2" in out


def test_a_device_that_is_lost_ends_it_and_what_failed_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def lose(*_: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # and it answers no more: there is none
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(copies, "launch_kv_fork", lose)
    code, out = checked(capsys, "--only", "steps", "trees")
    assert code == 1
    assert "steps | 0 | 1 | 1" in out
    assert "trees | 0 | 0 | 1" in out
    assert "FAILED steps" in out


class TakenOnce(TakenAgain):
    """A graph that goes on to decide what it decided when it was replayed first."""

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        return cache(super().__call__(run))


@pytest.mark.parametrize(("capture", "failure"), [(TakenAgain, None), (TakenOnce, "other than the step")])
def test_graphs_that_the_engine_keeps_are_checked_by_other_logits(
    capture: type[TakenAgain], failure: str | None
) -> None:
    step, twin = (gpu_steps.DeviceStep(gpu_steps.Shape("plain", 4), gpu_steps.SMALL, gpu_steps.HOST) for _ in range(2))
    step.use_graphs(capture())
    with pytest.raises(AssertionError, match=failure) if failure else nullcontext():
        gpu_steps.check(step, twin)


def test_tests_of_the_night_run_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    findings: Any = SimpleNamespace(rows=lambda name, measure, cases: commands.extend(cases))
    monkeypatch.setattr(gpu_check, "is_there", lambda _: True)
    args: Any = SimpleNamespace(interpret=False, out=tmp_path)
    gpu_check.check_searches(findings, gpu_steps.HOST, args)
    assert commands[1][:6] == ["pytest", "-n", "0", "-q", "-m", ""]  # instead of what pyproject.toml leaves out


def test_a_process_that_takes_too_long_ends() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_check.run(["timeit", "-n", "1", "import time; time.sleep(600)"], 1.0)


def test_all_tests_that_can_run_on_a_gpu_do() -> None:
    of_rooms = chain(*((ROOT / "tests" / room).rglob("test_*.py") for room in ("worker", "speculation")))
    found = {
        str(path.relative_to(ROOT)) for path in of_rooms if "if torch.cuda.is_available() else" in path.read_text()
    }
    assert found == {gpu_check.test_of(name) for name in gpu_check.KERNELS}
    assert all((ROOT / path).exists() for path in gpu_check.PARITY)


def test_its_tables_become_a_page_of_the_report(tmp_path: Path) -> None:
    """As a rehearsal writes them, but for the device."""
    measured, pages = tmp_path / "measured", tmp_path / "pages"
    gpu_tables.tell("gpu_steps", "Whole steps", ("search", "us"), [("plain", 1.5)], "of a GPU", tmp_path / "results")
    report.take_over(tmp_path / "results", measured)
    pages.mkdir()
    report.write_pages(measured, pages)
    page = (pages / "gpu.md").read_text()
    assert "## Whole steps\n\n| search | us |\n|---|---|\n| plain | 1.5 |\n\nOf a GPU. `python -m benchmarks." in page
    assert f"torch {torch.__version__}" in page
    assert "measured before steps" not in page
    (table,) = (measured / "gpu").glob("*.json")
    content = json.loads(table.read_text())
    del content["machine"]["vllm_trie"]  # as earlier versions wrote it
    (measured / "gpu" / "gpu_trees.json").write_text(json.dumps(content))
    for num_new in (1, 0):
        report.write_pages(measured, pages)
        page = (pages / "gpu.md").read_text()
        assert "measured before steps" in page
        assert ("nothing has run on a GPU since" in page) == (num_new == 0)
        table.unlink(missing_ok=True)
    assert "(gpu.md)" in (pages / "README.md").read_text()


@pytest.mark.parametrize(("changed", "code"), [({}, 0), ({"best": 2}, 0), ({"best": 3}, 1), ({"apart": 0.3}, 1)])
def test_whole_searches_must_find_what_transformers_finds_but_for_ties(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changed: dict[str, Any], code: int
) -> None:
    """Of ten prompts eight best hypotheses must be the same, and each sum what transformers gives these tokens."""
    expected = [[((number, 1), -1.0), ((number, 2), -1.1)] for number in range(10)]
    found = [[*of_prompt] for of_prompt in expected]
    for number in range(changed.get("best", 0)):
        found[number].reverse()
    sums = [[score for _, score in of_prompt] for of_prompt in found]
    sums[7][1] += changed.get("apart", 0)
    monkeypatch.setattr(gpu_searches, "prompts", lambda _: [[0]] * 10)
    monkeypatch.setattr(gpu_searches, "by_transformers", lambda *_: expected)
    monkeypatch.setattr(gpu_searches, "sums_of", lambda *_: sums)
    monkeypatch.setattr(gpu_searches, "by_engine", lambda *_: (found, 1.0))
    assert gpu_searches.main(["--rehearse", "--only", "plain steps", "--out", str(tmp_path)]) == code
