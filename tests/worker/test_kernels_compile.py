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
NUM_KERNELS = 11


def test_kernels_compile_for_hopper_and_spill_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "compile_kernels.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    kernels = json.loads(result.stdout.splitlines()[-1])
    assert len(kernels) == NUM_KERNELS
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert not kernel["atomics"], f"{kernel['name']} has atomics, so that ranks may disagree"
        assert " STACK:0 " in kernel["usage"], kernel
        assert " LOCAL:0 " in kernel["usage"], kernel
