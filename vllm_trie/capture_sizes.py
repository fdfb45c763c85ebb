"""Lets vLLM capture CUDA graphs of steps as wide as the widest search that an engine is to take.

vLLM captures none above 512 rows, on some GPUs 1,024, unless it is told to. Wider steps would launch each kernel of the
model from the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_trie.supported_engines import plugin_config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

MULTIPLE = 16  # of which vLLM's own sizes are multiples, from 256 on
PER_DOUBLING = 8  # further sizes: a step is padded by an eighth at most, and 8,192 rows take 32 more graphs than 512


def are_capture_sizes_set(engine_args: EngineArgs) -> bool:
    """Whether an engine's user says what is to be captured."""
    config = engine_args.compilation_config
    own = engine_args.cudagraph_capture_sizes, engine_args.max_cudagraph_capture_size
    return any(size is not None for size in (*own, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size))


def add_capture_sizes(vllm_config: VllmConfig) -> None:
    """Add sizes to those that vLLM has chosen, up to `max_beam_width`."""
    if are_capture_sizes_narrow(vllm_config):
        config = vllm_config.compilation_config
        most = _widest_capture_size(vllm_config, MULTIPLE)
        config.cudagraph_capture_sizes += wider_capture_sizes(config.max_cudagraph_capture_size, most)
        config.max_cudagraph_capture_size = most


def are_capture_sizes_narrow(vllm_config: VllmConfig) -> bool:
    """Whether graphs are captured, but none for the steps of the widest search."""
    widest_graph = vllm_config.compilation_config.max_cudagraph_capture_size
    return bool(widest_graph) and widest_graph < _widest_capture_size(vllm_config)


def capture_size_to_set(vllm_config: VllmConfig) -> int:
    """The size that a user must have captured so that it holds the widest search: one that vLLM does not truncate."""
    return -(-_widest_capture_size(vllm_config) // MULTIPLE) * MULTIPLE


def _widest_capture_size(vllm_config: VllmConfig, multiple: int = 1) -> int:
    """Rows of a step of the widest search that was asked for, rounded up as far as a step can be; 0: of none."""
    width = plugin_config_of(vllm_config).max_beam_width or 0
    return min(-(-width // multiple) * multiple, vllm_config.scheduler_config.max_num_seqs)


def wider_capture_sizes(widest: int, most: int) -> list[int]:
    """Sizes above `widest` up to `most`, ascending: multiples of an eighth of the power of two below each."""
    sizes = []
    while widest < most:
        step = max((1 << widest.bit_length() - 1) // PER_DOUBLING, 1)
        widest = min((widest // step + 1) * step, most)
        sizes.append(widest)
    return sizes
