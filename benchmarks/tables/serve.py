"""The `vllm` command with the plugin against the same command without it: servers, and `bench latency`."""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import BLOCK_SIZE, alternate, median_ratio
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.server import MODULE, Server, serving
from benchmarks.stdlib_pair.corpus import held_out_prompts

BEAM_TRAFFIC = ((4, 1), (4, 8), (8, 8))  # beams, requests at a time
BEAM_REQUESTS, BEAM_TOKENS = 16, 32
KV_CACHE_BYTES = 1 << 29
ORDINARY = {"num-prompts": 64, "random-input-len": 64, "random-output-len": 32, "max-concurrency": 8}

LATENCY_SHAPES = ((4, 1), (4, 8), (8, 4))
LATENCY_TOKENS = 32


def cells(setting: Setting) -> list[Cell]:
    return [("all",)]


def measure(bench: Bench, _: str) -> Measured:
    """One server with the plugin between two without: ordinary traffic, then `use_beam_search`."""
    bench.stop_engine()
    repeats, model = bench.setting.repeats, bench.setting.model
    command = ("vllm", "serve", model, "--served-model-name", "target")
    engine = ("--dtype", bench.setting.dtype, "--kv-cache-memory-bytes", str(KV_CACHE_BYTES))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        servers = {
            name: running.enter_context(serving(Path(folder) / name, *engine, *options, command=command))
            for name, options in {"without": (), "with": ("--plugin", "trie_beam"), "again": ()}.items()
        }
        seconds = _alternating(servers, partial(_ordinary_traffic, model=model, folder=Path(folder)), repeats)
        rows = [_row("ordinary: vllm bench serve, 8 at a time", seconds)]
        for width, at_a_time in BEAM_TRAFFIC:
            seconds = alternate(
                {name: partial(_beam_traffic, server, width, at_a_time) for name, server in servers.items()}, repeats
            )
            rows.append(_row(f"use_beam_search, {width} beams, {at_a_time} at a time", seconds))
    return Measured(rows)


def latency_cells(setting: Setting) -> list[Cell]:
    return list(LATENCY_SHAPES)


def measure_latency(bench: Bench, width: int, num_prompts: int) -> Measured:
    """`vllm bench latency --use-beam-search`, as its users run it."""
    bench.stop_engine()
    setting, medians = bench.setting, []
    # Its prompts are random tokens below 10,000.
    larger = ["--hf-overrides", '{"vocab_size": 16384}', "--load-format", "dummy"] if setting.is_toy else []
    for options in ([], ["--plugin", "trie_beam"]):
        with tempfile.NamedTemporaryFile(suffix=".json") as result:
            _run(
                *["bench", "latency", "--model", setting.model, "--dtype", setting.dtype, *larger],
                *["--enforce-eager", "--block-size", BLOCK_SIZE, "--max-model-len", 512],
                *["--kv-cache-memory-bytes", KV_CACHE_BYTES, "--output-json", result.name],
                *["--input-len", LATENCY_TOKENS, "--output-len", LATENCY_TOKENS, "--batch-size", num_prompts],
                *["--n", width, "--use-beam-search", "--num-iters", setting.repeats, "--num-iters-warmup", 1],
                *options,
            )
            medians.append(statistics.median(json.load(result)["latencies"]))
    return Measured([(f"{width} x {num_prompts}", *medians, medians[0] / medians[1])])


def _alternating(servers: dict[str, Server], measure: Any, repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(repeats):
        for name, server in servers.items():
            seconds[name].append(measure(server))
    return seconds


def _ordinary_traffic(server: Server, model: str, folder: Path) -> float:
    """Seconds that `vllm bench serve` measures for its requests, one of them as warm-up."""
    result = folder / "serve.json"
    _run(
        *["bench", "serve", "--backend", "openai", "--base-url", server.url, "--model", "target"],
        *["--tokenizer", model, "--dataset-name", "random", "--ignore-eos", "--seed", 0, "--num-warmups", 8],
        *["--save-result", "--result-dir", folder, "--result-filename", result.name],
        *(argument for name, value in ORDINARY.items() for argument in (f"--{name}", value)),
    )
    measured = json.loads(result.read_text())
    assert measured["completed"] == ORDINARY["num-prompts"], measured
    return float(measured["duration"])


def _beam_traffic(server: Server, width: int, at_a_time: int) -> None:
    def complete(prompt: str) -> None:
        body = {"use_beam_search": True, "ignore_eos": True}
        server.client.completions.create(
            model="target", prompt=prompt, n=width, max_tokens=BEAM_TOKENS, extra_body=body
        )

    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(complete, held_out_prompts(BEAM_REQUESTS)))


def _row(traffic: str, seconds: dict[str, list[float]]) -> tuple[Any, ...]:
    stock, ours, again = (seconds[name] for name in ("without", "with", "again"))
    return (
        traffic,
        statistics.median(stock),
        statistics.median(ours),
        median_ratio(stock, ours),
        median_ratio(stock, again),
    )


def _run(*arguments: Any) -> None:
    result = subprocess.run([*MODULE, *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"vllm {arguments[0]} {arguments[1]} failed:\n{result.stderr[-2000:]}")


TABLE = Table(
    "vllm serve with the plugin against vllm serve without",
    ("traffic", "without, s", "with, s", "times faster", "A/A"),
    cells,
    measure,
    "max_num_seqs=64; medians of alternations; A/A: a second server without against the first",
)
LATENCY = Table(
    f"vllm bench latency --use-beam-search, {LATENCY_TOKENS} tokens after {LATENCY_TOKENS}",
    ("beams x prompts", "without, s", "with, s", "times faster"),
    latency_cells,
    measure_latency,
    "eager; medians; a run on the toy takes dummy weights and a larger vocabulary",
)
