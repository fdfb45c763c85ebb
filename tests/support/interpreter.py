"""A process in which vLLM has Triton, interpreted, and runs its own kernels for a test that has it not.

The tests' processes must do without Triton, as users' CPUs do. So a test calls the same function, vLLM's or its own, in
both, with the same arguments.
"""

from __future__ import annotations

import pickle
import runpy
from collections.abc import Mapping, Sequence
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

SHIM = Path(__file__).with_name("triton_on_cpu") / "sitecustomize.py"
Outcome = tuple[Any, list[Any]]  # what a function returned, and its arguments as it left them


class Interpreter:
    """The process. `check` calls a function there and here, and compares."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def check(self, target: str, *arguments: Any, tolerance: float = 0.0) -> Any:
        """Raise AssertionError unless "module:name" returns and writes the same here as there.

        Returns:
            What it returns.
        """
        expected, found = self.call(target, *arguments), _call(target, arguments)
        assert_same(found, expected, tolerance)
        return found[0]

    def call(self, target: str, *arguments: Any) -> Outcome:
        """Call "module:name" there."""
        self._pipe.send_bytes(pickle.dumps((target, arguments)))
        outcome = pickle.loads(self._pipe.recv_bytes())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        self._process.kill()


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise AssertionError where two structures of tensors and numbers differ."""
    if isinstance(expected, np.ndarray):
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    elif isinstance(expected, Mapping):
        assert_same([*found.values()], [*expected.values()], tolerance)
    elif isinstance(expected, SimpleNamespace):
        assert_same(vars(found), vars(expected), tolerance)
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, tolerance)
    else:
        assert found == expected


def _call(target: str, arguments: Sequence[Any]) -> Outcome:
    module, name = target.split(":")
    own = pickle.loads(pickle.dumps(list(arguments)))
    return getattr(import_module(module), name)(*own), own


def _serve(pipe: Connection) -> None:
    runpy.run_path(str(SHIM))
    _let_masks_come_of_reductions()
    import vllm.v1.worker.cpu.shm  # noqa: F401  patches torch for a CPU

    from tests.support import language_once  # noqa: F401

    while True:
        target, arguments = pickle.loads(pipe.recv_bytes())
        try:
            outcome: Outcome | Exception = _call(target, arguments)
        except Exception as error:
            outcome = error
        pipe.send_bytes(pickle.dumps(outcome))


def _let_masks_come_of_reductions() -> None:
    """What a comparison with a reduction results in is a number to Triton's interpreter, which it takes for no mask."""
    from triton.runtime.interpreter import InterpreterBuilder

    load = InterpreterBuilder.create_masked_load

    def load_where(self: Any, pointers: Any, mask: Any, *args: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *args)

    InterpreterBuilder.create_masked_load = load_where
