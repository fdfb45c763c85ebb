"""The kinds of KV caches that beams are tested with; the scheduler refuses models that have others."""

from __future__ import annotations

from typing import get_args

from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

KNOWN_CACHES = FullAttentionSpec | SlidingWindowSpec | MLAAttentionSpec | CrossAttentionSpec | MambaSpec


def refuse_engine_kv_cache(kv_cache_config: KVCacheConfig, caches_parts: bool = False) -> None:
    """Refuse a model with a kind of KV cache that beams are not tested with.

    Args:
        kv_cache_config: Its KV cache groups.
        caches_parts: The prefix cache also has recurrent states within blocks, which rows would overwrite.

    Raises:
        ValueError: names the kinds that it has.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    unproven = sorted({why for spec in specs if (why := _unproven_engine_kv_cache(spec)) is not None})
    if not specs or unproven:
        is_chunked = unproven == [ChunkedLocalAttentionSpec.__name__]
        hint = "; start vLLM with disable_hybrid_kv_cache_manager=True" if is_chunked else ""
        raise ValueError(
            "trie_beam needs KV caches of full, sliding-window, latent (MLA) or cross attention, or recurrent states; "
            f"this model has: {', '.join(unproven) or 'none'}{hint}"
        )
    if caches_parts:
        raise ValueError(
            "trie_beam needs a prefix cache of whole blocks where layers have recurrent states; leave out "
            "prefix_match_unit, or set enable_prefix_caching=False"
        )
    if kv_cache_config.has_mixed_precision_kv_cache:  # vLLM zeroes blocks that it gives to requests then
        raise ValueError(
            "trie_beam needs KV caches of one precision; leave out kv_cache_dtype_skip_layers, or start vLLM without "
            "the plugin"
        )


def _unproven_engine_kv_cache(spec: KVCacheSpec) -> str | None:
    """Why beams are not tested with a kind of KV cache; None if they are."""
    name = type(spec).__name__
    if type(spec) not in get_args(KNOWN_CACHES):
        return name
    if isinstance(spec, MambaSpec):
        return None if spec.num_speculative_blocks == 0 else f"{name} with more than one state per row"
    assert isinstance(spec, AttentionSpec)
    if spec.kv_quant_mode not in (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR):
        return f"{name} with {spec.kv_quant_mode.name}"
    if spec.tokens_per_state != 1:
        return f"{name} with several tokens per state"
    return f"{name} that is not causal" if getattr(spec, "non_causal", False) else None
