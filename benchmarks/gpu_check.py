"""On a GPU: our kernels against their references and timed; with vLLM's CUDA build also whole searches.

    python -m benchmarks.gpu_check

The kernels need torch and Triton alone. Every table goes to the terminal and, as JSON, to `--out`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import gpu_attention, gpu_kernels, shared_prefix
from benchmarks.common import console, save, show

PARITY = ("tests/worker", "tests/behaviour/search/test_kernels.py", "tests/behaviour/search/test_parity.py")
SPEED = ("throughput", "concurrency")


def check_kernels(out: Path, num_inputs: int) -> None:
    """Check and time kernels on real shapes."""
    device = torch.device("cuda")
    rows = list(tqdm(gpu_kernels.on_real_shapes(device, num_inputs), total=len(gpu_kernels.SHAPES), leave=False))
    note = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16 logits, {gpu_kernels.LAYERS} layers, "
        f"block size {gpu_kernels.BLOCK_SIZE}, {gpu_kernels.NUM_TOKENS} tokens per row; medians over {num_inputs} "
        "inputs; a step is modelled: 8B weights and each row's KV read once, at the speed of a copy on this device"
    )
    show("Kernels, each equal to its reference", gpu_kernels.COLUMNS, rows, note)
    save(out, "gpu_kernels", gpu_kernels.COLUMNS, rows, note)


def check_attention(out: Path) -> None:
    """Check and time attention over shared blocks, and along trees, by our kernels; and by xformers, if it is there."""
    rows = list(gpu_attention.by_prefix(torch.device("cuda")))
    show("Attention over shared blocks, by our kernels", gpu_attention.COLUMNS, rows, gpu_attention.NOTE)
    save(out, "gpu_attention", gpu_attention.COLUMNS, rows, gpu_attention.NOTE)
    rows = list(gpu_attention.by_tree(torch.device("cuda")))
    show("Attention along trees", gpu_attention.TREE_COLUMNS, rows, gpu_attention.TREE_NOTE)
    save(out, "gpu_trees", gpu_attention.TREE_COLUMNS, rows, gpu_attention.TREE_NOTE)
    if find_spec("xformers") is None:
        console.print("Attention to a shared prefix by xformers is left out: xformers is not installed.")
        return
    rows = list(shared_prefix.by_prefix(torch.device("cuda")))
    show("Attention to a shared prefix, by xformers", shared_prefix.COLUMNS, rows, shared_prefix.NOTE)
    save(out, "shared_prefix", shared_prefix.COLUMNS, rows, shared_prefix.NOTE)


def check_searches(out: Path) -> bool:
    """Whole searches against transformers, and the speed tables. Returns whether all of it succeeded."""
    if find_spec("vllm") is None:
        console.print("Whole searches are left out: vLLM is not installed.")
        return True
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        console.print("Whole searches are left out: this vLLM is not built for CUDA.")
        return True
    commands = (
        ["pytest", "-n", "0", "-q", *PARITY],
        ["benchmarks", "--only", *SPEED, "--out", str(out)],
    )
    codes = [subprocess.run([sys.executable, "-m", *command]).returncode for command in commands]
    return not any(codes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=3, help="input sets per shape")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for the JSON files")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"gpu_check needs a GPU with CUDA, and torch {torch.__version__} finds none on this machine.")
    check_kernels(args.out, args.inputs)
    check_attention(args.out)
    if not check_searches(args.out):
        raise SystemExit("Whole searches failed; see above.")


if __name__ == "__main__":
    main()
