"""Engines on a GPU, as peers measure theirs: beams offline, over HTTP and with drafts, in order of worth.

    python -m benchmarks.gpu_engines --minutes 8
    python -m benchmarks.gpu_engines --only 1.7B:256x8 http:50x32 pair:exact

What a step costs depends on shapes, not on what weights say, so the models have the shapes of Qwen3 and no weights. A
case fails by itself. What is measured is written at once, and what did not fit into the time is listed: what is likely
to take longer than is left does not begin. Only a terminal shows tables; `--out` has them, with the log of the server.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_engines import by_sglang, offline, pair, published, served
from benchmarks.gpu_tables import tell, write

NOT_PRINTED = ("case", *published.COLUMNS)  # columns; a row begins with the name of its case
MOST_NAME = 100  # characters
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}  # engines print thousands of lines otherwise


class Group(NamedTuple):
    """Cases that share an engine.

    Args:
        kind: The module that measures them.
        cases: Its `Case`s.
    """

    kind: Any
    cases: Sequence[Any]


def groups(rehearse: bool) -> list[Group]:
    """All cases, those of most worth first."""
    if rehearse:
        beams, drafts = offline.SMALL[:-1], offline.SMALL[-1:]
        return [Group(offline, beams), Group(offline, drafts), Group(served, served.SMALL), Group(pair, pair.SMALL)]
    return [
        Group(offline, offline.RETRIEVAL),
        Group(offline, offline.WIDE),
        Group(served, served.CASES),
        Group(pair, pair.CASES),
        Group(offline, offline.steady("0.6B")),
        Group(offline, offline.DRAFTS),
        Group(offline, offline.steady("8B")),
        *(Group(by_sglang, cases) for cases in by_sglang.cases_by_model()),
    ]


def chosen(every: Sequence[Group], names: Sequence[str]) -> list[Group]:
    """The cases whose names begin with one of these words; a number is not cut.

    Raises:
        SystemExit: none begins with one of them.
    """
    known = [case.name for _, cases in every for case in cases]
    for word in names:
        if not any(_begins(name, word) for name in known):
            raise SystemExit(f"gpu_engines: no case begins with {word!r}; known: {', '.join(known)}")
    found = [
        Group(kind, [case for case in cases if not names or any(_begins(case.name, word) for word in names)])
        for kind, cases in every
    ]
    return [group for group in found if group.cases]


def _begins(name: str, word: str) -> bool:
    return re.match(rf"{re.escape(word)}(?!\d)", name) is not None


def slug(words: Sequence[str]) -> str:
    """Words as a part of a file's name, which has a limit."""
    name = re.sub(r"[^\w.]+", "-", "_".join(words))
    return name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}_{zlib.crc32(name.encode()):08x}"


class Measurement:
    """Rows of all tables.

    Args:
        args: The command's.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._longest_start = 0.0  # seconds of an engine
        self._longest_case: dict[Any, float] = {}  # likewise, by kind
        self._rows: dict[Any, list[tuple[Any, ...]]] = {}  # by kind
        self._left_out: dict[Any, list[str]] = {}  # names of cases, likewise
        self.num_failed = 0

    def measure(self, group: Group) -> None:
        """All cases of a group for which there is time."""
        kind, cases = group
        self._rows.setdefault(kind, [])
        self._left_out.setdefault(kind, [])
        if not self._is_time_for(self._longest_start):
            self._leave_out(kind, cases)
            return
        begun, is_over = time.monotonic(), False
        try:
            with kind.running(cases, self._args) as engine:
                self._longest_start = max(self._longest_start, time.monotonic() - begun)
                for case in cases:
                    if self._is_time_for(self._longest_case.get(kind, 0.0)):
                        self._measure(kind, engine, case)
                    else:
                        self._leave_out(kind, [case])
                is_over = True
        except Exception as error:
            names = ", ".join(case.name for case in cases)
            if is_over:  # all rows are written
                print(f"the engine of {names} did not end well: {type(error).__name__}: {error}", flush=True)
            else:
                self._fail(names, error)

    def _is_time_for(self, seconds: float) -> bool:
        return self._args.end - time.monotonic() > seconds

    def _leave_out(self, kind: Any, cases: Sequence[Any]) -> None:
        names = [case.name for case in cases]
        self._left_out[kind] += names
        print(f"no time for {', '.join(names)}", flush=True)
        write(*self._table(kind))

    def _measure(self, kind: Any, engine: Any, case: Any) -> None:
        begun = time.monotonic()
        try:
            for row in kind.rows(engine, case, self._args):
                self._rows[kind].append(row)
                cells = [cell for column, cell in zip(kind.COLUMNS, row, strict=True) if column not in NOT_PRINTED]
                shown = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells)
                print(" | ".join([case.name, *shown]), flush=True)
                write(*self._table(kind))  # what is measured stays if the process is ended
        except Exception as error:
            self._fail(case.name, error)
        self._longest_case[kind] = max(self._longest_case.get(kind, 0.0), time.monotonic() - begun)

    def _fail(self, name: str, error: Exception) -> None:
        self.num_failed += 1
        traceback.print_exception(error)
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)

    def tell(self) -> None:
        """Write all tables; show them on a terminal."""
        for kind in self._rows:
            (tell if sys.stdout.isatty() else write)(*self._table(kind))

    def _table(self, kind: Any) -> tuple[Any, ...]:
        args, left_out = self._args, self._left_out[kind]
        ways = {
            "rows": ("each row reads", args.shared_prefix_attention == "off"),
            "uncompiled": ("without torch.compile", args.no_compile),
            "tiny": ("rehearsed", args.rehearse),
            slug(args.only): ("some cases alone", bool(args.only)),  # which take the place of no other table
        }
        also = {key: title for key, (title, is_so) in ways.items() if is_so}
        name = "_".join(["gpu", kind.__name__.rpartition(".")[-1], *also])
        note = kind.NOTE + (f"; not run, for want of time: {', '.join(left_out)}" if left_out else "")
        return name, ", ".join([kind.TITLE, *also.values()]), kind.COLUMNS, self._rows[kind], note, args.out


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [case.name for _, cases in groups(rehearse=False) for case in cases]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_engines",
        description=__doc__.splitlines()[0],
        epilog=f"cases: {', '.join(names)}",
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="those whose names begin so")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which nothing begins")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs without torch.compile: a shorter start")
    parser.add_argument("--kv-cache-gib", type=int, default=40)
    parser.add_argument("--shared-prefix-attention", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--rehearse", action="store_true", help="on any machine, with a tiny model and small cases")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    args.end = time.monotonic() + 60 * args.minutes
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    measurement = Measurement(args)
    for group in chosen(groups(args.rehearse), args.only):
        measurement.measure(group)
    measurement.tell()
    return int(measurement.num_failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that engines and servers end, too
    sys.exit(main())
