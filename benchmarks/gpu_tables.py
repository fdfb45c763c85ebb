"""Tables of what a GPU gave: to the terminal, and as JSON in the form that `benchmarks.report` makes pages of.

They need torch alone; where rich is installed, they are printed as tables.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.stand_ins import is_there
from vllm_trie import __version__


def tell(name: str, title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], note: str, out: Path) -> None:
    """Print a table, and write it to a folder.

    Args:
        name: Of its file.
        title: Above it.
        columns: Theirs, as in the table.
        rows: Cells; floats are printed to three digits, and written as they are.
        note: Below it.
        out: The folder.
    """
    printed = f"{_device()}, torch {torch.__version__}; {note}"
    if is_there("rich"):
        from benchmarks.common import show

        show(title, columns, rows, printed)
    else:
        print(f"\n{title}\n" + " | ".join(columns))
        for row in rows:
            print(" | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row))
        print(printed, flush=True)
    write(name, title, columns, rows, note, out)


def write(name: str, title: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]], note: str, out: Path) -> None:
    """Write a table alone: see `tell`."""
    machine = {"processor": _device(), "torch": torch.__version__, "vllm": _vllm(), "vllm_trie": __version__}
    script = Path(sys.argv[0])
    module = script.parent.name if script.stem == "__main__" else script.stem
    command = " ".join(["python -m", f"benchmarks.{module}", *sys.argv[1:]])
    content = {"title": title, "note": note, "columns": list(columns), "command": command, "machine": machine}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(content | {"cells": [{"rows": rows}]}, indent=1) + "\n")


@cache
def _device() -> str:
    """The GPU, or the processor where there is none.

    Where CUDA has not started in this process, whose engines may be forks, vLLM asks NVIDIA's library of management.
    """
    processor = platform.processor() or platform.machine()
    if torch.cuda.is_initialized() or not is_there("vllm"):
        return torch.cuda.get_device_name() if torch.cuda.is_available() else processor
    from vllm.platforms import current_platform

    return current_platform.get_device_name() if current_platform.is_cuda() else processor


def _vllm() -> str | None:
    """Its version, where it is installed."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None
