"""How beams use the speculative decoding that an engine is configured with, and which configurations are refused."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from vllm_trie.compat.cpu import vllm_needs_cpu_kernels
from vllm_trie.kv_transfer_config import connectors_reading_freed_blocks
from vllm_trie.messages import MOST_DRAFTS
from vllm_trie.options.speculation import DRAFTS_PER_BEAM, MOST_DRAFTS_PER_BEAM, Drafts, options_speculate

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_trie.options import BeamParams

DRAFT_VOCABULARY = "DraftVocabularyLlama"  # architecture of draft models whose vocabulary is a part of the target's
UNSUPPORTED_HEADS = {  # methods of vLLM, and why
    "eagle": "which reads different hidden states than an EAGLE-3 head",
    "mtp": "whose modules may have separate KV caches, or read the target's",
    "dflash": "whose drafts do not depend on earlier drafts",
}


def speculative_config_drafts(vllm_config: VllmConfig) -> Drafts | None:
    """What drafts for the beams of an engine that has started; None if it does not speculate."""
    config = vllm_config.speculative_config
    if config is None:
        return None
    return "ngrams" if config.use_ngram() else "model"


def speculative_config_without_amateur(vllm_config: VllmConfig) -> str | None:
    """What an engine has instead of a draft model with the full vocabulary, as a clause; None if it has one."""
    config = vllm_config.speculative_config
    if config is None:
        return "has none"
    if not config.uses_draft_model():
        return f"drafts by method={config.method!r}"
    if DRAFT_VOCABULARY in config.draft_model_config.architectures:
        return f"has {config.model!r}, which proposes only a part of the tokens"
    return None


def speculative_config_drafter(vllm_config: VllmConfig) -> str:
    """The draft model of an engine, or its other method of drafting, for the log."""
    config = vllm_config.speculative_config
    return "off" if config is None else str(config.model)


def config_has_memory_mode(vllm_config: VllmConfig) -> bool:
    """Whether searches may have more beams than the engine has rows."""
    return vllm_config.speculative_config is not None


def speculative_config_layers(vllm_config: VllmConfig) -> int:
    """The most layers of a draft forest; 0 in engines without drafts."""
    config = vllm_config.speculative_config
    return 0 if config is None else int(config.num_speculative_tokens)


def speculative_config_shorter_length(vllm_config: VllmConfig) -> int | None:
    """The most tokens that the draft model takes; None if it takes as many as the target, or there is none.

    From vLLM 0.33 on no request may be longer than the draft model takes.
    """
    config = vllm_config.speculative_config
    if config is None or not config.uses_draft_model():
        return None
    length = int(config.draft_model_config.max_model_len)
    return length if length < vllm_config.model_config.max_model_len else None


def most_speculative_config_drafts(beam: BeamParams, num_layers: int) -> int:
    """The most drafts that one forward pass verifies for a search with these resolved options and so many layers."""
    per_beam = MOST_DRAFTS_PER_BEAM if beam.speculation == "auto" else DRAFTS_PER_BEAM
    draft_width = beam.draft_width or per_beam * beam.beam_width
    return min(num_layers * draft_width, MOST_DRAFTS) if options_speculate(beam) else 0


def load_speculation_class(name: str) -> Any:
    """Import a class of `vllm_trie.speculation` by "module:class"; only engines with drafts call it."""
    return resolve_name(f"vllm_trie.speculation.{name}")


def has_states_by_config(model: ModelConfig) -> bool:
    """Whether a model has layers with recurrent states: Mamba, linear attention, short convolutions."""
    return model.is_attention_free or model.is_hybrid


def unsupported_speculative_config(vllm_config: VllmConfig) -> dict[str, bool]:
    """Which settings of speculative decoding make beams impossible, and whether this engine has them."""
    config, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    without_triton = vllm_needs_cpu_kernels()
    if config is None:
        return {}
    is_supported = config.use_ngram() or config.uses_draft_model() or config.method == "eagle3"
    method = ", ".join([f"method={config.method!r}", *filter(None, [UNSUPPORTED_HEADS.get(config.method or "")])])
    model = vllm_config.model_config
    models = [model] if config.draft_model_config is None else [model, config.draft_model_config]
    drafts, block_size = config.num_speculative_tokens, vllm_config.cache_config.block_size
    too_many = block_size is not None and drafts >= block_size
    return {
        f'speculative_config with {method} (use "draft_model", "eagle3" or "ngram")': not is_supported,
        'speculative_config with a draft model on a model with M-RoPE positions (use "ngram")': model.uses_mrope
        and not config.use_ngram(),
        "speculative_config on an encoder-decoder model": model.is_encoder_decoder,
        "speculative_config on a model with recurrent states": any(map(has_states_by_config, models)),
        "parallel_drafting": config.parallel_drafting,
        "use_heterogeneous_vocab": config.use_heterogeneous_vocab,
        "disable_padded_drafter_batch": config.disable_padded_drafter_batch,
        "enable_adaptive_verification": config.enable_adaptive_verification,
        "pipeline_parallel_size > 1 together with speculative_config": parallel.pipeline_parallel_size > 1,
        "enable_lora together with speculative_config": vllm_config.lora_config is not None,
        "data_parallel_size > 1 of experts together with speculative_config": model.is_moe
        and parallel.data_parallel_size > 1,
        "rejection_sample_method on a CPU without Triton": without_triton
        and config.rejection_sample_method != "standard",
        "draft_sample_method on a CPU without Triton": without_triton and config.draft_sample_method != "greedy",
        "num_speculative_tokens_per_batch_size": config.num_speculative_tokens_per_batch_size is not None,
        # Drafts take their blocks after connectors were told which blocks a step writes.
        **{
            f"kv_transfer_config with {name} together with speculative_config": True
            for name in connectors_reading_freed_blocks(vllm_config)
        },
        f"num_speculative_tokens={drafts} with block_size={block_size} (use fewer than block_size)": too_many,
    }
