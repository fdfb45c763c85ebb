"""What the benchmarks and the demo share: engines, fair timing, and tables on the terminal."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

PAIR = Path(__file__).parent / "stdlib_pair"
TARGET = PAIR / "target"
BLOCK_SIZE = 32
TEXT_COLUMNS = ("answer",)
console = Console(width=None if os.isatty(1) else 120)


def make_engine(in_process: bool = False, model: str | Path = TARGET, **options: Any) -> Any:
    """An `LLM` with beam groups, on the trained target.

    Args:
        in_process: Run the engine in this process, so that it can be looked into.
        model: Its folder, if it is another one.
        options: Further arguments of `LLM`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    from vllm import LLM

    return LLM(
        str(model),
        **{
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            "max_model_len": 1024,
            "max_num_seqs": 256,
            "max_logprobs": 256,
            "kv_cache_memory_bytes": 1 << 30,
            "additional_config": {"trie_beam": {}},
            **options,
        },
    )


def inspect_models_here() -> None:
    """Let vLLM inspect classes of models in this process, where it starts one for each, which imports vLLM anew.

    Some classes cannot be imported before an engine starts: these are still inspected in a process of their own.
    """
    from vllm.model_executor.models import registry

    in_subprocess = registry._run_in_subprocess

    def inspect_here(inspect: Callable[[], Any]) -> Any:
        try:
            return inspect()
        except AssertionError:
            return in_subprocess(inspect)

    registry._run_in_subprocess = inspect_here


def cpu_dtype() -> str:
    """bfloat16 where this machine's CPU multiplies it by instructions of its own, else float32."""
    import torch

    found = torch.cpu.get_capabilities()
    return "bfloat16" if any(found.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"


def stop(llm: Any) -> None:
    """Give back what an engine in this process holds."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Any], params: Any) -> list[Any]:
    """`LLM.generate`, without its progress bar.

    Raises:
        RuntimeError: a request ended for want of KV blocks; time and tokens of such a run mean nothing.
    """
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if any(hypothesis.finish_reason == "error" for output in outputs for hypothesis in output.outputs):
        raise RuntimeError("a request ended for want of KV blocks; --kv-cache-gib gives more")
    return outputs


def one_at_a_time(llm: Any, prompts: Sequence[Any], params: Any) -> list[Any]:
    """Outputs of searches that share nothing, so that each is granted all it can use."""
    return [generate(llm, [prompt], params)[0] for prompt in tqdm(prompts, leave=False, mininterval=1)]


def timed(run: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def alternate(
    runs: dict[str, Callable[[], object]], repeats: int, most_seconds: float = math.inf, title: str = ""
) -> dict[str, list[float]]:
    """Time every run `repeats` times in turn, A B C A B C ..., after one warm-up of each.

    Once `most_seconds` are spent on it, no further turn begins. With a `title` a progress bar counts the runs.
    """
    with tqdm(total=(1 + repeats) * len(runs), desc=title, leave=False, disable=not title) as progress:
        for run in runs.values():
            run()
            progress.update()
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        start = time.perf_counter()
        for number in range(repeats):
            if number and time.perf_counter() - start > most_seconds:
                break
            for name, run in runs.items():
                seconds[name].append(timed(run))
                progress.update()
    return seconds


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of runs that came one after the other."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], note: str = "") -> None:
    """Print one table."""
    table = Table(title=title or None, caption=note or None, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in TEXT_COLUMNS else "right")
    for row in rows:
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
