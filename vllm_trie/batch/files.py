"""The two files of a batch job: prompts to search, and what was found so far. Both have one JSON object per line."""

from __future__ import annotations

import fcntl
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from vllm_trie.entrypoints.requests.refusals import lone_surrogate_in_request

Id = int | str


class JobError(Exception):
    """What is wrong with a job, in a sentence for its user."""


class JobPrompt(NamedTuple):
    """One prompt; its id is that of its line, or else the line's number."""

    id: Id
    prompt: str


def read_job_prompts(path: Path, field: str) -> list[JobPrompt]:
    """All prompts of a file, which may be compressed by gzip if its name ends in ".gz".

    Raises:
        JobError: naming the line, and what is wrong with it.
    """
    prompts, line_of = [], dict[Id, int]()
    for number, row in _job_file_objects(path):
        where = f"{path}, line {number}"
        if field not in row:
            raise JobError(f"{where} has no {field!r}; it has: {', '.join(row) or 'nothing'}; choose one by --field")
        text, own_id = row[field], row.get("id", number)
        if not isinstance(text, str):
            raise JobError(f"{where}: {field!r} is no text but {json.dumps(text)[:40]}")
        if not isinstance(own_id, int | str) or isinstance(own_id, bool):
            raise JobError(f'{where}: "id" is neither a number nor a text but {json.dumps(own_id)[:40]}')
        if half := lone_surrogate_in_request(f"{text}{own_id}"):
            raise JobError(f"{where} has half a character, {half}; mend or remove it")
        if own_id in line_of:
            raise JobError(f"{where} has the same id as line {line_of[own_id]}, {own_id!r}; ids must differ")
        line_of[own_id] = number
        prompts.append(JobPrompt(own_id, text))
    if not prompts:
        raise JobError(f"{path} has no prompts")
    return prompts


@contextmanager
def open_job_output(
    path: Path, prompts: list[JobPrompt], search: dict[str, Any]
) -> Iterator[tuple[IO[str], dict[Id, bool]]]:
    """The output, to append lines to, and which of the prompts have theirs already: whether they could be searched.

    A job may end at any time: what is a whole line counts, and what was half written is gone.

    Args:
        search: What lines hold in "search".

    Raises:
        JobError: another job writes to the file, or it answers other prompts, or was searched otherwise.
    """
    try:
        raw = path.open("a+b")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}") from None
    with raw:
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another job is writing to {path}; wait for it, or name another --output") from None
        answered = _answered_job_prompts(path, dict(prompts), search)
        raw.seek(0)
        raw.truncate(sum(len(line) for line in raw if line.endswith(b"\n")))
        with path.open("a", encoding="utf-8") as file:
            yield file, answered


def _answered_job_prompts(path: Path, texts: dict[Id, str], search: dict[str, Any]) -> dict[Id, bool]:
    answered = dict[Id, bool]()
    for number, row in _job_file_objects(path, is_output=True):
        own_id = row.get("id")
        where, instead = f"{path}, line {number}", "name another --output, or move the file away"
        is_known = isinstance(own_id, int | str) and own_id in texts
        if own_id is None or not is_known or "hypotheses" not in row or row.get("prompt") != texts[own_id]:
            raise JobError(f"{where} answers no prompt of this job; {instead}")
        if differing := _differing_job_search(row.get("search"), search):
            raise JobError(f"{where} was searched with {differing}; {instead}")
        answered[own_id] = "error" not in row
    return answered


def _differing_job_search(searched: Any, search: dict[str, Any]) -> str:
    """How an earlier job's search differs from this one's; nothing if it does not."""
    theirs = searched if isinstance(searched, dict) else {}
    names = [name for name in {**search, **theirs} if name not in search or theirs.get(name) != search[name]]
    return ", ".join(f"{name}={theirs.get(name)!r} instead of {search.get(name)!r}" for name in names)


def _job_file_objects(path: Path, is_output: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file.

    Args:
        is_output: Whether a last line without its end was half written, and does not count.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip() or (is_output and not line.endswith(b"\n")):
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise JobError(f"{path}, line {number} is no JSON: {error}") from None
                if not isinstance(row, dict):
                    raise JobError(f"{path}, line {number} is no JSON object but {line.strip()[:40].decode()!r}")
                yield number, row
    except (OSError, EOFError) as error:  # EOFError: the compressed file is cut short
        raise JobError(f"{path} cannot be read: {error}") from None
