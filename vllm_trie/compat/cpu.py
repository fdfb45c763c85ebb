"""Lets engines with beam groups use Model Runner V2 and async scheduling on a CPU, where vLLM itself uses neither."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm_trie.compat.patch import VLLMPatch
from vllm_trie.compat.versions import vllm_workers_ask_triton

if TYPE_CHECKING:
    from vllm.config import VllmConfig

use_v2_model_runner = VLLMPatch("vllm.config.vllm:VllmConfig", "use_v2_model_runner")
validate_v2_model_runner = VLLMPatch("vllm.config.vllm:VllmConfig", "_validate_v2_model_runner")
check_and_update_config = VLLMPatch("vllm.platforms.cpu:CpuPlatform", "check_and_update_config")


def vllm_needs_cpu_kernels() -> bool:
    """Whether this is a CPU on which vLLM's Triton kernels cannot run."""
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    return current_platform.is_cpu() and not HAS_TRITON


def unsupported_by_vllm_cpu(vllm_config: VllmConfig) -> dict[str, bool]:
    """Which features have no CPU kernels, and whether this engine uses them."""
    if not vllm_needs_cpu_kernels():
        return {}
    model = vllm_config.model_config
    features = {
        "enable_trace_replay": model.enable_trace_replay,
        "watermark_config": vllm_config.watermark_config is not None,
    }
    return {f"{feature} on a CPU without Triton": is_used for feature, is_used in features.items()}


def accept_vllm_v2_runner() -> AbstractContextManager[None]:
    """Let a worker that is created in this `with` block accept Model Runner V2 without Triton."""
    if vllm_workers_ask_triton() and vllm_needs_cpu_kernels():
        return VLLMPatch("vllm.v1.worker.gpu_worker", "HAS_TRITON").applied(True)
    return nullcontext()


def configure_vllm_on_cpu(has_beams: Callable[[VllmConfig], bool]) -> None:
    """Wrap vLLM's choice of runner and scheduling on a CPU; engines without beam groups keep that choice."""
    from vllm.platforms import current_platform

    if check_and_update_config.is_applied or not current_platform.is_cpu():
        return

    def keep_async_scheduling(platform: Any, /, vllm_config: VllmConfig, **kwargs: Any) -> None:
        chosen = vllm_config.scheduler_config.async_scheduling
        check_and_update_config.original.__func__(platform, vllm_config, **kwargs)
        if has_beams(vllm_config):
            vllm_config.scheduler_config.async_scheduling = chosen

    check_and_update_config.apply(classmethod(keep_async_scheduling))
    if vllm_needs_cpu_kernels():
        v2, check = use_v2_model_runner, validate_v2_model_runner
        v2.apply(property(lambda config: has_beams(config) or v2.original.fget(config)))
        check.apply(lambda config: None if has_beams(config) else check.original(config))  # the plugin checks itself
