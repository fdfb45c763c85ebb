"""KV caches that a block trie cannot stand for are refused when the engine starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from vllm_trie.engine.kv_cache import refuse_unsupported_kv_cache

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}
FULL, WINDOW = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=32)


def config_of(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(9, [], [KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)])


def refusal_of(*specs: KVCacheSpec) -> str | None:
    try:
        refuse_unsupported_kv_cache(config_of(*specs))
    except ValueError as error:
        return str(error)
    return None


def test_full_attention_and_windows_of_one_precision_are_supported() -> None:
    assert refusal_of(FULL) is None
    assert refusal_of(FULL, WINDOW) is None


@pytest.mark.parametrize(
    ("specs", "why"),
    [
        ((), "this model has: none"),
        ((FULL, RSWASpec(**SHAPE, rswa_window=32)), "this model has: FullAttentionSpec, RSWASpec"),
        (
            (FULL, SlidingWindowSpec(**SHAPE | {"dtype": torch.float32}, sliding_window=32)),
            "needs KV caches of one precision; leave out kv_cache_dtype_skip_layers",
        ),
    ],
)
def test_others_are_refused(specs: tuple[KVCacheSpec, ...], why: str) -> None:
    assert why in (refusal_of(*specs) or "it is not")
