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
MOST_SHARED_BYTES = 99 << 10  # that a GPU since Ampere has at least, which heads of more than 128 take
NUM_KERNELS = 31


def test_kernels_compile_as_they_run_and_spill_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "compile_kernels.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert len(kernels) == NUM_KERNELS
    for kernel in kernels:
        has_large_heads = (kernel["head_size"] or 0) > 128
        assert kernel["shared"] <= (MOST_SHARED_BYTES if has_large_heads else SHARED_BYTES), kernel
        assert not kernel["atomics"], f"{kernel['name']} has atomics, so that ranks may disagree"
        assert " STACK:0 " in kernel["usage"], kernel
        assert " LOCAL:0 " in kernel["usage"], kernel
