"""Full CUDA graphs of plain steps in engines that speculate.

In such engines vLLM captures full graphs of steps in which each row has as many tokens as an ordinary request with its
drafts. In a plain step each beam's row has one: it would replay piecewise graphs, and launch attention from the host.
"""

from __future__ import annotations

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager


def capture_plain_step_graphs(manager: CudaGraphManager) -> None:
    """Makes vLLM also capture, and replay, full graphs of decoding steps with one token per row.

    To be called before it captures. Adds nothing where vLLM does so anyway, or where decoding steps have no full graphs
    of their own.
    """
    mode, sizes = manager.cudagraph_mode, manager.compilation_config.cudagraph_capture_sizes
    if manager.decode_query_len == 1 or not mode.separate_routine() or mode.decode_mode() != CUDAGraphMode.FULL:
        return
    num_covered = 0
    captured = manager._capture_descs.setdefault(CUDAGraphMode.FULL, [])
    for size in sorted({min(size, manager.max_num_reqs) for size in sizes}):
        graph = BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, uniform_token_count=1)
        captured.append(graph)
        for num_tokens in range(num_covered + 1, size + 1):
            manager._candidates.setdefault((num_tokens, 0), []).insert(0, graph)
        num_covered = size
    captured.sort(key=lambda graph: graph.num_tokens, reverse=True)  # the widest first: buffers are allocated for it
