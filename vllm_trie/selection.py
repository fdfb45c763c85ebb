"""Which engines have beam groups, and why others cannot."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_trie.compat.cpu import unsupported_without_triton
from vllm_trie.options import PLUGIN_NAME, TrieBeamConfig, check_drafts

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

SCHEDULER = "vllm_trie.engine.scheduler.BeamScheduler"
ASYNC_SCHEDULER = "vllm_trie.engine.async_scheduler.AsyncBeamScheduler"


def is_selected(additional_config: dict[str, Any] | None) -> bool:
    """Whether an engine with this `additional_config` shall have beam groups."""
    import vllm.envs as envs

    return PLUGIN_NAME in (envs.VLLM_PLUGINS or ()) or PLUGIN_NAME in (additional_config or {})


def has_beams(vllm_config: VllmConfig) -> bool:
    """Whether this engine has beam groups."""
    return vllm_config.scheduler_config.scheduler_cls in (SCHEDULER, ASYNC_SCHEDULER)


def why_without_beams(vllm_config: VllmConfig) -> str:
    """Why this engine has no beam groups, to follow the name of what was asked of it."""
    if is_selected(vllm_config.additional_config):
        return f"with {unsupported_model(vllm_config)}, for which {PLUGIN_NAME} has no beams"
    return f'on an engine without beam search; start it with additional_config={{"{PLUGIN_NAME}": {{}}}}'


def has_logits_processors(vllm_config: VllmConfig) -> bool:
    """Whether this engine's user brought logits processors of their own, as an argument or installed."""
    return bool(vllm_config.model_config.logits_processors) or bool(entry_points(group="vllm.logits_processors"))


def unsupported_model(vllm_config: VllmConfig) -> str | None:
    """What about this engine's model makes beam groups impossible, if anything."""
    model = vllm_config.model_config
    unsupported = {
        f"runner={model.runner_type!r}": model.runner_type != "generate",
        "an encoder-decoder model": model.is_encoder_decoder,
        "a model without attention, or with Mamba or linear attention layers": model.is_attention_free
        or model.is_hybrid,
        "a model with M-RoPE positions": model.uses_mrope,
    }
    return next((feature for feature, is_used in unsupported.items() if is_used), None)


def refuse_unsupported_engine(vllm_config: VllmConfig) -> None:
    """Refuse to start an engine in which beams would be wrong.

    Raises:
        ValueError: naming the feature and what would work.
    """
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens
    unsupported = {
        "return_sampling_mask": vllm_config.model_config.return_sampling_mask,
        "enable_batch_sharded_sampling": parallel.enable_batch_sharded_sampling,
        f"max_num_scheduled_tokens={budget} below max_num_seqs={scheduler.max_num_seqs}": budget is not None
        and budget < scheduler.max_num_seqs,
        **_unsupported_speculation(vllm_config),
        **dict.fromkeys(vllm_config._get_v2_model_runner_unsupported_features(), True),
        "a machine without Triton, which Model Runner V2 needs": not vllm_config.use_v2_model_runner,
        **unsupported_without_triton(vllm_config),
        "kv_transfer_config (KV connectors)": vllm_config.kv_transfer_config is not None,
        "distributed_executor_backend='external_launcher' with several ranks": is_launched_apart(parallel),
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise ValueError(f"{PLUGIN_NAME} does not support {feature}; start vLLM without it or without the plugin")
    config = TrieBeamConfig.from_additional_config(vllm_config.additional_config)
    check_drafts(config.speculation, vllm_config.speculative_config is not None, f"{PLUGIN_NAME}.")


def is_launched_apart(parallel: ParallelConfig) -> bool:
    """Whether each rank has a scheduler of its own: these would draw different seeds."""
    return parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1


def _unsupported_speculation(vllm_config: VllmConfig) -> dict[str, bool]:
    """What about this engine's speculation makes beams impossible."""
    config = vllm_config.speculative_config
    if config is None:
        return {}
    drafts, block_size = config.num_speculative_tokens, vllm_config.cache_config.block_size
    too_many = block_size is not None and drafts >= block_size
    return {
        f'speculative_config with method={config.method!r} (use "draft_model")': config.method != "draft_model",
        "parallel_drafting": config.parallel_drafting,
        "use_heterogeneous_vocab": config.use_heterogeneous_vocab,
        "disable_padded_drafter_batch": config.disable_padded_drafter_batch,
        "enable_adaptive_verification": config.enable_adaptive_verification,
        "enable_lora together with speculative_config": vllm_config.lora_config is not None,
        "data_parallel_size > 1 of experts together with speculative_config": vllm_config.model_config.is_moe
        and vllm_config.parallel_config.data_parallel_size > 1,
        "num_speculative_tokens_per_batch_size": config.num_speculative_tokens_per_batch_size is not None,
        f"num_speculative_tokens={drafts} with block_size={block_size} (use fewer than block_size)": too_many,
    }
