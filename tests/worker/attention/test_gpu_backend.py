"""The GPU's backend of attention stands for FlashAttention."""

from __future__ import annotations

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_trie.worker.attention import gpu_backend
from vllm_trie.worker.attention.gpu_backend import SharedPrefixAttentionBackend


def test_it_takes_the_place_of_flash_attention() -> None:
    try:
        gpu_backend.use_gpu_attention_backend()
        assert AttentionBackendEnum.FLASH_ATTN.get_class() is SharedPrefixAttentionBackend
    finally:
        AttentionBackendEnum.FLASH_ATTN.clear_override()
