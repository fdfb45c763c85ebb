"""Times of this checkout against those of another commit, in pairs: `python -m benchmarks.against REV`.

Every side is an engine in a process of its own, and one runs at a time, from first to last and then from last to
first. A second one like the first shows what chance does. Ratios are medians over runs that came in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.against.cases import NEWER, OLDER, SECTIONS, Case, Section, steps_cases
from benchmarks.against.sides import Side, Sides
from benchmarks.common import median_ratio, show
from benchmarks.harness import Setting, machine

CLOCKS = ("wall", "cpu")
COUNTS = ("steps", "target_forwards", "drafted", "accepted")


def time_in_turns(case: Case, sides: dict[str, Side], is_by_step: bool, repeats: int, seconds: float) -> dict[str, Any]:
    """Milliseconds of each side by each clock, in the order in which it ran, and whether all answer the same.

    Args:
        is_by_step: Of a decoding step; otherwise of a token.
        repeats: Turns at least.
        seconds: That they shall take at least, together.
    """
    answers = [side.run(case)["answers"] for side in sides.values()]  # which also warms up
    divisor = 1 if is_by_step else len(answers[0]) * case.options["max_tokens"]
    ms: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in sides} for clock in CLOCKS}
    end, turn = time.monotonic() + seconds, 0
    while turn < repeats or time.monotonic() < end:
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            taken = sides[name].run(case)["step" if is_by_step else "whole"]
            for clock in CLOCKS:
                ms[clock][name].append(1000 * taken[clock] / divisor)
        turn += 1
    first, *others = sides
    ratios = {clock: {name: median_ratio(own[name], own[first]) for name in others} for clock, own in ms.items()}
    return {"case": case.name, "same_answers": all(one == answers[0] for one in answers), "ms": ms, "ratios": ratios}


def count_steps(case: Case, sides: dict[str, Side]) -> dict[str, Any]:
    """What speculation came to on each side, which no clock decides."""
    counted = {}
    for name, side in sides.items():
        searches = side.run(case)["counts"]
        total = {count: sum(search[count] for search in searches) for count in COUNTS}
        prompts = len(searches)  # their forwards are steps, too
        per_forward = (total["steps"] - prompts) / (total["target_forwards"] - prompts)
        counted[name] = {"steps_per_forward": per_forward, **total}
    return {"case": case.name, **counted}


def show_times(section: Section, found: Sequence[dict[str, Any]]) -> None:
    """Milliseconds of the first side; ratios of the others to it, by the wall and by the processors' clock."""
    first, *others = section.sides

    def cells(name: str) -> list[str]:
        return [f"{one['ratios']['wall'][name]:.3f} ({one['ratios']['cpu'][name]:.3f})" for one in found]

    def mean(name: str) -> str:
        means = [statistics.geometric_mean(one["ratios"][clock][name] for one in found) for clock in CLOCKS]
        return "{:.3f} ({:.3f})".format(*means)

    columns = ("case", first, *(f"{name} / {first}" for name in others), "same answers")
    rows = list(
        zip(
            [one["case"] for one in found],
            [statistics.median(one["ms"]["wall"][first]) for one in found],
            *map(cells, others),
            ["yes" if one["same_answers"] else "no" for one in found],
            strict=True,
        )
    )
    rows.append(("geometric mean", "", *map(mean, others), ""))
    show(section.title, columns, rows, "medians; ratios of wall time, and in brackets of processor time")


def show_counts(found: Sequence[dict[str, Any]]) -> None:
    """Steps per forward, side by side."""
    rows = [
        (
            one["case"],
            *(f"{one[side]['steps_per_forward']:.3f}" for side in (OLDER, NEWER)),
            *(f"{one[side]['accepted']} of {one[side]['drafted']}" for side in (OLDER, NEWER)),
            "yes" if one[OLDER] == one[NEWER] else "no",
        )
        for one in found
    ]
    columns = ("case", OLDER, NEWER, f"accepted, {OLDER}", f"accepted, {NEWER}", "identical")
    show("Steps per forward", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"} | os.environ)
    content: dict[str, Any] = {"revision": args.revision, "machine": machine(Setting())}
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def measured(name: str, names: Sequence[str], cases: Iterator[Case], measure: Any) -> list[dict[str, Any]]:
        progress = tqdm(list(cases), desc=name, leave=False, mininterval=1)
        content[name] = [measure(case, sides.of(names, case)) for case in progress]
        args.out.write_text(json.dumps(content, indent=1) + "\n")
        return content[name]

    with tempfile.TemporaryDirectory() as folder, closing(Sides(args.revision, Path(folder))) as sides:
        for name in args.only:
            section = SECTIONS[name]
            in_turns = partial(time_in_turns, is_by_step=section.is_by_step, repeats=args.repeats, seconds=args.seconds)
            show_times(section, measured(name, section.sides, section.cases(), in_turns))
            if name == "dsbd":
                show_counts(measured("steps", (OLDER, NEWER), steps_cases(args.prompts), count_steps))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="the older side: a commit of this repository, as git names it")
    parser.add_argument("--only", type=_sections, default=list(SECTIONS), help=f"of {','.join(SECTIONS)}")
    parser.add_argument("--repeats", type=int, default=4, help="turns of every side at a case, at least")
    parser.add_argument("--seconds", type=float, default=16, help="for a case, at least; short ones have more turns")
    parser.add_argument("--prompts", type=int, default=2, help="of each cell of steps per forward; RESULTS.md has 16")
    parser.add_argument("--out", type=Path, default=Path("results/against.json"), help="all that is measured, as JSON")
    return parser


def _sections(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(SECTIONS):
        raise argparse.ArgumentTypeError(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return names


if __name__ == "__main__":
    main()
