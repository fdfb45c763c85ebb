"""Every kernel compiles for a GPU and fits in its registers, though no GPU is at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.engine import ROOT

pytestmark = pytest.mark.slow

SHARED_BYTES = 48 << 10  # that any kernel may have without asking
MOST_SHARED_BYTES = 99 << 10  # that a GPU since Ampere has at least
NEED_MORE = "'head_size': 256", "'kept': 128"  # for the largest heads; to rank the most continuations of a row
NUM_KERNELS = 92


def test_kernels_compile_as_they_run_and_spill_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "compile_kernels.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert len(kernels) == NUM_KERNELS
    for kernel in kernels:
        needs_more = any(text in kernel["constants"] for text in NEED_MORE)
        assert kernel["shared"] <= (MOST_SHARED_BYTES if needs_more else SHARED_BYTES), kernel
        assert not kernel["atomics"], f"{kernel['name']} has atomics, so that ranks may disagree"
        assert " STACK:0 " in kernel["usage"], kernel
        assert " LOCAL:0 " in kernel["usage"], kernel
