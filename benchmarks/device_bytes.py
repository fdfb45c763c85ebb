"""Bytes of device memory that operations of torch and kernels of ours read and write, by what they are given.

Each tensor that is read or written counts once, as large as it is: what torch or a kernel goes over several times
(`topk`, sorts, what is in a cache) counts no more. Of what they look up in a tensor, only that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

LOOKS_UP = {"aten::gather", "aten::index", "aten::index_select"}  # as much as the result holds, in the first operand
WRITES_WHERE = {"aten::index_fill_", "aten::index_put_"}  # parts of the first operand, and reads nothing of it
OF_REORDER = {
    "_fork_kv_kernel",
    "_reorder_counts_kernel",
}  # what they copy is what rows hold, and they copy it where rows fork


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of all that differs in a tensor: what is expanded is in memory once."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in sides if stride or not size) * tensor.itemsize


def of_operation(
    name: str, args: Sequence[Any], operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> int:
    """Bytes that an operation of torch reads and writes on a device.

    Args:
        name: As in its schema.
        args: What it was given.
        operands: Tensors among these, in order.
        results: Tensors that it returns, those among them that it has written to.
    """
    if name in WRITES_WHERE:
        written = _num_written(name, args) * operands[0].itemsize
        return written + sum(map(size_of, (tensor for tensor in operands[1:] if not tensor.is_cpu)))
    read = [size_of(tensor) for tensor in operands if not tensor.is_cpu]
    if name in LOOKS_UP:
        read[0] = min(read[0], results[0].numel() * results[0].itemsize)
    return sum(read) + sum(size_of(tensor) for tensor in results if not tensor.is_cpu)


def _num_written(name: str, args: Sequence[Any]) -> int:
    """Elements."""
    if name == "aten::index_fill_":
        tensor, dim, index = args[:3]
        return tensor.numel() // tensor.shape[dim] * index.numel()
    tensor, indices = args[:2]
    is_indexed = [at < len(indices) and indices[at] is not None for at in range(tensor.dim())]
    places = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    return prod(places) * prod(size for size, own in zip(tensor.shape, is_indexed, strict=True) if not own)


Arguments = Mapping[str, Any]
Grid = tuple[int, ...]

LOGITS_READ: dict[str, Callable[[Arguments, Grid], int]] = {  # by kernel: of how many tokens
    "_tile_max_kernel": lambda given, grid: grid[0] * given["vocab_size"],
    "_rank_rows_kernel": lambda given, grid: (
        grid[0] * given["count"] * given["tile"]
    ),  # of what ends there are mostly few
    "_rank_blocks_kernel": lambda given, grid: 0,  # likewise
    "_rank_tokens_kernel": lambda given, grid: given["chosen"].numel() * given["tile"],
    "_rank_items_kernel": lambda given, grid: grid[0] * given["children"],
    "_rank_item_tiles_kernel": lambda given, grid: grid[0] * given["num_places"],
    "_rank_items_of_tiles_kernel": lambda given, grid: given["chosen"].numel() * given["tile"],
    "_select_in_groups_kernel": lambda given, grid: given["keys"].numel(),
    "_write_logprobs_kernel": lambda given, grid: (grid[0] - given["num_rows"]) * grid[1] * given["vocab_size"],
}
CLASSES_READ: dict[str, Callable[[Arguments, Grid], int]] = {  # likewise; other kernels read one with each logit
    "_tile_max_kernel": lambda given, grid: given["num_mixed"] * given["tiles"] * given["tile"],
}
OF_CHILDREN = {"node_tokens": 1, "first_child": 2}  # of a catalog: how many numbers are read for each child's logit
OF_TILES = "_rank_tiles_kernel", "going"  # of which the kernel reads those in chosen blocks


def of_kernel(kernel: str, given: Arguments, grid: Grid) -> int:
    """Bytes that a kernel of ours reads and writes; none of those that reorder rows.

    Raises:
        KeyError: The kernel reads logits, and nothing here says how many.
    """
    if kernel in OF_REORDER:
        return 0
    total, tensors = 0, {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    reads_logits = "logits" in tensors and tensors["logits"].is_floating_point()
    num_logits = LOGITS_READ[kernel](given, grid) if reads_logits else 0
    for name, tensor in tensors.items():
        if name == "logits" and reads_logits:
            total += num_logits * tensor.itemsize
        elif name == "classes":
            total += min(CLASSES_READ[kernel](given, grid) if kernel in CLASSES_READ else num_logits, tensor.numel())
        elif name in OF_CHILDREN and num_logits:
            total += OF_CHILDREN[name] * num_logits * tensor.itemsize
        elif (kernel, name) == OF_TILES:
            total += given["chosen"].numel() * given["tiles"] * tensor.itemsize
        else:
            total += size_of(tensor)
    return total
