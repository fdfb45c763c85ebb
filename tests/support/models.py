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
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.architectures import models as architectures
from benchmarks.architectures.models import BY_NAME, WINDOW

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
    "toy": lambda: LlamaConfig(**TOY),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, num_experts=4, moe_intermediate_size=64),
}

OF_TABLE = {  # kinds that docs/models.md shows, too
    kind: BY_NAME[name]
    for kind, name in {
        "granite4": "Granite-4",
        "falcon_h1": "Falcon-H1",
        "mamba2": "Mamba-2",
        "qwen3_next": "Qwen3-Next",
        "qwen3_5": "Qwen3.5",
        "deepseek_v2": "DeepSeek-V2",
        "gemma3": "Gemma-3",
        "glm4": "GLM-4",
        "gpt_oss": "gpt-oss",
    }.items()
}


def make(kind: str, folder: Path) -> Path:
    """Save a random model. Its EOS token (1) comes up often."""
    if kind in OF_TABLE:
        architectures.make(OF_TABLE[kind], folder)
        return folder
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
