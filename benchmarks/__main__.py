"""The tables of RESULTS.md: `make bench` (minutes), `make bench-full`, or `python -m benchmarks --only memory`.

Every table goes to the terminal and, as JSON and Markdown, to `--out`, with plots next to them. Ctrl-C keeps what is
measured; the same command continues from there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import plots
from benchmarks.common import PAIR, TARGET, console
from benchmarks.harness import MAX_NUM_SEQS, SIZES, Bench, Setting, Table, run
from benchmarks.model_wheels import UnavailableError
from benchmarks.prompts import CODE, PromptSet
from benchmarks.report import as_markdown
from benchmarks.smollm2 import get
from benchmarks.tables import (
    attention,
    block_sizes,
    concurrency,
    controls,
    dsbd,
    dsbd_grid,
    energy,
    fidelity,
    grammars,
    hearing,
    host,
    launches,
    lookup,
    memory,
    puzzle,
    reclamation,
    retrieval,
    serve,
    service,
    speculation,
    speech,
    speech_parts,
    step_search,
    tasks,
    throughput,
    traffic,
    wide,
    word_errors,
)
from benchmarks.whisper_base import get as whisper

TABLES: dict[str, Table] = {
    "memory": memory.TABLE,
    "block_sizes": block_sizes.TABLE,
    "ablation": reclamation.ABLATION,
    "reclamation": reclamation.COST,
    "throughput": throughput.TABLE,
    "fidelity": fidelity.TABLE,
    "concurrency": concurrency.TABLE,
    "traffic": traffic.TABLE,
    "wide": wide.TABLE,
    "energy": energy.TABLE,
    "steps": speculation.STEPS,
    "quality": speculation.QUALITY,
    "cost": speculation.COST,
    "auto": speculation.AUTO,
    "blocks": speculation.BLOCKS,
    "dsbd": dsbd.TABLE,
    "dsbd_grid": dsbd_grid.TABLE,
    "dsbd_energy": dsbd.ENERGY,
    "host": host.TABLE,
    "launches": launches.TABLE,
    "controls": controls.TABLE,
    "grammars": grammars.TABLE,
    "serve": serve.TABLE,
    "latency": serve.LATENCY,
    "catalogs": retrieval.SIZES,
    "retrieval": retrieval.TABLE,
    "load": retrieval.LOAD,
    "service": service.TABLE,
    "lookup": lookup.TABLE,
    "attention": attention.STEP,
    "shared": attention.SEARCH,
    "steps_scored": step_search.TABLE,
    "puzzle": puzzle.TABLE,
    "tasks": tasks.TABLE,
    "parity": fidelity.PARITY,
    "speech": speech.TABLE,
    "speech_parts": speech_parts.TABLE,
    "hearing": hearing.TABLE,
    "word_errors": word_errors.TABLE,
}
REAL, SPEECH = "smollm2", whisper.NAME
OURS_ALONE = (  # no paper has them
    *("host", "launches", "controls", "grammars", "serve", "latency", "catalogs", "retrieval", "load", "service"),
    *("auto", "lookup", "attention", "shared", "steps_scored", "puzzle", "tasks", "parity"),
    *("speech", "speech_parts", "hearing", "word_errors"),
)
OF_PAPERS = [name for name in TABLES if name not in OURS_ALONE]
INTERRUPTED = 130
DTYPES = ("float32", "bfloat16", "float16")
LEAST_TOKENS = 4  # of which one comes with the prompt, and one from a last step that forks nothing


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    setting = _setting(args)
    names = args.only or (list(TABLES) if args.size == "full" else OF_PAPERS)
    os.environ.setdefault("TQDM_MININTERVAL", "1")
    bench = Bench(setting)
    num_failed = 0
    try:
        for name in names:
            table = TABLES[name]
            if table.needs_draft and setting.draft is None:
                console.print(f"{name} is left out: it needs --draft")
                continue
            if table.is_of_speech != setting.hears:
                needed = f"--model {SPEECH}" if table.is_of_speech else "a model of text"
                console.print(f"{name} is left out: it needs {needed}")
                continue
            num_failed += run(name, table, bench, args.out, args.again)
    except KeyboardInterrupt:
        console.print(f"Interrupted. What is measured is in {args.out}; the same command goes on from there.")
        return INTERRUPTED
    finally:
        bench.close()
    for picture in plots.draw_all(args.out):
        console.print(f"drawn: {picture}")
    console.print(f"written: {as_markdown(args.out)}")
    return int(num_failed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TABLES, metavar="TABLE", help=f"of: {' '.join(TABLES)}")
    parser.add_argument("--size", choices=SIZES, default="quick", help="how many prompts, lengths and widths")
    help_text = f"folder or name; {REAL!r}: {get.NAME}; {SPEECH!r}: of speech; default: the toy"
    parser.add_argument("--model", default=str(TARGET), help=help_text)
    parser.add_argument("--draft", help="its draft model; without one, other models have no tables of speculation")
    help_text = "JSON Lines, .gz or not; 'code', the default, names the built-in ones"
    parser.add_argument("--prompts", nargs="+", type=Path, metavar="FILE", default=[Path(CODE.name)], help=help_text)
    parser.add_argument("--field", nargs="+", default=["prompt"], help="of the prompt: one for all files, or one each")
    parser.add_argument("--widths", nargs="+", type=_positive, metavar="BEAMS", help="where a table compares widths")
    parser.add_argument("--max-tokens", type=_positive, help="to generate; by default each table's own choice")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the engine and of transformers")
    parser.add_argument("--catalog", metavar="FILE", help="that tables of retrieval search along; default: made up")
    help_text = "of the histories that are prompts of the table `service`"
    parser.add_argument("--prompt-tokens", type=_positive, metavar="TOKENS", help=help_text)
    parser.add_argument("--kv-cache-gib", type=float, default=1.0, metavar="GIB", help="for KV blocks")
    parser.add_argument("--repeats", type=_positive, default=3, help="alternations per timing; medians are shown")
    parser.add_argument("--again", action="store_true", help="measure anew what is measured already")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder of tables and plots")
    return parser


def _setting(args: argparse.Namespace) -> Setting:
    files = [path for path in args.prompts if str(path) != CODE.name]
    fields = args.field * len(files) if len(args.field) == 1 else args.field
    if len(fields) != len(files):
        sys.exit(f"--field: {len(fields)} fields for {len(files)} files; name one for all, or one each")
    for path in files:
        if not path.is_file():
            sys.exit(f"--prompts {path}: no such file; {CODE.name!r} names the built-in prompts")
    own = [PromptSet(path.name.split(".")[0], path, field) for path, field in zip(files, fields, strict=True)]
    if len(files) < len(args.prompts):
        own.insert(0, CODE)
    if len({prompts.name for prompts in own}) < len(args.prompts):
        sys.exit("--prompts: two sets of one name; leave one out, or rename it")
    model, draft = _models(args)
    widths = tuple(args.widths) if args.widths else None
    if max(widths or (1,)) > MAX_NUM_SEQS:
        sys.exit(f"--widths: {max(widths)} beams are more than the {MAX_NUM_SEQS} rows of the engine")
    if (args.max_tokens or LEAST_TOKENS) < LEAST_TOKENS:
        sys.exit(f"--max-tokens {args.max_tokens}: tables need {LEAST_TOKENS} or more")
    if args.kv_cache_gib <= 0:
        sys.exit(f"--kv-cache-gib {args.kv_cache_gib}: more than 0 is needed")
    return Setting(
        model,
        draft,
        tuple(own),
        widths,
        args.max_tokens,
        args.repeats,
        args.size,
        args.dtype,
        args.kv_cache_gib,
        args.catalog,
        args.prompt_tokens,
        {REAL: get.NAME, SPEECH: whisper.NAME}.get(args.model),
    )


def _models(args: argparse.Namespace) -> tuple[str, str | None]:
    """Folders or names of the model and of its draft model."""
    try:
        if args.model == REAL:
            return str(get.target()), args.draft or str(get.draft())
        if args.model == SPEECH:
            return str(whisper.model()), args.draft
    except UnavailableError as error:
        sys.exit(str(error))
    return args.model, args.draft or (str(PAIR / "draft") if args.model == str(TARGET) else None)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
