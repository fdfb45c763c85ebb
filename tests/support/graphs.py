"""What vLLM captures as CUDA graphs where there is a GPU, found out without one."""

from __future__ import annotations

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_trie import plugin


def as_on_a_gpu(engine_args: EngineArgs, mode: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE) -> VllmConfig:
    """The configuration of an engine, in which vLLM has chosen what to capture; the plugin has seen nothing of it."""
    create = plugin.create_engine_config
    config = (create.original if create.is_applied else EngineArgs.create_engine_config)(engine_args)
    graphs, asked = config.compilation_config, engine_args.compilation_config
    graphs.cudagraph_mode = mode
    graphs.cudagraph_capture_sizes = engine_args.cudagraph_capture_sizes or asked.cudagraph_capture_sizes
    graphs.max_cudagraph_capture_size = engine_args.max_cudagraph_capture_size or asked.max_cudagraph_capture_size
    config._set_cudagraph_sizes()
    return config
