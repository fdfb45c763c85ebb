"""KV caches that a block trie cannot stand for are refused when the engine starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from vllm_trie.engine.known_caches import refuse_engine_kv_cache

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
FULL, LATENT = FullAttentionSpec(**SHAPE), MLAAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=32)
STATE = MambaSpec(block_size=512, shapes=((16, 3), (4, 8)), dtypes=(torch.bfloat16, torch.float32))
CACHED_STATE = replace(STATE, mamba_cache_mode="align", num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)


def config_of(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(9, [], [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)])


def refusal_of(*specs: KVCacheSpec) -> str | None:
    try:
        refuse_engine_kv_cache(config_of(*specs))
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW), (LATENT,), (FULL, STATE), (STATE,), (FULL, CACHED_STATE)])
def test_attention_of_one_precision_and_states_are_supported(specs: tuple[KVCacheSpec, ...]) -> None:
    assert refusal_of(*specs) is None


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((), "this model has: none"),
        ((FULL, RSWASpec(**SHAPE, rswa_window=32)), "this model has: RSWASpec"),  # frees blocks within a row
        ((LATENT, SlidingWindowMLASpec(**SHAPE, sliding_window=32)), "this model has: SlidingWindowMLASpec"),
        ((SinkFullAttentionSpec(**SHAPE, sink_len=4),), "this model has: SinkFullAttentionSpec"),
        ((HiddenStateCacheSpec(**SHAPE),), "this model has: HiddenStateCacheSpec"),
        ((FullAttentionSpec(**SHAPE, non_causal=True),), "this model has: FullAttentionSpec that is not causal"),
        ((FullAttentionSpec(**SHAPE, tokens_per_state=2),), "FullAttentionSpec with several tokens per state"),
        (
            (FullAttentionSpec(**SHAPE, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),),
            "this model has: FullAttentionSpec with FP8_PER_TOKEN_HEAD",
        ),
        (
            (FULL, ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)),
            "this model has: ChunkedLocalAttentionSpec; start vLLM with disable_hybrid_kv_cache_manager=True",
        ),
        (
            (FULL, replace(STATE, num_speculative_blocks=3)),
            "this model has: MambaSpec with more than one state per row",
        ),
        (
            (FULL, SlidingWindowSpec(**SHAPE | {"dtype": torch.float32}, sliding_window=32)),
            "of one precision; leave out kv_cache_dtype_skip_layers, or start vLLM without the plugin",
        ),
    ],
)
def test_others_are_refused(specs: tuple[KVCacheSpec, ...], why: str) -> None:
    assert (refusal_of(*specs) or "it is not").endswith(why)


def test_states_after_parts_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="leave out prefix_match_unit, or set enable_prefix_caching=False"):
        refuse_engine_kv_cache(config_of(FULL, CACHED_STATE), caches_parts=True)
