"""The input and output files of a batch job: prompts, and hypotheses so far. Both have one JSON object per line."""

from __future__ import annotations

import fcntl
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from vllm_trie.entrypoints.requests.refusals import lone_surrogate_in_request

Id = int | str
_INSTEAD = "name another --output, or move the file away"


class JobError(Exception):
    """A job cannot start or go on; the message is one sentence for its user."""


class JobPrompt(NamedTuple):
    """One prompt; its id is the line's "id", or else the line's number."""

    id: Id
    prompt: str


def read_job_prompts(path: Path, field: str) -> list[JobPrompt]:
    """All prompts of a file, which is compressed by gzip if its name ends in ".gz".

    Raises:
        JobError: names the line and the fault.
    """
    prompts, line_of = [], dict[Id, int]()
    for number, row in _job_file_objects(path):
        where = f"{path}, line {number}"
        if field not in row:
            raise JobError(f"{where} has no {field!r}; it has: {', '.join(row) or 'nothing'}; choose one by --field")
        text, own_id = row[field], row.get("id", number)
        if not isinstance(text, str):
            raise JobError(f"{where}: {field!r} is not a text but {json.dumps(text)[:40]}")
        if not isinstance(own_id, int | str) or isinstance(own_id, bool):
            raise JobError(f'{where}: "id" is neither a number nor a text but {json.dumps(own_id)[:40]}')
        if half := lone_surrogate_in_request(f"{text}{own_id}"):
            raise JobError(f"{where} has half of a surrogate pair, {half}; fix or remove it")
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
    """Open and lock the output, to append lines to it.

    A job may be interrupted at any time: whole lines count, and a half-written last line of this job is removed.

    Args:
        search: The value of "search" in each line.

    Yields:
        The file, and for the id of each prompt that has a line already, whether it could be searched.

    Raises:
        JobError: another job writes to the file, or it has something else than lines of these prompts and this search.
    """
    try:
        raw = path.open("a+b")
    except OSError as error:
        raise JobError(f"{path} cannot be written: {error}") from None
    with raw:
        if not path.is_file():
            raise JobError(f"{path} is not a regular file; name another --output")
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JobError(f"another job is writing to {path}; wait for it, or name another --output") from None
        except OSError as error:
            raise JobError(f"{path} cannot be locked: {error}; name an --output on another file system") from None
        answered = _answered_job_prompts(path, dict(prompts), search)
        _remove_half_written_line(raw, path, prompts, search)
        with path.open("a", encoding="utf-8") as file:
            yield file, answered


def _remove_half_written_line(raw: BinaryIO, path: Path, prompts: list[JobPrompt], search: dict[str, Any]) -> None:
    """Remove a last line without a line break, unless something else than this job wrote it."""
    raw.seek(0)
    length, last = 0, b""
    for line in raw:
        length, last = length + len(last), line
    if not last or last.endswith(b"\n"):
        return
    for prompt in prompts:
        begun = job_line(prompt, search, {})[:-1].encode()
        if begun.startswith(last) or last.startswith(begun):
            raw.truncate(length)
            return
    raise JobError(f"{path} ends with a line that this job did not write; {_INSTEAD}")


def job_line(prompt: JobPrompt, search: dict[str, Any], answer: dict[str, Any]) -> str:
    """A prompt's line in the output, without the line break."""
    return json.dumps({**prompt._asdict(), "search": search, **answer}, ensure_ascii=False)


def write_job_line(file: IO[str], line: str) -> None:
    """Append a line to the output, which stays if the job is interrupted.

    Raises:
        JobError: such as when the disk is full.
    """
    try:
        file.write(f"{line}\n")
        file.flush()
    except OSError as error:
        with suppress(OSError):  # closing writes the rest once more
            file.close()
        raise JobError(f"{file.name} cannot be written: {error}") from None


def refuse_one_job_file(input_path: Path, output_path: Path) -> None:
    """Refuse an input that is the output, too, by whatever paths.

    Raises:
        JobError: it is.
    """
    with suppress(OSError):  # one of them cannot be found, as whoever opens it reports
        if output_path.samefile(input_path):
            raise JobError(f"--output={output_path} is the input, too; name another file")


def _answered_job_prompts(path: Path, texts: dict[Id, str], search: dict[str, Any]) -> dict[Id, bool]:
    answered = dict[Id, bool]()
    for number, row in _job_file_objects(path, is_output=True):
        own_id = row.get("id")
        where = f"{path}, line {number}"
        is_known = isinstance(own_id, int | str) and own_id in texts
        if own_id is None or not is_known or "hypotheses" not in row or row.get("prompt") != texts[own_id]:
            raise JobError(f"{where} answers no prompt of this job; {_INSTEAD}")
        if differing := _differing_job_search(row.get("search"), search):
            raise JobError(f"{where} was searched with {differing}; {_INSTEAD}")
        answered[own_id] = "error" not in row
    return answered


def _differing_job_search(searched: Any, search: dict[str, Any]) -> str:
    """How the search of an earlier job differs from this one's; empty if it does not."""
    theirs = searched if isinstance(searched, dict) else {}
    names = [name for name in {**search, **theirs} if name not in search or theirs.get(name) != search[name]]
    return ", ".join(f"{name}={theirs.get(name)!r} instead of {search.get(name)!r}" for name in names)


def _job_file_objects(path: Path, is_output: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects of a file.

    Args:
        is_output: Skip a last line without a line break, which may be half written.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip() or (is_output and not line.endswith(b"\n")):
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise JobError(f"{path}, line {number} is not JSON: {error}") from None
                except RecursionError:
                    raise JobError(f"{path}, line {number} is nested too deeply") from None
                if not isinstance(row, dict):
                    raise JobError(
                        f"{path}, line {number} is not a JSON object but {line.strip()[:40].decode(errors='replace')!r}"
                    )
                yield number, row
    except (OSError, EOFError, zlib.error) as error:  # the latter two: the compressed file is cut short, or damaged
        raise JobError(f"{path} cannot be read: {error}") from None
