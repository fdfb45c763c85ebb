"""The architectures that are tried, each as a tiny random model that transformers makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 300
EOS = 1
WINDOW = 40  # tokens; no multiple of a block
WEIGHTS_SPREAD = 0.3

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": WEIGHTS_SPREAD,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
MHA = {"num_key_value_heads": 4}
TIED = {"tie_word_embeddings": True}  # vLLM ties these whatever the configuration says
EXPERTS = {
    "num_experts_per_tok": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
}
GROUPED_EXPERTS = {**EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 64}
GPT = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 32}  # sizes CPUs can do
MAMBA2 = {
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "mamba_n_heads": 8,
}
DELTA = {
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "initializer_range": 0.1,
    **TIED,
}
SHORT_STEPS = {"time_step_min": 1e-9}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FOUR_WINDOWS = {"sliding_window": WINDOW, "num_hidden_layers": 4, "layer_types": WINDOWS["layer_types"] * 2}
NO_KERNEL = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}  # it is wrong for latent attention on CPUs
CHUNKS = {
    "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 128,
}


@dataclass(frozen=True)
class Architecture:
    """What is tried.

    Attributes:
        name: As people call it.
        examples: Published models.
        config: The name of transformers' class of configurations.
        options: Of the configuration, besides `COMMON`.
        engine: Options of the engine.
        saved: Fields that vLLM reads and transformers does not save.
        without: What of `COMMON` the configuration does not take.
        twin: vLLM's kernel takes bfloat16 alone: one of `gated_delta` replaces it.
        quantise: What to do with the saved model's weights.
        note: What the table says of it.
    """

    name: str
    examples: str
    config: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    saved: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    twin: bool = False
    quantise: Callable[[Path], None] | None = None
    note: str = ""


def _of(name: str, examples: str, config: str, *options: dict[str, Any], **rest: Any) -> Architecture:
    merged = {key: value for part in options for key, value in part.items()}
    return Architecture(name, examples, config, merged, **rest)


TWIN = {"twin": True, "note": "with gated_delta.py for vLLM's CPU kernel, which takes bfloat16 alone"}
CLAMPED = "with time_step_min=1e-9: transformers clamps short time steps of prompts, vLLM does not"
# On a processor with AMX vLLM would choose a backend that takes bfloat16 alone.
LATENT_IN_FLOAT32 = {**NO_KERNEL, "attention_backend": "CPU_MLA"}
EAGER_LATENT = {"engine": LATENT_IN_FLOAT32, "note": "with custom_ops -rotary_embedding"}
ARCHITECTURES: Sequence[Architecture] = (
    _of("Llama", "Llama 2, 3, SmolLM2", "LlamaConfig"),
    _of("Mistral", "Mistral 7B v0.1", "MistralConfig", {"sliding_window": WINDOW}),
    _of("Mixtral", "Mixtral 8x7B", "MixtralConfig", EXPERTS),
    _of("Qwen2", "Qwen2.5", "Qwen2Config"),
    _of("Qwen2-MoE", "Qwen1.5-MoE, Qwen2-57B-A14B", "Qwen2MoeConfig", SHARED_EXPERT),
    _of("Qwen3", "Qwen3 0.6B to 32B", "Qwen3Config"),
    _of("Qwen3-MoE", "Qwen3-30B-A3B", "Qwen3MoeConfig", EXPERTS),
    _of("Qwen3-Next", "Qwen3-Next-80B-A3B", "Qwen3NextConfig", SHARED_EXPERT, DELTA, **TWIN),
    _of("Qwen3.5", "Qwen3.5", "Qwen3_5TextConfig", DELTA, **TWIN),
    _of("Gemma", "Gemma 2B, 7B", "GemmaConfig", TIED),
    _of("Gemma-2", "Gemma 2", "Gemma2Config", TIED, FOUR_WINDOWS, {"query_pre_attn_scalar": 32}),
    _of("Gemma-3", "Gemma 3", "Gemma3TextConfig", TIED, FOUR_WINDOWS, {"query_pre_attn_scalar": 32}),
    _of(
        "Gemma-4",
        "Gemma 4",
        "Gemma4TextConfig",
        TIED,
        FOUR_WINDOWS,
        {"global_head_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY},
    ),
    _of("Phi", "Phi-1.5, Phi-2", "PhiConfig", MHA),
    _of("Phi-3", "Phi-3, Phi-4", "Phi3Config"),
    _of("gpt-oss", "gpt-oss 20B, 120B", "GptOssConfig", EXPERTS, WINDOWS),
    _of("GPT-2", "GPT-2", "GPT2Config", GPT, TIED),
    _of("GPT-J", "GPT-J 6B", "GPTJConfig", GPT, {"rotary_dim": 16}),
    _of("GPT-NeoX", "Pythia, GPT-NeoX 20B", "GPTNeoXConfig", without=("num_key_value_heads", "head_dim")),
    _of("GPT-BigCode", "StarCoder", "GPTBigCodeConfig", GPT, TIED, without=("num_key_value_heads", "head_dim")),
    _of("Bloom", "BLOOM, BLOOMZ", "BloomConfig", {"n_layer": 2, "n_head": 4}, TIED),
    _of(
        "OPT",
        "OPT",
        "OPTConfig",
        {"pad_token_id": 2, "ffn_dim": 128, "word_embed_proj_dim": 128, "init_std": 0.3},
        TIED,
    ),
    _of("Falcon", "Falcon 7B", "FalconConfig", {"multi_query": True, "alibi": False}, TIED, without=("head_dim",)),
    _of(
        "Falcon with ALiBi",
        "Falcon-RW",
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "alibi": True},
        TIED,
        without=("head_dim",),
    ),
    _of("Falcon-H1", "Falcon-H1", "FalconH1Config", MAMBA2, {"mamba_d_ssm": 128, "mamba_d_head": 16}),
    _of("Falcon-Mamba", "Falcon-Mamba 7B", "FalconMambaConfig", {"state_size": 16}, without=("intermediate_size",)),
    _of("StableLM", "StableLM 2", "StableLmConfig"),
    _of("StarCoder2", "StarCoder2", "Starcoder2Config", TIED),
    _of("Nemotron", "Nemotron-4, Minitron", "NemotronConfig"),
    _of(
        "Nemotron-H",
        "Nemotron-H, Nemotron Nano 2 and 3",
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "expand": 2,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 64,
        },
        GROUPED_EXPERTS,
        SHORT_STEPS,
        note=CLAMPED,
    ),
    _of("Granite", "Granite 3", "GraniteConfig"),
    _of("GraniteMoE", "Granite 3 MoE", "GraniteMoeConfig", EXPERTS),
    _of(
        "Granite-4",
        "Granite 4 hybrids",
        "GraniteMoeHybridConfig",
        EXPERTS,
        MAMBA2,
        {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "position_embedding_type": "rope",
            "shared_intermediate_size": 128,
            "mamba_d_head": 32,
        },
    ),
    _of(
        "Mamba",
        "Mamba 130M to 2.8B",
        "MambaConfig",
        {"state_size": 16},
        without=("intermediate_size",),
    ),
    _of(
        "Mamba-2",
        "Mamba-2, Codestral Mamba",
        "Mamba2Config",
        {"num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 16},
        without=("intermediate_size",),
    ),
    _of(
        "Jamba",
        "Jamba",
        "JambaConfig",
        EXPERTS,
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "use_mamba_kernels": False,
        },
    ),
    _of(
        "Zamba2",
        "Zamba2",
        "Zamba2Config",
        MHA,
        TIED,
        SHORT_STEPS,
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": False,
            "adapter_rank": 8,
            "chunk_size": 16,
            "use_mem_rope": True,
        },
        without=("head_dim",),
        note=CLAMPED,
    ),
    _of(
        "LFM2",
        "LFM2",
        "Lfm2Config",
        CONVOLUTIONS,
        {"block_auto_adjust_ff_dim": False},
        saved={"conv_dim": 128, "block_dim": 128},
    ),
    _of(
        "LFM2-MoE",
        "LFM2-8B-A1B",
        "Lfm2MoeConfig",
        EXPERTS,
        CONVOLUTIONS,
        {"num_dense_layers": 1},
        saved={"conv_dim": 128, "block_dim": 128},
    ),
    _of("ERNIE-4.5", "ERNIE 4.5 0.3B", "Ernie4_5Config", TIED),
    _of(
        "ERNIE-4.5-MoE",
        "ERNIE 4.5 21B-A3B",
        "Ernie4_5_MoeConfig",
        TIED,
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
    ),
    _of("EXAONE-4", "EXAONE 4.0", "Exaone4Config", FOUR_WINDOWS, {"sliding_window_pattern": 2}),
    _of("OLMo", "OLMo 1B, 7B", "OlmoConfig"),
    _of("OLMo-2", "OLMo 2", "Olmo2Config"),
    _of("OLMo-3", "OLMo 3", "Olmo3Config", FOUR_WINDOWS),
    _of("OLMoE", "OLMoE 1B-7B", "OlmoeConfig", EXPERTS),
    _of("GLM", "GLM-4 9B", "GlmConfig"),
    _of("GLM-4", "GLM-4-0414", "Glm4Config"),
    _of("GLM-4-MoE", "GLM-4.5, GLM-4.6", "Glm4MoeConfig", GROUPED_EXPERTS),
    _of(
        "MiniCPM-3",
        "MiniCPM3 4B",
        "MiniCPM3Config",
        MHA,
        {
            "q_lora_rank": 64,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "head_dim": 64,
        },
    ),
    _of(
        "DeepSeek-V2",
        "DeepSeek-V2, V2-Lite",
        "DeepseekV2Config",
        MHA,
        GROUPED_EXPERTS,
        LATENT,
        {"q_lora_rank": None},
        **EAGER_LATENT,
    ),
    _of(
        "DeepSeek-V3",
        "DeepSeek-V3, R1",
        "DeepseekV3Config",
        MHA,
        GROUPED_EXPERTS,
        LATENT,
        {"q_lora_rank": 64},
        saved={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        without=("head_dim",),
        **EAGER_LATENT,
    ),
    _of("Cohere", "Command R", "CohereConfig", TIED),
    _of("Cohere-2", "Command R7B, Command A", "Cohere2Config", TIED, FOUR_WINDOWS),
    _of("Llama-4", "Llama 4 Scout, Maverick", "Llama4TextConfig", EXPERTS, {"num_experts_per_tok": 1}, CHUNKS),
    _of(
        "Llama-4, one KV cache",
        "Llama 4 Scout, Maverick",
        "Llama4TextConfig",
        EXPERTS,
        {"num_experts_per_tok": 1},
        CHUNKS,
        engine={"disable_hybrid_kv_cache_manager": True},
        note="with disable_hybrid_kv_cache_manager=True",
    ),
    _of("SmolLM3", "SmolLM3 3B", "SmolLM3Config"),
    _of("Seed-OSS", "Seed-OSS 36B", "SeedOssConfig"),
    _of("HunYuan-dense", "Hunyuan 0.5B to 7B", "HunYuanDenseV1Config", {"use_qk_norm": True}),
    _of("Arcee", "AFM 4.5B", "ArceeConfig"),
    _of("Apertus", "Apertus 8B, 70B", "ApertusConfig"),
    _of(
        "MiniMax-M2",
        "MiniMax-M2",
        "MiniMaxM2Config",
        EXPERTS,
        {"rotary_dim": 32},
        saved={"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def make(architecture: Architecture, folder: Path) -> str:
    """Save a random model in which EOS comes up often, and a tokenizer. The name of the model's class."""
    import torch
    import transformers

    torch.manual_seed(7)
    options = {key: value for key, value in COMMON.items() if key not in architecture.without} | architecture.options
    config = getattr(transformers, architecture.config)(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    head = model.get_output_embeddings()
    if head is not None and not config.tie_word_embeddings:
        with torch.no_grad():
            head.weight[EOS] *= 3
    model.save_pretrained(folder)
    if architecture.saved:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | architecture.saved))
    if architecture.quantise:
        architecture.quantise(folder)
    _tokenizer().save_pretrained(folder)
    return type(model).__name__


def _tokenizer() -> Any:
    """One word a token: vLLM's own loop over beams wants a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token=f"w{EOS}", unk_token="w2")
