"""The code blocks of README.md and docs/."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from tests.support.engine import ROOT

DOCUMENTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for pattern in ("*.md", "docs/*.md", "docs/results/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
}
TRANSLATIONS = {"README.zh.md": "README.md"}  # whose examples are those of the other


class Example(NamedTuple):
    """One block of code."""

    document: str
    number: int
    code: str

    def __str__(self) -> str:
        return f"{self.document}:{self.number}"


def examples(language: str) -> list[Example]:
    block = re.compile(rf"```{language}\n(.*?)```", re.DOTALL)
    return [
        Example(document, number, code)
        for document, text in sorted(DOCUMENTS.items())
        if document not in TRANSLATIONS
        for number, code in enumerate(block.findall(text), start=1)
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
