"""In the place of full CUDA graphs, on a CPU: what torch is asked for while one is captured, done again by each replay.

As on a GPU, a replay runs none of the Python in between, and reads and writes what was read and written at capture:
memory that was there before holds what it holds by now, and what the graph itself makes is worth nothing before it is
made anew. Where the host would wait, or upload something, a capture fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from vllm.platforms import current_platform
from vllm.v1.worker.gpu import cudagraph_utils

from vllm_trie.search import devices
from vllm_trie.worker.attention import prefix_suffix

WAITS = "aten::_local_scalar_dense"
SPOILED = 113  # what is found where nothing was made yet


class Graph:
    """In the place of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []
        self.made: list[torch.Tensor] = []
        self.num_replays = 0

    def note(self, run: Callable[[], Any], result: Any, arguments: Any) -> None:
        """Something was done, and will be by each replay, from the same memory to the same memory."""
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(arguments)}
        made = [tensor for tensor in _tensors(result) if tensor.untyped_storage().data_ptr() not in given]
        self.made += made
        places = _tensors(result)

        def again() -> None:
            for place, value in zip(places, _tensors(run()), strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        self.operations.append(again)

    def replay(self) -> None:
        self.num_replays += 1
        for tensor in self.made:
            tensor.fill_(SPOILED if tensor.dtype != torch.bool else True)
        for operation in self.operations:
            operation()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Notes all that torch is asked for in a graph."""

    active: Recorder | None = None

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        assert name != WAITS, "the host waits in a capture"
        if func.namespace == "vllm":  # Python, of which a capture sees what it does alone
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        result = func(*args, **kwargs)
        self.graph.note(lambda: func(*args, **kwargs), result, (args, kwargs))
        return result

    @contextmanager
    def capturing(self) -> Iterator[None]:
        with self, patch.object(Recorder, "active", self):
            yield


def as_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """One operation of a graph, whatever it does by itself: it may look at what tensors hold."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        if Recorder.active is None:
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
            Recorder.active.graph.note(lambda: function(*args, **kwargs), result, (args, kwargs))
        return result

    return launch


@contextmanager
def _graph(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    refused = AssertionError("uploaded in a capture")
    with ExitStack() as stack:
        for module, upload in product((devices, prefix_suffix), ("uploaded_for_search", "copy_into_for_search")):
            stack.enter_context(patch.object(module, upload, side_effect=refused))
        stack.enter_context(Recorder(graph).capturing())
        yield


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Within it vLLM's managers capture full graphs so."""
    with ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "CUDAGraph", Graph),
            (torch.cuda, "graph", _graph),
            (cudagraph_utils, "graph_capture", lambda **_: nullcontext()),
            (cudagraph_utils, "capture_pool", lambda *_: nullcontext()),
            (cudagraph_utils, "current_stream", lambda: None),
            (cudagraph_utils, "is_global_first_rank", lambda: False),
            (type(current_platform), "get_global_graph_pool", lambda _: None),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield
