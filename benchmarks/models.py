"""Models made from a given one, to measure what its architecture would do with the same answers.

All keep a Llama's weights: with its KV heads repeated it computes the same and holds more (multi-head attention), with
a window it forgets what is far, and with layers that change nothing it is deeper.
"""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

from benchmarks.copying import copying_model

AS_IT_IS = "as it is"
FULL_HEADS = "MHA"
WINDOW_TOKENS = 128
WINDOW = f"window {WINDOW_TOKENS}"
VARIANTS = (AS_IT_IS, FULL_HEADS, WINDOW)
RANDOM_60M = "random, 60 M"
COPIES = "copies"
WHISPER = "whisper"  # as configurations call it
PUZZLE = "solves the puzzle"  # made from none: it comes along


def deeper(times: int) -> str:
    """The variant that is so many times as deep."""
    return AS_IT_IS if times == 1 else f"{times}x deeper"


def variants(model: str) -> tuple[str, ...]:
    """Those that can be made of a model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    if config.model_type != "llama":
        return (AS_IT_IS,)
    is_grouped = config.num_key_value_heads < config.num_attention_heads
    return tuple(variant for variant in VARIANTS if variant != FULL_HEADS or is_grouped)


def attention_of(model: str, variant: str) -> str:
    """What the attention of a model, or of what is made of it, is called."""
    from transformers import AutoConfig

    if variant != AS_IT_IS:
        return variant
    config = AutoConfig.from_pretrained(model).get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    name = "MHA" if kv_heads == config.num_attention_heads else f"GQA {config.num_attention_heads}:{kv_heads}"
    window = getattr(config, "sliding_window", None)
    return f"{name}, window {window}" if window else name


def longest(model: str) -> int:
    """Tokens that a model has positions for."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return config.max_target_positions if config.model_type == WHISPER else config.max_position_embeddings


def hears(model: str) -> bool:
    """Whether it is a Whisper."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).model_type == WHISPER


def make(variant: str, model: str, folder: Path) -> Path:
    """Save a variant of `VARIANTS`, `RANDOM_60M`, `COPIES`, or "7x deeper" and the like, in a folder.

    Of the last two together, as in "copies, 7x deeper", the tokenizer alone is the given model's.
    """
    if variant == FULL_HEADS:
        changed = _with_full_heads(model)
    elif variant == WINDOW:
        changed = _with_window(model)
    elif variant == RANDOM_60M:
        changed = _random()
    elif variant == COPIES:
        changed = _copying(model)
    elif match := re.fullmatch(rf"{COPIES}, (\d+)x deeper", variant):
        changed = _deepened(_copying(model), int(match[1]))
    elif match := re.fullmatch(r"(\d+)x deeper", variant):
        changed = _deepened(_load(model)[0], int(match[1]))
    else:
        raise ValueError(f"no variant {variant!r} of a model; known: {', '.join(VARIANTS)} and '<n>x deeper'")
    from transformers import AutoTokenizer

    changed.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def _random() -> Any:
    """A Llama of 62 million parameters, a usual vocabulary among them, that has learnt nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32_000,
            hidden_size=512,
            intermediate_size=2048,
            num_hidden_layers=11,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=0,
            eos_token_id=1,
        )
    )


def _load(model: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return source, AutoConfig.from_pretrained(model)


def _with_full_heads(model: str) -> Any:
    source, config = _load(model)
    groups = config.num_attention_heads // config.num_key_value_heads
    heads, size = config.num_key_value_heads, source.model.layers[0].self_attn.head_dim
    config.num_key_value_heads = config.num_attention_heads
    weights = source.state_dict()
    for name, weight in weights.items():
        if ".k_proj." in name or ".v_proj." in name:
            by_head = weight.unflatten(0, (heads, size))
            weights[name] = by_head.repeat_interleave(groups, dim=0).flatten(0, 1)
    changed = type(source)(config)
    changed.load_state_dict(weights)
    return changed


def _with_window(model: str) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    source, config = _load(model)
    own = {
        k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures", "transformers_version")
    }
    changed = MistralForCausalLM(MistralConfig(**own | {"sliding_window": WINDOW_TOKENS}))
    changed.load_state_dict(source.state_dict())
    return changed


def _copying(model: str) -> Any:
    """A model with another's tokens, see `benchmarks.copying`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    return copying_model(config.vocab_size, config.bos_token_id, config.eos_token_id)


def _deepened(source: Any, times: int) -> Any:
    import torch

    config = deepcopy(source.config)
    depth = config.num_hidden_layers
    config.num_hidden_layers = times * depth
    if getattr(config, "layer_types", None) is not None:  # of Qwen2
        config.layer_types = times * config.layer_types
    changed = type(source)(config)
    missing, unexpected = changed.load_state_dict(source.state_dict(), strict=False)
    assert not unexpected
    assert len(missing) == (times - 1) * depth * len(list(source.model.layers[0].parameters()))
    with torch.no_grad():
        for layer in changed.model.layers[depth:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return changed
