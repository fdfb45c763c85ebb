"""Lets vLLM capture CUDA graphs for steps as wide as the widest search of an engine; the plugin's entry point calls it.

By default vLLM captures none above 512 rows, on some GPUs 1,024. Wider steps would launch each kernel of the model from
the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_trie.supported_engines import plugin_config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

MULTIPLE = 16  # vLLM's own sizes are multiples of this, from 256 on
PER_DOUBLING = 8  # added sizes: padding is at most an eighth of a step, and 8,192 rows take 32 more graphs than 512


def are_capture_sizes_set(engine_args: EngineArgs) -> bool:
    """Whether the engine's user set the sizes to capture."""
    config = engine_args.compilation_config
    own = engine_args.cudagraph_capture_sizes, engine_args.max_cudagraph_capture_size
    return any(size is not None for size in (*own, config.cudagraph_capture_sizes, config.max_cudagraph_capture_size))


def add_capture_sizes(vllm_config: VllmConfig) -> None:
    """Extend the sizes that vLLM chose up to `max_beam_width`."""
    if are_capture_sizes_narrow(vllm_config):
        config = vllm_config.compilation_config
        most = _widest_capture_size(vllm_config, MULTIPLE)
        config.cudagraph_capture_sizes += wider_capture_sizes(config.max_cudagraph_capture_size, most)
        config.max_cudagraph_capture_size = most


def are_capture_sizes_narrow(vllm_config: VllmConfig) -> bool:
    """Whether graphs are captured, but none as wide as the steps of the widest search."""
    widest_graph = vllm_config.compilation_config.max_cudagraph_capture_size
    return bool(widest_graph) and widest_graph < _widest_capture_size(vllm_config)


def capture_size_to_set(vllm_config: VllmConfig) -> int:
    """The smallest capture size that fits the widest search and that vLLM does not truncate."""
    return -(-_widest_capture_size(vllm_config) // MULTIPLE) * MULTIPLE


def _widest_capture_size(vllm_config: VllmConfig, multiple: int = 1) -> int:
    """Rows of a step at `max_beam_width`, rounded up to `multiple`, at most `max_num_seqs`; 0 without this option."""
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
