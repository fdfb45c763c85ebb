"""The entry point: adds beam search to engines that ask for it, and leaves all others alone.

vLLM calls `register` in every process, maybe more than once. It adds the `--plugin` flag and wraps
`EngineArgs.create_engine_config`. That flag, `VLLM_PLUGINS`, or a "trie_beam" entry in `additional_config` *selects* an
engine. A selected engine gets the plugin's scheduler and worker, checks its requests, and runs beam search calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import copy
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from vllm_trie.capture_sizes import (
    add_capture_sizes,
    are_capture_sizes_narrow,
    are_capture_sizes_set,
    capture_size_to_set,
)
from vllm_trie.compat.cpu import configure_vllm_on_cpu, vllm_needs_cpu_kernels
from vllm_trie.compat.fingerprint import CHECKED_STEPS, verify_vllm
from vllm_trie.compat.patch import VLLMPatch, wrap_vllm
from vllm_trie.compat.sources import installed_vllm
from vllm_trie.options import PLUGIN_NAME, EngineOptions
from vllm_trie.speculative_config import DRAFT_VOCABULARY, speculative_config_drafter
from vllm_trie.supported_engines import (
    ASYNC_SCHEDULER,
    SCHEDULER,
    has_beams,
    is_plugin_selected,
    most_plugin_beams,
    plugin_config_of,
    refuse_engine_without_beams,
    why_model_without_beams,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

logger = init_logger("vllm.trie_beam")

CPU_WORKER = "vllm_trie.worker.cpu_worker.BeamCPUWorker"
GPU_WORKER = "vllm_trie.worker.gpu_worker.BeamGPUWorker"
DRAFT_CLASS = f"vllm_trie.speculation.worker.draft_vocabulary:{DRAFT_VOCABULARY}"

create_engine_config = VLLMPatch("vllm.engine.arg_utils:EngineArgs", "create_engine_config")


def register() -> None:
    """Install the plugin; vLLM calls it in every process."""
    if not create_engine_config.is_applied:
        create_engine_config.wrap(_select_plugin)
        wrap_vllm("vllm_trie.entrypoints.cli")
        configure_vllm_on_cpu(has_beams)
        _register_plugin_draft_architecture()


def _register_plugin_draft_architecture() -> None:
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model(DRAFT_VOCABULARY, DRAFT_CLASS)  # imported only by engines that load it


def _select_plugin(
    original: Callable[..., VllmConfig],
    self: EngineArgs,
    usage_context: UsageContext | None = None,
    *args: Any,
    **kwargs: Any,
) -> VllmConfig:
    _refuse_plugin_near_misses(self.additional_config)
    if not is_plugin_selected(self):
        return original(self, usage_context, *args, **kwargs)
    options = EngineOptions.from_additional_config(self.additional_config)
    changed = verify_vllm(options.vllm_check, vllm_needs_cpu_kernels())
    _plugin_refuses_v1_runner()
    # vLLM writes what it infers into its arguments, and would take it for the user's the next time: hence the copy.
    arguments = copy(self)
    _plugin_takes_over(arguments)
    vllm_config = original(arguments, usage_context, *args, **kwargs)
    if unsupported := why_model_without_beams(vllm_config):
        logger.warning("%s does not support %s: this engine runs without beams", PLUGIN_NAME, unsupported)
        vllm_config = original(self, usage_context, *args, **kwargs)
    else:
        vars(self).update(vars(arguments))
        refuse_engine_without_beams(vllm_config)
        _check_plugin_files(vllm_config)
        if not are_capture_sizes_set(arguments):
            add_capture_sizes(vllm_config)
        if vllm_config.scheduler_config.async_scheduling:
            vllm_config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
        _log_plugin_start(vllm_config, changed)
    _wrap_plugin_front_end(usage_context, keeps_stats=not self.disable_log_stats)
    return vllm_config


def _log_plugin_start(vllm_config: VllmConfig, changed: list[str]) -> None:
    """Log one line about this engine, and warnings about its vLLM build and settings."""
    config, parallel, version = plugin_config_of(vllm_config), vllm_config.parallel_config, installed_vllm().version
    if parallel._api_process_count > 1 and parallel._api_process_rank >= 0:
        return  # one of several API servers of an engine; their parent process has logged
    if changed:
        text = "%s was written for another build of vLLM %s, but may fit. The first %d steps of groups are checked. %s"
        logger.warning(text, PLUGIN_NAME, version, CHECKED_STEPS, f"Differences: {', '.join(changed)}")
    if vllm_needs_cpu_kernels() and _is_plugin_latent_eager(vllm_config):
        text = "with enforce_eager=True vLLM itself computes latent attention incorrectly on a CPU: leave it out, or %s"
        logger.warning(text, "set compilation_config={'custom_ops': ['-rotary_embedding']}")
    if are_capture_sizes_narrow(vllm_config):
        widest, size = vllm_config.compilation_config.max_cudagraph_capture_size, capture_size_to_set(vllm_config)
        text = "max_beam_width=%d, but steps of more than %d rows replay no CUDA graph: %s, or set no capture sizes"
        cure = f"raise max_cudagraph_capture_size to {size}, or add {size} to cudagraph_capture_sizes"
        logger.warning(text, config.max_beam_width, widest, cure)
    logger.info(
        "%s on vLLM %s%s, Model Runner V2: beams up to %d wide, semantics %s, speculation %s, prefix sharing %s",
        *(PLUGIN_NAME, version, f" ({len(changed)} pieces differ from the record)" if changed else ""),
        *(most_plugin_beams(vllm_config), config.semantics, speculative_config_drafter(vllm_config)),
        "on" if vllm_config.cache_config.enable_prefix_caching else "off",
    )


def _is_plugin_latent_eager(vllm_config: VllmConfig) -> bool:
    """Whether a custom kernel, not compiled code, applies rotary embeddings to the keys of latent attention."""
    model, off = vllm_config.model_config, {"none", "-rotary_embedding"}
    return model.use_mla and model.enforce_eager and off.isdisjoint(vllm_config.compilation_config.custom_ops)


def _check_plugin_files(vllm_config: VllmConfig) -> None:
    from vllm_trie.worker.attention.check_attention import check_demanded_attention

    if plugin_config_of(vllm_config).has_files:
        from vllm_trie.entrypoints.requests.catalogs import catalogs_for_requests

        catalogs_for_requests(vllm_config)
    check_demanded_attention(vllm_config)


def _wrap_plugin_front_end(usage_context: UsageContext | None, keeps_stats: bool) -> None:
    """Wrap the parts of the front end that receive requests and return answers.

    For an `LLM`, known by its usage context, the server's parts are left out. Any other engine may be served.
    """
    from vllm.usage.usage_lib import UsageContext

    # A process that has imported `AsyncLLM` may make one from any config.
    is_offline = usage_context is UsageContext.LLM_CLASS and "vllm.v1.engine.async_llm" not in sys.modules
    answers = "answers.search_state", "answers.logprobs", "answers.answer_start"
    endpoints = "server", "use_beam_search", "streams", "generate_api", "catalog_api", "speech"
    of_stats = ("server.metrics",) if keeps_stats or not is_offline else ()
    of_servers = () if is_offline else ("async_llm", *(f"server.{name}" for name in endpoints))
    for module in ("requests.requests", "llm", "llm_engine", *answers, *of_stats, *of_servers):
        wrap_vllm(f"vllm_trie.entrypoints.{module}")


def _refuse_plugin_near_misses(additional_config: dict[str, Any] | None) -> None:
    for key in additional_config or {}:
        if key != PLUGIN_NAME and get_close_matches(str(key), [PLUGIN_NAME], cutoff=0.8):
            raise ValueError(f"unknown key {key!r} in additional_config; did you mean {PLUGIN_NAME!r}?")


def _plugin_refuses_v1_runner() -> None:
    import vllm.envs as envs

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ValueError(f"{PLUGIN_NAME} needs vLLM's Model Runner V2; unset VLLM_USE_V2_MODEL_RUNNER=0")


def _plugin_takes_over(engine_args: EngineArgs) -> None:
    from vllm.platforms import current_platform

    worker = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    if engine_args.scheduler_cls not in (None, SCHEDULER):
        raise ValueError(f"scheduler_cls={engine_args.scheduler_cls!r} and {PLUGIN_NAME} exclude each other; drop one")
    if engine_args.worker_cls not in ("auto", worker):
        raise ValueError(f"worker_cls={engine_args.worker_cls!r} and {PLUGIN_NAME} exclude each other; drop one")
    engine_args.scheduler_cls, engine_args.worker_cls = SCHEDULER, worker
