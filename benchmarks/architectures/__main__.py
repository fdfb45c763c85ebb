"""Try beams on architectures and number formats: `python -m benchmarks.architectures` measures what the JSON lacks.

Results go to benchmarks/architectures/measured.json one by one, and docs/models.md is made of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.architectures import compare
from benchmarks.architectures.formats import FORMATS
from benchmarks.architectures.models import ARCHITECTURES, Architecture
from benchmarks.architectures.table import DOCUMENT, MEASURED, document, read
from benchmarks.common import inspect_models_here

LONGEST = 180  # seconds that an architecture may take
SHOWN = (
    "equal",
    "tied",
    "worst",
    "forced",
    "greedy",
    "steady",
    "vllm",
    "transformers_off",
    "ours_off",
    "speculation",
    "error",
)
TRIED = {architecture.name: architecture for architecture in (*ARCHITECTURES, *FORMATS)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=TRIED, metavar="NAME", help="some of them, by the table's names")
    parser.add_argument("--again", action="store_true", help="measure those anew that the JSON has")
    parser.add_argument("--table", action="store_true", help="measure nothing, make docs/models.md")
    options = parser.parse_args(arguments)
    if not options.table:
        rows = [] if options.again else [row for table in read().values() for row in table]
        known = {row["name"]: row for row in rows if row["outcome"] != "failed"}
        wanted = [one for name, one in TRIED.items() if name in (options.only or TRIED)]
        _measure([one for one in wanted if one.name not in known or _lacks_speculation(known[one.name])], known)
    DOCUMENT.write_text(document(read()))
    return 0


def _lacks_speculation(row: dict[str, Any]) -> bool:
    return TRIED[row["name"]] in ARCHITECTURES and row["outcome"] == "compared" and "speculation" not in row


def _measure(architectures: list[Architecture], known: dict[str, dict[str, Any]]) -> None:
    if not architectures:
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import transformers  # noqa: F401  imported once: processes are forks of this one
    import vllm.v1.worker.cpu_worker  # noqa: F401

    inspect_models_here()
    gc.freeze()  # vLLM collects garbage several times at a start

    for number, architecture in enumerate(architectures, 1):
        row = known.get(architecture.name) or _in_its_own_process(architecture)
        if _lacks_speculation(row):
            with tempfile.TemporaryDirectory() as scratch:
                row["speculation"] = _forked("measure_speculation", architecture, Path(scratch))
        _keep(row)
        shown = {key: row[key] for key in SHOWN if key in row}
        print(f"{number}/{len(architectures)} {architecture.name}: {row['outcome']} {shown}", flush=True)


def _in_its_own_process(architecture: Architecture) -> dict[str, Any]:
    """The architecture's row, whatever becomes of the process."""
    with tempfile.TemporaryDirectory() as scratch:
        measure = "measure_format" if architecture in FORMATS else "measure"
        row = _forked(measure, architecture, Path(scratch))
        if (
            row["outcome"] in ("refused", "no answer")
            and _forked("works_without_beams", architecture, Path(scratch)) is False
        ):
            row["outcome"] = "does not run in vLLM"
    return row


def _forked(what: str, architecture: Architecture, scratch: Path) -> Any:
    context = multiprocessing.get_context("fork")
    answer = scratch / f"{what}.json"
    process = context.Process(target=_answer, args=(what, architecture, scratch / "model", answer))
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    if answer.exists():
        return json.loads(answer.read_text())
    failed = f"the process ended with {process.exitcode}"
    return {"name": architecture.name, "outcome": "failed", "error": failed}


def _answer(what: str, architecture: Architecture, folder: Path, answer: Path) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        found: Any = getattr(compare, what)(architecture, folder)
    except Exception as error:
        found = {"name": architecture.name, "outcome": "failed", "error": compare.sentence(error, folder)}
    answer.write_text(json.dumps(found))
    os._exit(0)


def _keep(row: dict[str, Any]) -> None:
    """Put a row into the JSON, in the table's order, in place of an older one."""
    content = read()
    table, tried = ("formats", FORMATS) if TRIED[row["name"]] in FORMATS else ("architectures", ARCHITECTURES)
    rows = {old["name"]: old for old in content[table]} | {row["name"]: row}
    row["versions"] = {"vllm": version("vllm"), "transformers": version("transformers"), "torch": version("torch")}
    content[table] = [rows[one.name] for one in tried if one.name in rows]
    MEASURED.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
