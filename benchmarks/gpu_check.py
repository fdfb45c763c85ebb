"""On a GPU: kernels, whole steps and attention against torch, and timed; with vLLM's CUDA build also whole searches.

    python -m benchmarks.gpu_check --fa3 _vllm_fa3_C.abi3.so --merge triton_merge_attn_states.py

Kernels, steps and attention need torch, Triton, numpy and msgspec alone, and a minute. What fails is printed, and the
rest continues unless the process has lost the device; the exit status is 1 then. `--interpret` rehearses all of it on a
CPU, on small shapes, without times. Every table goes to the terminal and, as JSON, to `--out`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_attention, gpu_kernels, gpu_steps
from benchmarks.gpu_tables import tell
from benchmarks.stand_ins import is_there

MOST_SECONDS = 420  # from here on nothing begins, so that a run fits into 8 minutes
MOST_MORE = 60  # seconds that a process may take after that
MOST_LINES = 3  # that are printed of a failure
PARTS = ("kernels", "steps", "attention", "trees", "searches")
# Tests whose tensors are a GPU's where there is one.
KERNELS = ("worker/attention/triton_kernels", "worker/kernels/step_kernels", "worker/kernels/select_kernels")
KERNELS += (
    "worker/kernels/controls_kernels",
    "worker/select/selection_graphs",
    "worker/rows/sub_batch",
    "worker/kv/kv_caches",
)
KERNELS += ("worker/kv/kv_moves", "speculation/worker/forest_growth")
PARITY = ("tests/behaviour/search/test_kernels.py", "tests/behaviour/search/test_parity.py")


class Findings:
    """What all checks have come to.

    Args:
        most_seconds: From now on; no check begins later.
    """

    def __init__(self, most_seconds: float) -> None:
        self._end = time.monotonic() + most_seconds
        self.counts: dict[str, list[int]] = {}  # by part: checks that passed, that failed, and that were left out
        self.failures: list[str] = []
        self._is_lost = False

    def rows(self, part: str, check: Callable[[Any], tuple[Any, ...]], shapes: Sequence[Any]) -> list[tuple[Any, ...]]:
        """What a check of each shape returns, if it passes."""
        found, counts = [], self.counts.setdefault(part, [0, 0, 0])
        for shape in shapes:
            if self._is_lost or time.monotonic() > self._end:
                counts[2] += 1
                continue
            try:
                found.append(check(shape))
                counts[0] += 1
            except Exception as error:
                counts[1] += 1
                self._note(f"{part}, {shape}", error)
            self._is_lost = not self._can_go_on()
        return found

    def seconds_left(self) -> float:
        """Until no check begins any more."""
        return self._end - time.monotonic()

    @staticmethod
    def _can_go_on() -> bool:
        """Whether the device still answers: after an illegal access it refuses all that this process asks for."""
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except Exception:
            return False
        return True

    def _note(self, name: str, error: Exception) -> None:
        lines = str(error).strip().splitlines()[:MOST_LINES]
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(where.filename).name}:{where.lineno}"
        self.failures.append(f"{name}: {type(error).__name__} at {at}: {' / '.join(lines)}")
        print(f"FAILED {self.failures[-1]}", flush=True)


def check_kernels(findings: Findings, device: torch.device, args: argparse.Namespace) -> None:
    """Each kernel of selection and reordering."""
    shapes = gpu_kernels.SMALL_SHAPES if args.interpret else gpu_kernels.SHAPES
    rows = findings.rows("kernels", lambda shape: gpu_kernels.measured(shape, device, args.inputs), shapes)
    note = (
        f"bfloat16 logits, {gpu_kernels.LAYERS} layers, block size {gpu_kernels.BLOCK_SIZE}, {gpu_kernels.NUM_TOKENS} "
        f"tokens per row; medians over {args.inputs} inputs; a step is modelled: 8B weights and each row's KV read "
        "once, at the speed of a copy on this device"
    )
    tell("gpu_kernels", "Kernels, each equal to its reference", gpu_kernels.COLUMNS, rows, note, args.out)


def check_steps(findings: Findings, device: torch.device, args: argparse.Namespace) -> None:
    """Whole steps."""
    shapes = gpu_steps.SMALL_SHAPES if args.interpret else gpu_steps.SHAPES
    sizes = gpu_steps.SMALL if args.interpret else gpu_steps.Sizes()
    rows = findings.rows("steps", lambda shape: gpu_steps.measured(shape, sizes, device), shapes)
    note = f"{', '.join(f'{name} {size:,}' for name, size in sizes._asdict().items())}; {gpu_steps.NOTE}"
    note += "; rehearsed: no graph was made or checked" if args.interpret else ""
    tell("gpu_steps", "Whole steps, each equal to torch's", gpu_steps.COLUMNS, rows, note, args.out)


def check_attention(findings: Findings, device: torch.device, args: argparse.Namespace) -> None:
    """Attention over shared blocks."""
    shapes = gpu_attention.SMALL_SHAPES if args.interpret else gpu_attention.SHAPES
    calls = None
    if args.fa3 is not None:
        load = gpu_attention.load_flash
        loaded = findings.rows("FlashAttention", lambda path: (load(path, args.merge),), [args.fa3])
        calls = loaded[0][0] if loaded else None
    rows = findings.rows("attention", lambda shape: gpu_attention.measured(shape, device, calls), shapes)
    merged = "" if calls is None or args.merge else ", here by torch"
    note = gpu_attention.NOTE + merged
    tell("gpu_attention", "Attention over shared blocks", gpu_attention.COLUMNS, rows, note, args.out)


def check_trees(findings: Findings, device: torch.device, args: argparse.Namespace) -> None:
    """Attention along trees."""
    shapes = gpu_attention.SMALL_TREE_SHAPES if args.interpret else gpu_attention.TREE_SHAPES
    rows = findings.rows("trees", lambda shape: gpu_attention.measured_tree(shape, device), shapes)
    columns, note = gpu_attention.TREE_COLUMNS, gpu_attention.TREE_NOTE
    tell("gpu_trees", "Attention along trees", columns, rows, note, args.out)


def check_searches(findings: Findings, device: torch.device, args: argparse.Namespace) -> None:
    """Whole searches against transformers, where vLLM's CUDA build is installed."""
    if args.interpret or not is_there("vllm"):
        print("Whole searches are left out: they need vLLM's CUDA build and a GPU.")
        return
    tests = ["pytest", "-n", "0", "-q", "-m", "", "--continue-on-collection-errors", *map(test_of, KERNELS), *PARITY]
    searches = ["benchmarks.gpu_searches", "--out", str(args.out)]
    findings.rows("searches", lambda command: run(command, findings.seconds_left() + MOST_MORE), (searches, tests))


def test_of(name: str) -> str:
    """The file of a test, by what it tests."""
    folder, _, module = name.rpartition("/")
    return str(Path("tests", folder, f"test_{module}.py"))


def run(command: Sequence[str], seconds: float) -> tuple[Any, ...]:
    """Run a module. Raises RuntimeError if it fails, TimeoutExpired if it takes longer; its engines end with it."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen([sys.executable, "-m", *command], env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise RuntimeError(f"{' '.join(command)} ended with status {code}")
    return ()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--interpret", action="store_true", help="rehearse it on a CPU, with Triton's interpreter")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--inputs", type=int, default=3, help="input sets per shape of a kernel")
    parser.add_argument("--fa3", type=Path, help="vLLM's _vllm_fa3_C.abi3.so: FlashAttention 3")
    parser.add_argument("--merge", type=Path, help="vLLM's triton_merge_attn_states.py, which goes with it")
    parser.add_argument("--seconds", type=float, default=MOST_SECONDS, help="after which no check begins")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    return parser.parse_args(arguments)


CHECKS = {
    "kernels": check_kernels,
    "steps": check_steps,
    "attention": check_attention,
    "trees": check_trees,
    "searches": check_searches,
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    if args.interpret != (os.environ.get("TRITON_INTERPRET") == "1"):
        raise SystemExit(
            "gpu_check --interpret goes with TRITON_INTERPRET=1 in the environment, and neither without it."
        )
    if not (args.interpret or torch.cuda.is_available()):
        raise SystemExit(f"gpu_check needs a GPU with CUDA, and torch {torch.__version__} finds none on this machine.")
    findings, device = Findings(args.seconds), torch.device("cpu" if args.interpret else "cuda")
    for part in args.only:
        CHECKS[part](findings, device, args)
    print("\npart | passed | failed | left out")
    for part, counts in findings.counts.items():
        print(" | ".join(map(str, (part, *counts))))
    for failure in findings.failures:
        print(f"FAILED {failure}")
    return int(bool(findings.failures))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what it has started ends, too
    sys.exit(main())
