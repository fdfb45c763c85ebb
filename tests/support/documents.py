"""The code blocks of README.md and docs/, and the output that stands after them.

`RECORD_EXAMPLES=1` writes what examples print into the documents, in place of comparing it.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from typing import NamedTuple

import pytest

from tests.support.engine import ROOT

DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
}
TRANSLATIONS = {"README.zh.md": "README.md"}  # whose examples are those of the other


RECORDS = os.environ.get("RECORD_EXAMPLES") == "1"
CLOSE = 0.001  # log-probabilities in float32, by one CPU and another
DECIMAL = re.compile(r"(-?\d+\.\d+)")
OUTPUT = r"(?:\n((?:    [^\n]*\n)+))?"  # the indented block that follows a block of code


class Example(NamedTuple):
    """One block of code, and what the document says that it prints; "" if it says nothing."""

    document: str
    number: int
    code: str
    output: str

    def __str__(self) -> str:
        return f"{self.document}:{self.number}"


def examples(language: str) -> list[Example]:
    block = re.compile(rf"```{language}\n(.*?)```\n{OUTPUT}", re.DOTALL)
    return [
        Example(document, number, code, textwrap.dedent(output))
        for document, text in sorted(DOCUMENTS.items())
        if document not in TRANSLATIONS
        for number, (code, output) in enumerate(block.findall(text), start=1)
    ]


TRANSCRIBES = [example for example in examples("python") if "client.audio" in example.code]
CLIENT = [example for example in examples("python") if "openai" in example.code and example not in TRANSCRIBES]
(README_CLIENT,) = [example for example in CLIENT if example.document == "README.md"]
OFFLINE = [example for example in examples("python") if "openai" not in example.code]
OFFLINE.sort(key=lambda example: "speculative_config" in example.code)  # those that share an engine in a row
COMMANDS = [
    (example.document, shlex.split(line, comments=True))
    for example in examples("bash")
    for line in example.code.replace("\\\n", " ").splitlines()
]
(README_SERVES,) = [command for document, command in COMMANDS if document == "README.md"]
EXAMPLE_COMMANDS = [
    command
    for document, text in sorted(DOCUMENTS.items())
    for command in re.findall(r"^    python (examples/.*)$", text, re.MULTILINE)
]


def run_here(example: Example, **replaced: str) -> None:
    """As a script, in this process. `replaced`: text for text."""
    code = example.code
    for old, new in replaced.items():
        code = code.replace(old, new)
    exec(compile(code, str(example), "exec"), {"__name__": "__main__"})


def is_as_shown(example: Example, printed: str) -> bool:
    """Whether an example prints what its document shows, which is something, decimal numbers nearly.

    Raises:
        AssertionError: blank lines, which would end the block in the document, are printed.
    """
    if RECORDS:
        assert "" not in printed.splitlines(), printed
        _record(example, printed)
        pytest.skip("its output is recorded")
    if not example.output:
        return False
    return are_shown_alike(printed, example.output)


def are_shown_alike(printed: str, output: str) -> bool:
    """Whether two texts are equal but for their indentation, decimal numbers nearly."""
    ours, theirs = (DECIMAL.split(textwrap.dedent(text)) for text in (printed, output))
    return ours[::2] == theirs[::2] and all(
        abs(float(one) - float(other)) <= CLOSE for one, other in zip(ours[1::2], theirs[1::2], strict=True)
    )


def _record(example: Example, printed: str) -> None:
    for document in (example.document, *(copy for copy, of in TRANSLATIONS.items() if of == example.document)):
        before, after = (ROOT / document).read_text().split(example.code, 1)
        after = re.sub(rf"```\n{OUTPUT}", "", after, count=1)
        output = textwrap.indent(printed, "    ")
        (ROOT / document).write_text(f"{before}{example.code}```\n\n{output}{after}")
