"""Names in the place of vLLM's, so that the worker's modules can be imported where vLLM is not installed.

They are enough to select and to reorder rows on tensors: of all that these modules import of vLLM, a step calls one
function, `async_tensor_h2d`. Everything else is compared with, by `isinstance`, or written in signatures.
"""

from __future__ import annotations

import logging
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language

from vllm_trie.search.devices import uploaded_for_search

PACKAGE = "vllm"


def async_tensor_h2d(
    data: Any, device: torch.device | None = None, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What vLLM's does: a copy on the device, for which nobody waits."""
    assert device is not None
    assert out is None
    on_host = torch.from_numpy(data) if isinstance(data, np.ndarray) else torch.as_tensor(data)
    return uploaded_for_search(on_host.to(dtype or on_host.dtype).contiguous().numpy(), device)


_REAL: dict[str, dict[str, Any]] = {  # what must do something
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn)},
    "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    "vllm.utils.torch_utils": {"async_tensor_h2d": async_tensor_h2d},
}


class _StandIn(ModuleType):
    """A module that has every name, each a class without content."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == PACKAGE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_REAL.get(module.__name__, {}))


def stand_in_for_vllm() -> bool:
    """Let vLLM's names be there, where vLLM is not. Returns whether it is not."""
    if not is_there(PACKAGE):
        sys.meta_path.insert(0, _Finder())
    return is_stood_in_for()


def is_stood_in_for() -> bool:
    """Whether vLLM's names are these."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def is_there(package: str) -> bool:
    """Whether a package can be imported, and is itself."""
    try:
        spec = find_spec(package)
    except ImportError:
        return False
    return spec is not None and not isinstance(spec.loader, _Finder)
