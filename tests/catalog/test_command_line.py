"""The commands do what docs/catalogs.md says, in processes of their own as a user runs them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.engine import ROOT, TRAINED_TARGET
from vllm_trie.catalog import Catalog
from vllm_trie.catalog.__main__ import INTERRUPTED, PROGRAM, main

DOCUMENT = (ROOT / "docs/catalogs.md").read_text()


def run(folder: Path, command: str) -> str:
    """What a command prints that works."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[str, int]:
    """What a command that fails says at last, and its status."""
    monkeypatch.setattr(sys, "argv", [PROGRAM, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    if isinstance(ended.value.code, str):
        return ended.value.code.removeprefix(f"{PROGRAM}: "), 1
    return capsys.readouterr().err.strip().splitlines()[-1], ended.value.code or 0


@pytest.mark.nightly
def test_the_documents_commands_work_in_their_order(tmp_path: Path) -> None:
    (example,) = re.findall(r'^    \{"tokens": .*?\n\n', DOCUMENT, re.DOTALL | re.MULTILINE)
    (tmp_path / "items.jsonl").write_text(re.sub("^    ", "", example.rstrip("\n"), flags=re.MULTILINE))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    commands = re.findall(rf"^{PROGRAM} .*$", DOCUMENT, re.MULTILINE)
    build, inspect, list_items, check = commands
    assert run(tmp_path, build) == "items.catalog: 4 items of 4 to 18 tokens, 0 duplicates left out\n"
    assert re.search(r"^items +4, of 4 to 18 tokens$", run(tmp_path, inspect), re.MULTILINE)
    listed = [json.loads(line) for line in run(tmp_path, list_items).splitlines()]
    assert [item["id"] for item in listed] == [2, 70012, 3]
    assert run(tmp_path, check) == "items.catalog is valid: 4 items\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmarks", "items.catalog", "items.jsonl"]


def test_what_is_listed_builds_the_same_catalog(tmp_path: Path) -> None:
    Catalog.from_sequences([[7, 8], [5], [7, 8, 9]], ids=[3, 4, 5]).save(tmp_path / "a.catalog")
    listed = run(tmp_path, f"{PROGRAM} inspect a.catalog --items 10")
    (tmp_path / "b.jsonl").write_text(listed)
    run(tmp_path, f"{PROGRAM} build b.jsonl b.catalog")
    assert (tmp_path / "b.catalog").read_bytes() == (tmp_path / "a.catalog").read_bytes()


def test_a_build_warns_of_items_without_an_id_among_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("items.jsonl").write_text('{"tokens": [1, 2], "id": 70}\n[3]\n')
    monkeypatch.setattr(sys, "argv", [PROGRAM, "build", "items.jsonl", "items.catalog"])
    main()
    printed = capsys.readouterr()
    assert printed.out == "items.catalog: 2 items of 1 to 2 tokens, 0 duplicates left out\n"
    assert printed.err.count("1 of 2 items in items.jsonl have no") == 1


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = "import sys, vllm_trie.catalog.__main__; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    assert run(ROOT, f"python -c {shlex.quote(code)}").strip() == "set()"


def test_an_interrupted_build_leaves_what_was_there(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "items.jsonl")  # it never ends
    Catalog.from_sequences([[1]]).save(tmp_path / "items.catalog")
    before = (tmp_path / "items.catalog").read_bytes()
    build = subprocess.Popen(
        [sys.executable, "-m", "vllm_trie.catalog", "build", "items.jsonl", "items.catalog"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which background jobs ignore
    )
    file = os.open(tmp_path / "items.jsonl", os.O_WRONLY)  # waits for a reader
    build.send_signal(signal.SIGINT)
    with suppress(BrokenPipeError):
        while True:  # Python looks for signals between two reads
            os.write(file, b"[1, 2]\n" * 10_000)
    os.close(file)
    _, said = build.communicate()
    assert build.returncode == INTERRUPTED
    assert said.endswith(f"{PROGRAM}: interrupted; no file is half written\n")
    assert (tmp_path / "items.catalog").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_mistakes_end_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("items.jsonl").write_text("[1, 2]\n[3]\n")
    for arguments, message, status in [
        ((), "the following arguments are required: COMMAND", 2),
        (("build", "items.jsonl"), "the following arguments are required: OUTPUT", 2),
        (("build", "items.jsonl", "out", "--vocab-size", "0"), "argument --vocab-size: '0' is not a number above 0", 2),
        (("build", "items.jsonl", "out", "--vocab-size", "3"), "line 2 has token 3; tokens are 0 to 2", 1),
        (("build", "items.jsonl", "no/out"), "no/out cannot be written: there is no folder no", 1),
        (("build", "none.jsonl", "out"), "No such file or directory: 'none.jsonl'", 1),
        (("inspect", "items.jsonl"), f"items.jsonl is not a catalog; build one with {PROGRAM} build", 1),
        (("check", "none"), "catalog none cannot be read: No such file or directory", 1),
    ]:
        said, found = refusal(monkeypatch, capsys, *arguments)
        assert message in said
        assert found == status
        assert not Path("out").exists()


def test_check_fails_for_another_vocabulary_and_for_what_is_no_trie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "items.catalog"
    Catalog.from_sequences([[1, 5000]], tokenizer="0123456789abcdef").save(path)
    for options, reason in (
        (("--vocab-size", 5000), "it has token 5000, and the model has 5000 tokens"),
        (("--tokenizer", TRAINED_TARGET), "it has token 5000, and the model has 2048 tokens"),
        (("--tokenizer", TRAINED_TARGET, "--vocab-size", 6000), "its tokenizer has digest 0123456789abcdef, and"),
    ):
        said, status = refusal(monkeypatch, capsys, "check", path, *options)
        assert f"catalog {path} was built for another vocabulary: {reason}" in said
        assert status == 1
    path.write_bytes(path.read_bytes()[:-1])
    said, status = refusal(monkeypatch, capsys, "check", path)
    assert (said.startswith(f"{path} is cut short or damaged: "), status) == (True, 1)
