"""Which layers compute the trees of forests: all of the target and of its draft model, or none speculates."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_trie.worker.attention.shared_rows import SharesPrefixes
from vllm_trie.worker.kv_slots import KVSlots

if TYPE_CHECKING:
    from vllm.v1.worker.utils import AttentionGroup

logger = init_logger("vllm.trie_beam.attention")

TAKES_NO_TREES = (
    "Searches take plain steps, whatever they ask of speculation: %d layers have attention (%s) for which there is no "
    "kernel that computes trees of drafts"
)


def attention_of(runner: GPUModelRunner) -> list[list[AttentionGroup]]:
    """By KV cache group: vLLM's groups of layers of the target, and of its draft model if there is one."""
    of_models = [runner.attn_groups]
    if isinstance(runner.speculator, DraftModelSpeculator):
        of_models.append(runner.speculator.attn_groups)
    return [[*chain(*of_number)] for of_number in zip(*of_models, strict=True)]


def takes_trees(runner: GPUModelRunner) -> bool:
    """Whether attention of all layers takes trees; if not, the log says which do not."""
    stock = []
    for attn_group in chain(*attention_of(runner)):
        builder = attn_group.get_metadata_builder(0)
        if not (isinstance(builder, SharesPrefixes) and builder.takes_trees):
            stock.append(attn_group)
    if stock:
        num_layers, backends = sum(len(group.layer_names) for group in stock), {g.backend.get_name() for g in stock}
        logger.warning_once(TAKES_NO_TREES, num_layers, ", ".join(sorted(backends)))
    return not stock


def kv_slots(runner: GPUModelRunner) -> KVSlots:
    """The KV caches of such layers, token by token."""
    layers = runner.compilation_config.static_forward_context
    return KVSlots(
        [
            [
                part
                for attn_group in of_number
                for name in attn_group.layer_names
                for part in attn_group.get_metadata_builder(0).by_token(layers[name].kv_cache)
            ]
            for of_number in attention_of(runner)
        ]
    )
