"""Refuses engines whose options demand attention that the machine or model does not allow, before they serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_trie.supported_engines import has_beams, plugin_config_of
from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes
from vllm_trie.worker.attention.tree_layers import count_attention_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger("vllm.trie_beam.attention")

HAS_NO_EFFECT = (
    'shared_prefix_attention="on" has no effect on %d layers, for whose attention (%s) trie_beam has '
    "no kernel: vLLM reads their shared blocks once per row"
)


def check_demanded_attention(vllm_config: VllmConfig) -> None:
    """Checks what an engine on a CPU needs for `shared_prefix_attention="on"`.

    Raises:
        ValueError: naming what prevents it, and what works.
    """
    from vllm.platforms import current_platform

    if plugin_config_of(vllm_config).shared_prefix_attention != "on" or not current_platform.is_cpu():
        return
    from vllm_trie.worker.attention.compiled import OF_TYPES, CompilerError, compiled_attention

    try:
        compiled_attention(OF_TYPES[vllm_config.model_config.dtype])
    except CompilerError as error:
        raise ValueError(f'shared_prefix_attention="on" is not possible: {error}; use "auto"') from error


def check_demanded_attention_layers(vllm_config: VllmConfig, attn_groups: Sequence[AttentionGroup]) -> None:
    """Checks what a model's layers need for `shared_prefix_attention="on"`, once their backends are known.

    Raises:
        ValueError: no layer reads shared blocks once.
    """
    if plugin_config_of(vllm_config).shared_prefix_attention != "on" or not has_beams(vllm_config):
        return
    for group in attn_groups:
        builder: object = group.get_metadata_builder(0)
        if isinstance(builder, SharesAttentionPrefixes) and builder.hindrance is not None:
            raise ValueError(builder.hindrance)
    stock = [group for group in attn_groups if not _shares_attention(group.get_metadata_builder(0))]
    if not stock:
        return
    num_layers, backends = count_attention_layers(stock)
    if len(stock) == len(attn_groups):
        raise ValueError(
            f'shared_prefix_attention="on" is not possible: trie_beam has no kernel for the attention of any layer of '
            f'this model ({num_layers} by {backends}); use "auto"'
        )
    logger.warning_once(HAS_NO_EFFECT, num_layers, backends)


def _shares_attention(builder: object) -> bool:
    return isinstance(builder, SharesAttentionPrefixes) and builder.can_share
