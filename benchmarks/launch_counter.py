"""Counts what a GPU would be asked for, where there is none: on tensors without content, see `weightless`."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import device_bytes

LAUNCH_NOTHING = {  # besides views
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::_unsafe_view", "aten::_reshape_alias", "aten::resize_", "aten::set_"),
}
FROM_VALUES = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
COPIES = {"aten::_to_copy", "aten::copy_"}
READS = "aten::_local_scalar_dense"  # item(), bool(), int(), float()


class LaunchCounter(TorchDispatchMode):
    """Counts operations of torch on a device and the bytes of these, copies from and to the host, and its waits.

    The host waits for copies that it does not ask to be non-blocking, and for what it reads, which is 0.
    An operation whose result is as large as values say (`nonzero`, masks as indices) cannot run: torch raises.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []  # their names, in order
        self.copies = self.waits = self.num_bytes = 0
        self._from_values = _FromValues(self)

    def __enter__(self) -> LaunchCounter:
        self._from_values.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._from_values.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == READS and not tensors[0].is_cpu:
            self.waits += 1
            return torch.zeros((), dtype=tensors[0].dtype).item()
        if name in COPIES and self._crosses(tensors, kwargs):
            self.copies += 1
            self.waits += not (kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:] == (True,)))
            if name == "aten::_to_copy" and not tensors[0].is_cpu:
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        is_there = any(not tensor.is_cpu for tensor in (*tensors, *written))
        if is_there and not func.is_view and name not in LAUNCH_NOTHING:
            self.operations.append(name.removeprefix("aten::"))
            self.num_bytes += device_bytes.of_operation(name, args, tensors, written)
        return result

    @staticmethod
    def _crosses(tensors: list[torch.Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether a copy goes from the host to the device, or back."""
        devices = {tensor.device.type for tensor in tensors}
        if (to := kwargs.get("device")) is not None:
            devices.add(torch.device(to).type)
        return len(devices) > 1


class _FromValues(TorchFunctionMode):
    """Sees tensors made of the host's values, which without content are made without a copy."""

    def __init__(self, counter: LaunchCounter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies = self._counter.copies
        result = func(*args, **(kwargs or {}))
        if func in FROM_VALUES and not result.is_cpu and self._counter.copies == copies:
            self._counter.copies += 1
            self._counter.waits += 1
        return result
