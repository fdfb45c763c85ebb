"""The processes that are compared, one engine or peer in each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.against.cases import AGAIN, ANSWER_WIDTHS, OLDER, PAPER, STOCK, Case
from benchmarks.common import BLOCK_SIZE, PAIR, TARGET
from benchmarks.harness import MAX_NUM_SEQS

ROOT = Path(__file__).resolve().parents[2]
CHILD = Path(__file__).with_name("child.py")
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK_SIZE,
    "max_model_len": 1024,
    "max_num_seqs": max(ANSWER_WIDTHS),
    "max_logprobs": 2 * MAX_NUM_SEQS,
    "kv_cache_memory_bytes": 512 << 20,
}


class Side:
    """A process that runs `benchmarks.against.child`: one case when asked, and nothing in between.

    Raises:
        RuntimeError: from any method, it ended; with its last words.
    """

    def __init__(
        self, name: str, checkout: Path, model: str, options: dict[str, Any] | None, computes: bool = True
    ) -> None:
        self._name, self._said = name, tempfile.TemporaryFile("w+")  # noqa: SIM115
        environment = {**os.environ, "PYTHONPATH": str(checkout), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        command = [sys.executable, "-P", str(CHILD), json.dumps([model, options, computes])]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        self._process: Any = subprocess.Popen(command, env=environment, cwd=checkout, text=True, **pipes)
        self._read()

    def run(self, case: Case) -> dict[str, Any]:
        """What `benchmarks.against.child` measures of a case."""
        print(json.dumps([case.batches, case.options]), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        if line := self._process.stdout.readline():
            return json.loads(line)
        self._process.wait()
        self._said.seek(0)
        raise RuntimeError(f"{self._name} ended:\n{self._said.read()[-3000:]}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Sides:
    """Of this checkout and an older one, each started when first asked for.

    Args:
        folder: For the older checkout, and for models made on the way.
    """

    def __init__(self, revision: str, folder: Path) -> None:
        self._older, self._folder = folder / "older", folder
        self._alive: dict[tuple[str, int, int | None], Side] = {}
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(self._older, filter="data")

    def of(self, names: Sequence[str], case: Case) -> dict[str, Side]:
        """Those that a case needs, with its target and draft; all others are closed."""
        needed = [(name, case.depth, case.layers) for name in names]
        for unneeded in self._alive.keys() - needed:
            self._alive.pop(unneeded).close()
        for one in needed:
            if one not in self._alive:
                self._alive[one] = self._start(*one)
        return {one[0]: self._alive[one] for one in needed}

    def close(self) -> None:
        for side in self._alive.values():
            side.close()

    def _start(self, name: str, depth: int, layers: int | None) -> Side:
        kind, options = name.removesuffix(AGAIN), dict(ENGINE)
        if kind != STOCK:
            options["additional_config"] = {"trie_beam": {}}
        if layers is not None:
            draft = {"method": "draft_model", "model": str(PAIR / "draft"), "num_speculative_tokens": layers}
            options["speculative_config"] = draft
        checkout = self._older if kind == OLDER else ROOT
        return Side(name, checkout, self._model(depth), None if kind == PAPER else options, depth > 0)

    def _model(self, depth: int) -> str:
        if depth <= 1:
            return str(TARGET)
        folder = self._folder / f"{depth}x"
        if not folder.exists():
            models.make(f"{depth}x deeper", str(TARGET), folder)
        return str(folder)
