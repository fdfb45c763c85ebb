"""Which engines have beam groups, and why others cannot; the plugin and the front end ask this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm_trie.compat.cpu import unsupported_by_vllm_cpu
from vllm_trie.kv_transfer_config import unsupported_kv_transfer_config
from vllm_trie.options import PLUGIN_NAME, EngineOptions
from vllm_trie.options.speculation import check_drafts_for_options
from vllm_trie.speculative_config import (
    has_states_by_config,
    speculative_config_drafts,
    unsupported_speculative_config,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

SCHEDULER = "vllm_trie.engine.scheduler.BeamScheduler"
ASYNC_SCHEDULER = "vllm_trie.engine.scheduler.AsyncBeamScheduler"

_parsed: dict[int, tuple[object, EngineOptions]] = {}  # by the id of an `additional_config`, kept alive with it


def is_plugin_selected(engine: EngineArgs | VllmConfig) -> bool:
    """Whether the user selected the plugin for this engine."""
    import vllm.envs as envs

    return PLUGIN_NAME in (envs.VLLM_PLUGINS or ()) or PLUGIN_NAME in (engine.additional_config or {})


def plugin_config_of(vllm_config: VllmConfig) -> EngineOptions:
    """The plugin's options for an engine, parsed once."""
    options = vllm_config.additional_config
    if id(options) not in _parsed:
        _parsed[id(options)] = options, EngineOptions.from_additional_config(options)
    return _parsed[id(options)][1]


def has_beams(vllm_config: VllmConfig) -> bool:
    """Whether this engine has beam groups."""
    return vllm_config.scheduler_config.scheduler_cls in (SCHEDULER, ASYNC_SCHEDULER)


def most_plugin_beams(vllm_config: VllmConfig) -> int:
    """How wide a search may be in this engine."""
    most = vllm_config.scheduler_config.max_num_seqs
    return min(plugin_config_of(vllm_config).max_beam_width or most, most)


def why_without_beams(vllm_config: VllmConfig) -> str:
    """Why this engine has no beam groups, as a phrase that follows the name of the requested feature."""
    if is_plugin_selected(vllm_config):
        return f"with {why_model_without_beams(vllm_config)}, which {PLUGIN_NAME} does not support"
    return f'on an engine without beam search; start it with additional_config={{"{PLUGIN_NAME}": {{}}}}'


def engine_has_logits_processors(vllm_config: VllmConfig) -> bool:
    """Whether this engine has custom logits processors, by argument or by entry point."""
    return bool(vllm_config.model_config.logits_processors) or _has_installed_processors()


@cache
def _has_installed_processors() -> bool:
    return bool(entry_points(group="vllm.logits_processors"))


def model_padding_token(model_config: ModelConfig, generation_config: Mapping[str, Any]) -> int | None:
    """The padding token of a model, found as transformers' `generate` finds it; None if it has none."""
    of_model = getattr(model_config.hf_config, "pad_token_id", None)  # missing in some kinds of models
    token = generation_config.get("pad_token_id", of_model)
    return token if token is not None and 0 <= token < model_config.get_vocab_size() else None


def model_suppressed_tokens(
    model_config: ModelConfig, generation_config: Mapping[str, Any]
) -> tuple[list[int], list[int]] | None:
    """The tokens that a generation configuration suppresses in transformers' `generate`; None if there are none.

    Only for encoder-decoder models: vLLM's decoder-only models with such tokens (Gemma 4) suppress them themselves.

    Returns:
        The tokens suppressed everywhere, and those suppressed as the first token.
    """
    if not _follows_generation_config(model_config):
        return None
    names, vocab_size = ("suppress_tokens", "begin_suppress_tokens"), model_config.get_vocab_size()
    both = [[token for token in generation_config.get(name) or () if 0 <= token < vocab_size] for name in names]
    return (both[0], both[1]) if any(both) else None


def model_timestamp_rules(
    model_config: ModelConfig, generation_config: Mapping[str, Any], prompt: Sequence[int]
) -> tuple[int, int, int | None] | None:
    """What Whisper's rules of timestamps need, as transformers' `generate` reads it; None if they do not apply.

    They apply to encoder-decoder models that have `<|notimestamps|>`, after prompts without it. If the configuration
    lists tasks, the prompt must name one: before the task a model names the language, not a timestamp.

    Returns:
        EOS, `<|notimestamps|>`, and the greatest index of the first timestamp, if there is a bound.
    """
    no_timestamps = generation_config.get("no_timestamps_token_id")
    if not _follows_generation_config(model_config) or no_timestamps is None or no_timestamps in prompt:
        return None
    eos = generation_config.get("eos_token_id") or generation_config.get("bos_token_id")
    if not (isinstance(eos, int) and 0 < eos <= no_timestamps < model_config.get_vocab_size() - 1):
        return None
    tasks = (generation_config.get("task_to_id") or {}).values()
    is_at_task = not tasks or any(task in prompt for task in tasks)
    return (eos, no_timestamps, generation_config.get("max_initial_timestamp_index")) if is_at_task else None


def model_decoder_prompt(
    model_config: ModelConfig, generation_config: Mapping[str, Any], prompt: list[int]
) -> list[int]:
    """A prompt as transformers has it: before Whisper's `<|startofprev|>`, vLLM alone puts a start token.

    Source: transformers 5.19 `GenerationMixin._prepare_decoder_input_ids_for_generation`.
    """
    previous = generation_config.get("prev_sot_token_id")
    is_extended = _follows_generation_config(model_config) and previous is not None and prompt[1:2] == [previous]
    return prompt[1:] if is_extended else prompt


def _follows_generation_config(model_config: ModelConfig) -> bool:
    """Whether searches follow what a generation configuration rules beyond parameters of sampling."""
    return model_config.is_encoder_decoder and model_config.generation_config != "vllm"


def why_model_without_beams(vllm_config: VllmConfig) -> str | None:
    """Why beam groups are impossible with this engine's model; None if they are possible."""
    runner = vllm_config.model_config.runner_type
    return None if runner == "generate" else f"runner={runner!r}"


def refuse_engine_without_beams(vllm_config: VllmConfig) -> None:
    """Refuse to start an engine in which beams would be wrong.

    Raises:
        ValueError: names the feature and what would work.
    """
    model, parallel, scheduler = vllm_config.model_config, vllm_config.parallel_config, vllm_config.scheduler_config
    budget = scheduler.max_num_scheduled_tokens
    unsupported = {
        "return_sampling_mask": model.return_sampling_mask,
        "enable_return_routed_experts": vllm_config.aux_output_config.enable_return_routed_experts,
        "video_pruning_rate on a model with M-RoPE positions": model.uses_mrope and _model_prunes_videos(model),
        "enable_batch_sharded_sampling": parallel.enable_batch_sharded_sampling,
        f"max_num_scheduled_tokens={budget} below max_num_seqs={scheduler.max_num_seqs}": budget is not None
        and budget < scheduler.max_num_seqs,
        **unsupported_speculative_config(vllm_config),
        **dict.fromkeys(vllm_config._get_v2_model_runner_unsupported_features(), True),
        "a machine without Triton, which Model Runner V2 needs": not vllm_config.use_v2_model_runner,
        **unsupported_by_vllm_cpu(vllm_config),
        "ec_transfer_config (encoders elsewhere)": vllm_config.ec_transfer_config is not None,
        **unsupported_kv_transfer_config(vllm_config),
        "kv_transfer_config on a model with recurrent states": vllm_config.kv_transfer_config is not None
        and has_states_by_config(model),
        "use_replayssm": vllm_config.cache_config.use_replayssm,
        "distributed_executor_backend='external_launcher' with several ranks": is_plugin_launched_apart(parallel),
        "decode_context_parallel_size > 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size > 1": parallel.prefill_context_parallel_size > 1,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise ValueError(f"{PLUGIN_NAME} does not support {feature}; start vLLM without it or without the plugin")
    check_drafts_for_options(
        plugin_config_of(vllm_config).speculation, speculative_config_drafts(vllm_config), f"{PLUGIN_NAME}."
    )


def _model_prunes_videos(model: ModelConfig) -> bool:
    """Whether vLLM drops tokens of encoded videos and recomputes the positions of the prompt."""
    return model.multimodal_config is not None and model.multimodal_config.is_multimodal_pruning_enabled()


def is_plugin_launched_apart(parallel: ParallelConfig) -> bool:
    """Whether each rank has its own scheduler; their random seeds would differ."""
    return parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1
