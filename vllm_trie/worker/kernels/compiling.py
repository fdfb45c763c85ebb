"""Compiles kernels on all cores before their first launch; one by one they would take a minute."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

PACKAGE = __name__.partition(".")[0]


def compile_kernels_together(launch: Callable[[], None]) -> int:
    """Compiles all kernels of this package that a function launches, in the variants in which it launches them.

    None of them runs, so `launch` must not depend on what they write. Does nothing where Triton interprets kernels.

    Returns:
        How many variants were new.
    """
    if knobs.runtime.interpret:
        return 0
    wanted: dict[tuple[Any, object], str] = {}
    stock = JITFunction.run

    def run(kernel: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return stock(kernel, *args, warmup=warmup or _is_our_kernel(kernel.module), **kwargs)

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Returns whether Triton must not compile it."""
        if is_ours := _is_our_kernel(fn.module):
            wanted[fn.jit_function, compile["key"]] = compile["specialization_data"]
        return is_ours

    with patch.object(JITFunction, "run", run), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    device = driver.active  # each thread has its own current device, for which it compiles
    with ThreadPoolExecutor(  # LLVM and ptxas run in parallel
        len(os.sched_getaffinity(0)),
        initializer=device.set_current_device,
        initargs=(device.get_current_device(),),
    ) as threads:
        compiled = [threads.submit(kernel.preload, variant) for (kernel, _), variant in wanted.items()]
    for one in compiled:
        one.result()
    return len(compiled)


def _is_our_kernel(module: str) -> bool:
    return module.partition(".")[0] == PACKAGE
