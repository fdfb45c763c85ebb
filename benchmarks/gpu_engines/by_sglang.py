"""SGLang's own beams, where it is installed: an engine of each case's, in a process of its own."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu_engines import offline
from benchmarks.gpu_engines.options import CACHED, COMPUTED, MAX_LENGTH, VOCAB_SIZE, folder_of, write_model

TITLE = "SGLang's beams"
COLUMNS = ("case", "prompt", "ms", "runs")
NOTE = "as the table of beams compared with samples has it, by SGLang, on the open vocabulary"
COMMAND = """
import json, random, statistics, sys, time
import sglang

if __name__ == "__main__":
    folder, case, repeats, vocab_size, max_length = sys.argv[1], *map(json.loads, sys.argv[2:])
    width, count = case["width"], case["num_requests"]
    engine = sglang.Engine(
        model_path=folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True,
        context_length=max_length, max_running_requests=(width + 1) * count,
    )
    params = {"beam_width": width, "n": width, "max_new_tokens": case["num_tokens"], "ignore_eos": True}
    found = []
    for is_cached in (False, True):
        seconds = []
        for number in range(repeats + 1):
            if number == 0 or not is_cached:
                prompts = [random.choices(range(10, vocab_size - 10), k=case["prompt_length"]) for _ in range(count)]
            start = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=params)
            seconds.append(time.perf_counter() - start)
        found.append(1000 * statistics.median(seconds[1:]))
    engine.shutdown()
    print(json.dumps(found))
"""


class Case(offline.Case):
    """One of ours, by SGLang."""

    @property
    def name(self) -> str:
        return f"sglang:{super().name}"


def cases_by_model() -> list[list[Case]]:
    """Those of the open vocabulary; none where it is not installed."""
    if find_spec("sglang") is None:
        return []
    of_models = offline.RETRIEVAL, (*offline.WIDE, *offline.steady("0.6B"))
    return [[Case(*case) for case in cases if not case.is_along_catalog] for cases in of_models]


@contextmanager
def running(cases: Sequence[Case], _: argparse.Namespace) -> Iterator[str]:
    """The folder of their model."""
    folder = folder_of(cases[0].model)
    write_model(cases[0].model, folder)
    yield str(folder)


def rows(folder: str, case: Case, args: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Rows of `COLUMNS`."""
    arguments = map(json.dumps, (case._asdict(), args.repeats, VOCAB_SIZE, MAX_LENGTH))
    found = subprocess.run(
        [sys.executable, "-c", COMMAND, folder, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    for kind, ms in zip((COMPUTED, CACHED), json.loads(found.stdout.strip().splitlines()[-1]), strict=True):
        yield case.label, kind, ms, args.repeats
