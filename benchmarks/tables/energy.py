"""Energy per token, where the machine measures it: RAPL of Linux' powercap, and NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import models
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.tables.throughput import searches

POWERCAP = Path("/sys/class/powercap")


class Meter:
    """Joules that processors, or GPUs, have taken."""

    def __init__(self, name: str, read: Callable[[], float], wraps_at: float = float("inf")) -> None:
        self.name, self._read, self._wraps_at = name, read, wraps_at

    def joules(self, run: Callable[[], Any]) -> float:
        before = self._read()
        run()
        taken = self._read() - before
        return taken if taken >= 0 else taken + self._wraps_at


def meters(powercap: Path = POWERCAP) -> list[Meter]:
    """All that can be read here; none on many virtual machines."""
    found = []
    for package in sorted(powercap.glob("intel-rapl:*")):
        counter = package / "energy_uj"
        if package.name.count(":") == 1 and _is_readable(counter):
            wraps_at = int((package / "max_energy_range_uj").read_text()) / 1e6
            name = (package / "name").read_text().strip()
            found.append(Meter(name, lambda counter=counter: int(counter.read_text()) / 1e6, wraps_at))
    return found + _gpus()


def joules_per_call(meter: Meter, run: Callable[[], Any], seconds: float) -> float:
    """What one call takes on average, over as many as fit into this time."""
    calls = 0

    def keep_running() -> None:
        nonlocal calls
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            run()
            calls += 1

    return meter.joules(keep_running) / calls


def _is_readable(counter: Path) -> bool:
    try:
        counter.read_text()
    except OSError:
        return False
    return True


def _gpus() -> list[Meter]:
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        meter = Meter(f"GPU {index}", lambda handle=handle: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        try:
            meter.joules(lambda: None)
        except pynvml.NVMLError:  # this device does not tell
            continue
        found.append(meter)
    return found


def cells(setting: Setting) -> list[Cell]:
    return [(width,) for width in setting.widths or setting.pick((3,), (9,), (3, 9, 15))]


def measure(bench: Bench, width: int) -> Measured:
    """Joules per token of the best answer, for at least some seconds of each search."""
    found = meters()
    if not found:
        return Measured([(width, "all", "not measured: no RAPL counter and no GPU that tells can be read here", "")])
    num_tokens = bench.setting.max_tokens or 32
    (prompt,) = bench.prompts(1)
    rows = []
    for name, search in searches(bench, models.AS_IT_IS, width, num_tokens).items():
        search([prompt])
        for meter in found:
            joules = joules_per_call(meter, lambda search=search: search([prompt]), bench.setting.pick(1, 5, 20))
            rows.append((width, name, meter.name, joules / num_tokens))
    return Measured(rows)


TABLE = Table(
    "Energy",
    ("beams", "search", "meter", "J per token"),
    cells,
    measure,
    "of the whole package or device, whatever else runs on it; tokens of the best answer",
)
