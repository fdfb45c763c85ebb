"""The tables of the README: `make bench`, or `python -m benchmarks.run --only serve latency`.

Every table goes to the terminal and, as JSON, to `--out`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import blocks, controls, host_time, serve, speed
from benchmarks.common import make_engine, save, settings, show


class Bench(NamedTuple):
    title: str
    columns: tuple[str, ...]
    in_process: bool | None  # where its engine runs; None: it starts its own
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
    "controls": Bench(
        f"Cost of controls, {controls.PROMPTS} prompts x {controls.WIDTH} beams x {controls.TOKENS} tokens",
        controls.COLUMNS,
        False,
        controls.against_plain_beams,
        settings(),
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
    "serve": Bench(
        "vllm serve with the plugin against vllm serve without",
        serve.SERVE_COLUMNS,
        None,
        lambda _, repeats: serve.against_stock(repeats),
        "dtype=float32, max_num_seqs=64, block_size=32, enforce_eager=True",
    ),
    "latency": Bench(
        f"vllm bench latency --use-beam-search, {serve.LATENCY_TOKENS} tokens after {serve.LATENCY_TOKENS}",
        serve.LATENCY_COLUMNS,
        None,
        lambda _, repeats: serve.latency(repeats),
        "dummy weights, dtype=float32, block_size=32, enforce_eager=True",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    quick = [name for name, bench in BENCHES.items() if bench.in_process is not None]
    parser.add_argument("--only", nargs="+", choices=BENCHES, default=quick, help=f"default: {' '.join(quick)}")
    parser.add_argument("--repeats", type=int, default=5, help="alternations per timing; medians are shown")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    args = parser.parse_args()
    os.environ.setdefault("TQDM_MININTERVAL", "1")
    for in_process in (False, True, None):
        names = [name for name in args.only if BENCHES[name].in_process == in_process]
        if not names:
            continue
        llm = None if in_process is None else make_engine(in_process, enforce_eager=in_process)
        for name in names:
            bench = BENCHES[name]
            note = f"{bench.note}; medians of {args.repeats} alternations"
            rows = list(tqdm(bench.rows(llm, args.repeats), desc=name, unit="row", leave=False))
            show(bench.title, bench.columns, rows, note)
            save(args.out, name, bench.columns, rows, note)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
