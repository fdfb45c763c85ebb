"""Puts functions of ours in the place of vLLM's Triton kernels, and calls them the way kernels are launched.

A function takes those of a kernel's arguments that it names: `input_ids` is the kernel's `input_ids_ptr`, `mask_stride`
its constant `MASK_STRIDE`. On a CPU "the device's" tensors are the host's, and nothing is ever on its way: an argument
that is annotated as `Array` is the tensor's memory as numpy sees it, which for a few rows is much quicker than torch.
One that has a default is an argument that the kernels of some supported versions of vLLM lack.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any, get_args, get_type_hints

import numpy as np

from vllm_trie.compat.patch import VLLMPatch

Array = np.ndarray
Function = Callable[..., Any]

_OF_ALL = "inputs", "logits", "sampling"  # modules that every engine needs
_MORE = {"drafts": ("draft_inputs", "ngram", "rejection"), "states": ("cached_states", "mamba")}  # by what one has
_V2 = "vllm.v1.worker.gpu."
_has_triton = VLLMPatch(_V2 + "spec_decode.ngram.speculator", "HAS_TRITON")
_kernels: dict[str, Function] = {}
_functions: dict[str, Function] = {}
_imported_by: dict[str, str] = {}


def kernel_on_cpu(target: str, package: str = _V2, imported_by: str = "") -> Callable[[Function], Function]:
    """Marks what takes a kernel's place, "module:name" within vLLM's V2 worker, or within another package.

    One module of the V2 worker may have imported it by name.
    """
    if imported_by:
        _imported_by[package + target] = _V2 + imported_by
    return lambda function: _kernels.setdefault(package + target, function)


def replaces_on_cpu(target: str, imported_by: str = "", package: str = _V2) -> Callable[[Function], Function]:
    """Marks what takes the place of a function or method, likewise."""
    if imported_by:
        _imported_by[package + target] = _V2 + imported_by
    return lambda function: _functions.setdefault(package + target, function)


def replacements_on_cpu() -> dict[str, Function]:
    """Everything that is replaced, by target."""
    for name in chain(_OF_ALL, *_MORE.values()):
        importlib.import_module(f"vllm_trie.worker.cpu.{name}")
    return _kernels | _functions


def install_replacements_on_cpu(*more: str) -> None:
    """Replace the kernels that an engine needs, in this process.

    Args:
        more: What it has: "drafts", or a model with recurrent "states".
    """
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    triton.next_power_of_2 = next_power_of_2  # which vLLM's placeholder for Triton lacks
    if not _has_triton.is_applied:
        _has_triton.apply(True)  # else there is no n-gram speculation
    for name in chain(_OF_ALL, *(_MORE[kind] for kind in more)):
        _replace_by_module_on_cpu(f"vllm_trie.worker.cpu.{name}")


@cache
def _replace_by_module_on_cpu(own_module: str) -> None:
    """Replace what a module of ours replaces."""
    importlib.import_module(own_module)
    for target, function in _kernels.items():
        if function.__module__ == own_module:
            module, name = target.split(":")
            stock = getattr(importlib.import_module(module), name)
            VLLMPatch(_imported_by.get(target, module), name).apply(Launch(stock, function))
    for target, function in _functions.items():
        if function.__module__ == own_module:
            module, name = target.split(":")
            owner, _, method = name.rpartition(".")
            VLLMPatch(f"{module}:{owner}" if owner else _imported_by.get(target, module), method).apply(function)


class Launch:
    """What takes a kernel's place: `kernel[grid](*arguments)` calls `function` with those of them that it names."""

    def __init__(self, kernel: Function, function: Function) -> None:
        self._launch = _compiled_launch_on_cpu(kernel, function)

    def __getitem__(self, grid: object) -> Function:
        return self._launch


def _compiled_launch_on_cpu(kernel: Function, function: Function) -> Function:
    """What has the kernel's signature, and calls `function`.

    Its code is written here, as to look up each argument's kind at each launch would take longer than most kernels.
    """
    parameters, hints = inspect.signature(kernel).parameters, get_type_hints(function)
    names = {name.removesuffix("_ptr"): name for name in parameters}
    taken = []
    for name, parameter in inspect.signature(function).parameters.items():
        found = names.get(name) or names.get(name.upper())
        if found is None and parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{kernel.__name__} has no argument {name}, which {function.__name__} takes")
        if found is not None and hints[name] is Array:
            taken.append(f"{name}={found}.numpy()")
        elif found is not None and Array in get_args(hints[name]):
            taken.append(f"{name}=None if {found} is None else {found}.numpy()")
        elif found is not None:
            taken.append(f"{name}={found}")
    signature = ", ".join(name if p.default is p.empty else f"{name}=None" for name, p in parameters.items())
    scope: dict[str, Any] = {"function": function}
    exec(f"def launch({signature}, **options): function({', '.join(taken)})", scope)
    return scope["launch"]
