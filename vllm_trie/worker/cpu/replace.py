"""Replaces vLLM's Triton kernels by functions, which are called the way kernels are launched.

A function names the kernel arguments that it takes: `input_ids` is the kernel's `input_ids_ptr`, `mask_stride` its
constant `MASK_STRIDE`. On a CPU "the device's" tensors are the host's, and no copy is ever pending: an argument
annotated as `Array` is the tensor's memory as a numpy array, which for a few rows is much faster than torch.
An argument with a default is one that the kernels of some supported versions of vLLM lack.
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
_MORE = {"drafts": ("draft_inputs", "ngram", "rejection"), "states": ("cached_states", "mamba")}  # by feature
_V2 = "vllm.v1.worker.gpu."
_has_triton = VLLMPatch(_V2 + "spec_decode.ngram.speculator", "HAS_TRITON")
_replacements: dict[str, Function] = {}  # by target
_imported_by: dict[str, str] = {}


def replaces_on_cpu(target: str, package: str = _V2, imported_by: str = "") -> Callable[[Function], Function]:
    """Marks the replacement of a kernel, function or method, "module:name" within vLLM's V2 worker or a package.

    The names of kernels, and only these, end with `_kernel`. `imported_by` is a module of the V2 worker that imports
    the target by name.
    """
    if imported_by:
        _imported_by[package + target] = _V2 + imported_by
    return lambda function: _replacements.setdefault(package + target, function)


def replacements_on_cpu() -> dict[str, Function]:
    """All replacements, by target."""
    for name in chain(_OF_ALL, *_MORE.values()):
        importlib.import_module(f"vllm_trie.worker.cpu.{name}")
    return _replacements


def install_replacements_on_cpu(*more: str) -> None:
    """Replaces the kernels that an engine needs, in this process.

    Args:
        more: The engine's features: "drafts", or a model with recurrent "states".
    """
    from vllm.triton_utils import triton
    from vllm.utils.math_utils import next_power_of_2

    triton.next_power_of_2 = next_power_of_2  # which vLLM's placeholder for Triton lacks
    if not _has_triton.is_applied:
        _has_triton.apply(True)  # without it there is no n-gram speculation
    for name in chain(_OF_ALL, *(_MORE[kind] for kind in more)):
        _replace_by_module_on_cpu(f"vllm_trie.worker.cpu.{name}")


@cache
def _replace_by_module_on_cpu(own_module: str) -> None:
    """Applies the replacements of one of our modules."""
    importlib.import_module(own_module)
    for target, function in _replacements.items():
        if function.__module__ == own_module:
            module, name = target.split(":")
            replacement: object = function
            if name.endswith("_kernel"):
                replacement = Launch(getattr(importlib.import_module(module), name), function)
            owner, _, method = name.rpartition(".")
            VLLMPatch(f"{module}:{owner}" if owner else _imported_by.get(target, module), method).apply(replacement)


class Launch:
    """Takes a kernel's place: `kernel[grid](*arguments)` calls `function` with the arguments that it names."""

    def __init__(self, kernel: Function, function: Function) -> None:
        self._launch = _compiled_launch_on_cpu(kernel, function)

    def __getitem__(self, grid: object) -> Function:
        return self._launch


def _compiled_launch_on_cpu(kernel: Function, function: Function) -> Function:
    """A function with the kernel's signature that calls `function`.

    Its code is generated, because inspecting the arguments at each launch would take longer than most kernels.
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
