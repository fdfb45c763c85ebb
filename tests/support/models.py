"""Tiny random models, one of each kind of attention, drafts of them, and a LoRA adapter with what it makes merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

WINDOW = 40  # tokens; no multiple of a block
COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MHA: dict[str, Any] = {**COMMON, "num_key_value_heads": 4}
TOY: dict[str, Any] = {**COMMON, "vocab_size": 16, "num_hidden_layers": 1, "initializer_range": 0.15}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
ATTENTION = ("head_dim", "intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
MAMBA2_IN_HYBRIDS: dict[str, Any] = {
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
    "tie_word_embeddings": False,
}
DELTA_IN_HYBRIDS: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
}
KINDS: dict[str, Callable[[], PretrainedConfig]] = {
    "gqa": lambda: LlamaConfig(**COMMON),
    "mha": lambda: LlamaConfig(**MHA),
    "phi3": lambda: Phi3Config(**{**_without(MHA, "head_dim"), "hidden_size": 128}),
    "mistral": lambda: MistralConfig(**COMMON, sliding_window=WINDOW),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "opt": lambda: OPTConfig(
        **{
            **_without(MHA, "head_dim", "intermediate_size", "initializer_range"),
            "hidden_size": 128,
            "pad_token_id": 2,
        },
        ffn_dim=128,
        word_embed_proj_dim=128,
        init_std=0.3,
    ),
    "gemma2": lambda: Gemma2Config(
        **{**COMMON, "num_hidden_layers": 4}, sliding_window=WINDOW, query_pre_attn_scalar=32
    ),
    "gemma2_uncapped": lambda: Gemma2Config(
        **{**COMMON, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=None,
    ),
    "mixtral": lambda: MixtralConfig(**COMMON, **EXPERTS, num_local_experts=4),
    "granite4": lambda: GraniteMoeHybridConfig(
        **{**_without(COMMON, "head_dim"), **MAMBA2_IN_HYBRIDS, "hidden_size": 128, "num_hidden_layers": 4},
        layer_types=["mamba", "attention", "mamba", "mamba"],
        position_embedding_type="rope",
        shared_intermediate_size=128,
        mamba_n_heads=8,
        mamba_d_head=32,
        num_local_experts=4,
        **EXPERTS,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **COMMON, **MAMBA2_IN_HYBRIDS, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16
    ),
    "mamba2": lambda: Mamba2Config(
        **_without(COMMON, *ATTENTION),
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=16,
        tie_word_embeddings=False,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **{**COMMON, **DELTA_IN_HYBRIDS},
        **EXPERTS,
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(**{**COMMON, **DELTA_IN_HYBRIDS}),
    "deepseek_v2": lambda: DeepseekV2Config(
        **{**MHA, **EXPERTS},
        q_lora_rank=None,
        kv_lora_rank=512,  # with the next the only sizes that vLLM has attention for
        qk_rope_head_dim=64,
        qk_nope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "glm4": lambda: Glm4Config(**COMMON),
    "gpt_oss": lambda: GptOssConfig(
        **COMMON,
        **EXPERTS,
        num_local_experts=4,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "toy": lambda: LlamaConfig(**TOY),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=4, moe_intermediate_size=64),
}

DELTA = ("qwen3_next", "qwen3_5")  # whose kernel for CPUs takes bfloat16 alone, see `float32_attention`


def make(kind: str, folder: Path) -> Path:
    """Save a random model. Its EOS token (1) comes up often."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(KINDS[kind](), dtype=torch.float32)
    if not model.config.tie_word_embeddings:
        with torch.no_grad():
            model.lm_head.weight[1] *= 3
    model.save_pretrained(folder)
    return folder


def make_draft(target: Path, folder: Path, noise: float, seed: int) -> Path:
    """Save a copy of a model with noise on its weights, in parts of each one's spread, so that its drafts err."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, adapter: Path, merged: Path, seed: int) -> None:
    """Save a random LoRA adapter of a Llama, in PEFT's format, and what the model is with it merged."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    rank, alpha, names = 4, 8, ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    weights = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in names:
                a, b = torch.randn(rank, module.in_features) / 8, torch.randn(module.out_features, rank) / 8
                weights[f"base_model.model.{name}.lora_A.weight"] = a
                weights[f"base_model.model.{name}.lora_B.weight"] = b
                module.weight += alpha / rank * b @ a
    model.save_pretrained(merged)
    adapter.mkdir()
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(names), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "task_type": "CAUSAL_LM"}))


def _without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}
