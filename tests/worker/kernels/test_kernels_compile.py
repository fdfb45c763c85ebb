"""Every kernel compiles for a GPU and fits in its registers, though no GPU is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

SHARED_BYTES = 48 << 10  # that any kernel may have without asking
MOST_SHARED_BYTES = 99 << 10  # that a GPU since Ampere has at least
NEED_MORE = "'head_size': 256", "'kept': 128"  # for the largest heads; to rank the most continuations of a row
NUM_KERNELS = 106


def compiled_by(script: str) -> Any:
    """What a script prints that compiles kernels, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", str(ROOT / "tests" / "support" / script)]  # -P: beside it lies a tokenizers.py
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_kernels_that_are_launched_compile_together_and_none_is_launched() -> None:
    """There is no GPU: a launch would fail."""
    assert compiled_by("compile_together.py") == {"counts": [2, 0], "compiled": [True, True]}


def test_kernels_compile_as_they_run_and_spill_nothing() -> None:
    kernels = compiled_by("compile_kernels.py")
    assert len(kernels) == NUM_KERNELS
    for kernel in kernels:
        needs_more = any(text in kernel["constants"] for text in NEED_MORE)
        assert kernel["shared"] <= (MOST_SHARED_BYTES if needs_more else SHARED_BYTES), kernel
        assert not kernel["atomics"], f"{kernel['name']} has atomics, so that ranks may disagree"
        assert " STACK:0 " in kernel["usage"], kernel
        assert " LOCAL:0 " in kernel["usage"], kernel
