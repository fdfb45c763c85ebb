"""README.md and docs/ are true: examples run as they stand, commands parse, links lead somewhere, names exist.

Examples of a client run in behaviour/serving, that of README.md in behaviour/real_model/test_served.py. The command of
a batch job is read in batch/test_batch.py.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_module
from typing import Any

import pytest

from tests.support.documents import (
    COMMANDS,
    DOCUMENTS,
    OFFLINE,
    TRANSLATIONS,
    Example,
    is_as_shown,
    run_here,
)
from tests.support.engine import ROOT, TRAINED_TARGET

pytestmark = pytest.mark.slow

PACKAGE = ROOT / "vllm_trie"
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
NAME = re.compile(r"`([\w/]+\.py):\s+([\w.]+)`")
CODE = re.compile(r"^```.*?^```$|^    [^\n]*$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|toml)|[\w-]+/)`")


@pytest.fixture
def real_folders(real_model: Path, real_draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that README.md tells its readers to set."""
    monkeypatch.setenv("MODEL", str(real_model))
    monkeypatch.setenv("DRAFT", str(real_draft))


@pytest.mark.parametrize("example", OFFLINE, ids=str)
@pytest.mark.usefixtures("with_shared_engines")
def test_an_offline_example_runs(
    example: Example, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    if 'os.environ["MODEL"]' in example.code:
        request.getfixturevalue("real_folders")
    if "get_metrics" in example.code:
        request.getfixturevalue("engines").close()  # what is counted is of this example alone
    run_here(example)
    printed = capsys.readouterr().out
    assert is_as_shown(example, printed), printed


@pytest.mark.nightly
def test_the_first_example_runs_compiled(tmp_path: Path) -> None:
    """On the toy, whose few layers compile soon, and in one process."""
    script = tmp_path / "example.py"
    script.write_text(next(example.code for example in OFFLINE if example.document == "README.md"))
    environment = os.environ | {"TORCHDYNAMO_DISABLE": "0", "MODEL": str(TRAINED_TARGET)}
    result = subprocess.run([sys.executable, script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(re.findall(r"^ *-\d+\.\d+ ", result.stdout, re.MULTILINE)) == 2


def test_all_blocks_of_code_are_of_kinds_that_are_run() -> None:
    languages = {language for text in DOCUMENTS.values() for language in re.findall(r"^```(\w+)$", text, re.MULTILINE)}
    assert languages == {"python", "bash"}
    assert {command[0] for _, command in COMMANDS} == {"vllm", "python"}


class ParsedError(Exception):
    """A command has read its arguments, and goes no further."""


def parsed(module: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The arguments of `python -m`, as the module reads them."""
    read, namespaces = argparse.ArgumentParser.parse_args, list[argparse.Namespace]()

    def read_alone(*args: Any) -> None:
        namespaces.append(read(*args))
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_alone)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    with pytest.raises(ParsedError):
        run_module(module, run_name="__main__", alter_sys=True)
    return namespaces[0]


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")
@pytest.mark.parametrize(("document", "command"), COMMANDS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_is_understood(document: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if command[:2] == ["vllm", "serve"]:
        from vllm.entrypoints.cli.serve import ServeSubcommand
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        load_general_plugins()  # whose flag the parser must know
        parser = FlexibleArgumentParser()
        ServeSubcommand().subparser_init(parser.add_subparsers(required=True))
        args = parser.parse_args(command[1:])
        assert args.model_tag == "$MODEL" or (ROOT / args.model_tag).is_dir()
    else:
        assert command[:2] == ["python", "-m"]
        module = command[2]
        args = parsed(module, command[3:], monkeypatch)
        if module == "benchmarks.gpu_engines":
            from benchmarks.gpu_engines.__main__ import chosen, groups

            assert chosen(groups(rehearse=False), args.only)


@pytest.mark.nightly
def test_the_variables_of_the_readme_hold_folders(real_model: Path, real_draft: Path) -> None:
    (line,) = re.findall(r"^    export (.*)$", DOCUMENTS["README.md"], re.MULTILINE)
    commands = re.findall(r"(\w+)=\$\(python (.+?)\)", line)
    shown = {
        name: subprocess.run([sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True).stdout
        for name, command in commands
    }
    assert shown == {"MODEL": f"{real_model}\n", "DRAFT": f"{real_draft}\n"}


def test_named_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for text in DOCUMENTS.values() for name in re.findall(r"(?:`|^    )make ([\w.-]+)", text, re.MULTILINE)
    }
    assert named <= targets


def anchors(text: str) -> set[str]:
    """Of the headings of a document, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_lead_somewhere(document: str) -> None:
    broken = []
    for file, anchor in LINK.findall(DOCUMENTS[document]):
        target = (ROOT / document).parent / file if file else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            broken.append(f"{file}#{anchor}")
    assert broken == []


def in_package(file: str) -> Path:
    """A file or folder as documents name it: from the package on, or from the repository's root."""
    return PACKAGE / file if (PACKAGE / file).exists() else ROOT / file


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/design.md", "docs/developing.md"])
def test_named_files_and_functions_exist(document: str) -> None:
    text = DOCUMENTS[document]
    files = (in_package(file) for file in FILE.findall(text))
    missing = [str(file) for file in files if not file.exists()]
    for file, name in NAME.findall(text):
        source = in_package(file).read_text() if in_package(file).exists() else ""
        if not all(
            re.search(rf"^ *(?:(?:async )?def|class) {part}\b", source, re.MULTILINE) for part in name.split(".")
        ):
            missing.append(f"{file}: {name}")
    assert missing == []


def untranslated(document: str, name: str) -> dict[str, list[str]]:
    """What a translation leaves as it is; `name` is how it calls its other language."""
    text = DOCUMENTS[document]
    prose = CODE.sub("", text)
    rows = re.findall(r"^\|.*$", prose, re.MULTILINE)
    return {
        "code": CODE.findall(text),
        "headings": re.findall(r"^#+(?= )", prose, re.MULTILINE),
        "links": sorted(link for label, link in re.findall(r"\[([^\]]*)\]\((.*?)\)", prose) if label != name),
        "names": sorted({*re.findall(r"`[^`]+`", prose)}),
        "figures": [" ".join(re.findall(r"\d+(?:\.\d+)?", row)) for row in rows],
    }


@pytest.mark.parametrize(("document", "original"), TRANSLATIONS.items())
def test_a_translation_says_the_same(document: str, original: str) -> None:
    translated, theirs = untranslated(document, "English"), untranslated(original, "中文")
    assert all(theirs.values())
    for part, expected in theirs.items():
        assert translated[part] == expected, part
