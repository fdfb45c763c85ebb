"""All tables of the README: `make bench`, or `python -m benchmarks.run --only floor blocks`.

Every table goes to the terminal and, as JSON, to `--out`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import blocks, host_time, speed
from benchmarks.common import make_engine, save, settings, show


class Bench(NamedTuple):
    title: str
    columns: tuple[str, ...]
    in_process: bool
    rows: Callable[[Any, int], Iterator[tuple[Any, ...]]]
    note: str


BENCHES = {
    "floor": Bench(
        f"Time against plain sampling of b sequences, {speed.FLOOR_PROMPTS} prompts x {speed.FLOOR_TOKENS} tokens",
        speed.FLOOR_COLUMNS,
        False,
        speed.against_sampling,
        settings(),
    ),
    "client": Bench(
        "Time against LLM.beam_search", speed.CLIENT_COLUMNS, False, speed.against_client_beams, settings()
    ),
    "transformers": Bench(
        "Time against transformers generate(num_beams=8)",
        speed.TRANSFORMERS_COLUMNS,
        True,
        speed.against_transformers,
        settings(enforce_eager=True, transformers_batch=speed.TRANSFORMERS_BATCH),
    ),
    "host": Bench(
        "Host time per step, ms",
        host_time.COLUMNS,
        True,
        lambda llm, _: host_time.by_part(llm),
        settings(enforce_eager=True),
    ),
    "blocks": Bench(
        f"Peak KV blocks, {blocks.NUM_PROMPTS} prompts x {blocks.PROMPT_TOKENS} tokens, {blocks.NEW_TOKENS} new tokens",
        blocks.COLUMNS,
        True,
        lambda llm, _: blocks.peaks(llm),
        settings(enforce_eager=True),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=list(BENCHES), help="tables to measure")
    parser.add_argument("--repeats", type=int, default=5, help="alternations per timing; medians are shown")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    args = parser.parse_args()
    os.environ.setdefault("TQDM_MININTERVAL", "1")
    for in_process in (False, True):
        names = [name for name in args.only if BENCHES[name].in_process == in_process]
        if not names:
            continue
        llm = make_engine(in_process, enforce_eager=in_process)
        for name in names:
            bench = BENCHES[name]
            note = f"{bench.note}; medians of {args.repeats} alternations"
            rows = list(tqdm(bench.rows(llm, args.repeats), desc=name, unit="row", leave=False))
            show(bench.title, bench.columns, rows, note)
            save(args.out, name, bench.columns, rows, note)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
