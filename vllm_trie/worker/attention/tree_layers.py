"""Which layers compute draft trees: all of the target and of its draft model, or no search speculates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_trie.worker.attention.shared_rows import SharesAttentionPrefixes
from vllm_trie.worker.kv.kv_caches import ByToken, TokenStates

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger("vllm.trie_beam.attention")

TAKES_NO_TREES = (
    "Searches take plain steps even if they ask for speculation: the attention of %d layers (%s) has no kernel that "
    "computes draft trees"
)


def attention_layers_of(runner: GPUModelRunner) -> list[list[AttentionGroup]]:
    """By KV cache group: vLLM's groups of layers of the target, and of its draft model if there is one."""
    of_models = [runner.attn_groups]
    if isinstance(runner.speculator, DraftModelSpeculator):
        of_models.append(runner.speculator.attn_groups)
    return [[*chain(*of_number)] for of_number in zip(*of_models, strict=True)]


def attention_takes_trees(runner: GPUModelRunner) -> bool:
    """Whether the attention of all layers takes trees; logs which layers do not."""
    stock = [
        group
        for group in chain(*attention_layers_of(runner))
        if not attention_builder_takes_trees(group.get_metadata_builder(0))
    ]
    if stock:
        logger.warning_once(TAKES_NO_TREES, *count_attention_layers(stock))
    return not stock


def attention_by_token(runner: GPUModelRunner, token_states: TokenStates | None) -> list[list[ByToken]]:
    """By KV cache group, the KV caches token by token, if all its layers take trees; otherwise nothing.

    Args:
        runner: vLLM's.
        token_states: Other states that are stored by token, if any.
    """
    parts = [_attention_by_token(runner, attn_groups) for attn_groups in attention_layers_of(runner)]
    if token_states is not None and (of_group := parts[token_states.number]):
        of_group.append(token_states.by_token)
    return parts


def _attention_by_token(runner: GPUModelRunner, attn_groups: Sequence[AttentionGroup]) -> list[ByToken]:
    parts = list[ByToken]()
    for attn_group in attn_groups:
        builder = attn_group.get_metadata_builder(0)
        if not attention_builder_takes_trees(builder):
            return []
        for name in attn_group.layer_names:
            parts += builder.by_token(runner.compilation_config.static_forward_context[name].kv_cache)
    return parts


def count_attention_layers(attn_groups: Sequence[AttentionGroup]) -> tuple[int, str]:
    """How many layers these are, and the names of their backends."""
    backends = {group.backend.get_name() for group in attn_groups}
    return sum(len(group.layer_names) for group in attn_groups), ", ".join(sorted(backends))


def attention_builder_takes_trees(builder: AttentionMetadataBuilder[Any]) -> TypeGuard[SharesAttentionPrefixes]:
    """Whether a builder's layers take trees."""
    return isinstance(builder, SharesAttentionPrefixes) and builder.takes_trees
