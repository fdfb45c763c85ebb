"""Full CUDA graphs of plain steps in engines that speculate.

In such engines vLLM captures full graphs of steps in which each row has as many tokens as an ordinary request with its
drafts. In a plain step each beam's row has one: it would replay piecewise graphs, and launch attention from the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager


def capture_plain_step_graphs(manager: CudaGraphManager) -> None:
    """Makes vLLM also capture, and replay, full graphs of decoding steps with one token per row.

    To be called before it captures. Adds nothing where vLLM does so anyway, or where decoding steps have no full graphs
    of their own.
    """
    if manager.decode_query_len > 1 and has_full_decode_graphs(manager):
        list_decode_graphs(manager, decode_graph_sizes(manager), 1)


def has_full_decode_graphs(manager: CudaGraphManager) -> bool:
    """Whether decoding steps have full graphs of their own."""
    mode = manager.cudagraph_mode
    return bool(mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL)


def decode_graph_sizes(manager: CudaGraphManager) -> list[int]:
    """Rows of the graphs that vLLM captures, ascending."""
    return sorted({min(size, manager.max_num_reqs) for size in manager.compilation_config.cudagraph_capture_sizes})


def list_decode_graphs(
    manager: CudaGraphManager, sizes: Sequence[int], uniform_token_count: int, max_query_len: int | None = None
) -> None:
    """Lists a graph for each number of rows, ascending, ahead of vLLM's for as many.

    The widest are captured first: by these vLLM measures what graphs take, and buffers are allocated for them.

    Args:
        sizes: These numbers.
        uniform_token_count, max_query_len: Of all of them, see vLLM.
    """
    graphs = [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, uniform_token_count, max_query_len) for size in sizes
    ]
    captured = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    captured[:0] = graphs
    captured.sort(key=lambda graph: graph.num_tokens, reverse=True)
    num_covered = 0
    for graph in graphs:
        for num_tokens in range(num_covered + 1, graph.num_tokens + 1):
            manager._candidates.setdefault((num_tokens, 0), []).insert(0, graph)
        num_covered = graph.num_tokens
