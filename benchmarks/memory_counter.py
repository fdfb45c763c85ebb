"""Counts the bytes that are held on a device at a time, on tensors without content, see `weightless`."""

from __future__ import annotations

from collections import Counter
from typing import Any
from weakref import finalize

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryCounter(TorchDispatchMode):
    """Counts bytes of tensors that operations return on a device; what an operation needs for itself is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.most = 0
        self._tensors = Counter[int]()  # by the address of their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        known = {tensor.untyped_storage()._cdata for tensor in before}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor) or tensor.is_cpu or id(tensor) in map(id, before):
                continue
            storage = tensor.untyped_storage()
            address, num_bytes = storage._cdata, storage.nbytes()
            if address in known and address not in self._tensors:
                continue  # of what was there before
            self.held += 0 if self._tensors[address] else num_bytes
            self._tensors[address] += 1
            self.most = max(self.most, self.held)
            finalize(tensor, self._drop, address, num_bytes)
        return result

    def _drop(self, address: int, num_bytes: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.held -= num_bytes
