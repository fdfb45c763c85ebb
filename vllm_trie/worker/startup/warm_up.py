"""Launches every Triton kernel of this package before an engine serves, so that none is compiled while it does.

Triton compiles a kernel when it is launched with constants, or with types and alignments of arguments, that it has not
seen. Each module of kernels has a function that launches its own in all variants that serving can launch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_trie.speculative_config import config_has_memory_mode
from vllm_trie.supported_engines import most_plugin_beams, plugin_config_of
from vllm_trie.worker.attention import triton_kernels
from vllm_trie.worker.attention.tree_layers import attention_builder_takes_trees, attention_layers_of
from vllm_trie.worker.attention.triton_kernels import AttentionLayer
from vllm_trie.worker.kernels import KernelVariants, beams, controls, in_groups, ordinary_rows, slots, step
from vllm_trie.worker.kernels.compiling import compile_kernels_together
from vllm_trie.worker.kv import copies

logger = init_logger("vllm.trie_beam.warm_up")


class WarmsUpAtStartup:
    """A worker that launches them. At the end of vLLM's own warm-up, vLLM begins to report what is compiled."""

    vllm_config: VllmConfig
    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM."""
        if self.vllm_config.kernel_config.enable_jit_warmup:
            start = time.monotonic()
            count = compile_kernels_together(lambda: warm_up_at_startup(self.model_runner))
            logger.info("compiled %d kernels of beam search in %.1f s", count, time.monotonic() - start)
            warm_up_at_startup(self.model_runner)
            self.model_runner.speculation.warm_up_stock()
        return super().compile_or_warm_up_model()  # type: ignore[misc]


@torch.inference_mode()
def warm_up_at_startup(runner: Any) -> None:
    """Launches all kernels of a `BeamModelRunner` that has its KV cache. Writes nothing that anybody reads."""
    rows, tokens = runner.rows, runner.req_states.all_token_ids.gpu
    most_beams, logits = _widest_search_at_startup(runner.vllm_config), tuple(_logits_at_startup(runner))
    serving = KernelVariants(tokens, most_beams, logits)
    for module in (slots, controls, ordinary_rows, beams, step, in_groups):
        module.warm_up_kernels(serving)
    copies.warm_up_kv_copies(tokens, rows.kv)
    runner.speculation.warm_up(serving)
    triton_kernels.warm_up_attention(_layers_at_startup(runner), has_trees=runner.speculation.takes_trees)


def _widest_search_at_startup(vllm_config: VllmConfig) -> int:
    """Beams of the widest search, or as many as kernels take."""
    most = most_plugin_beams(vllm_config)
    if config_has_memory_mode(vllm_config):
        return plugin_config_of(vllm_config).max_beam_width or max(most, slots.MOST_SLOTS)
    return most


def _logits_at_startup(runner: Any) -> Iterator[torch.Tensor]:
    """Logits as a step may have them: of one row or more, of all rows or the last, processed or not.

    All ranks of a stage of a pipeline compute them together; stages that do not select have none.
    """
    if runner.sampler is None:
        return
    for num_rows in (1, 2):
        hidden = torch.zeros(num_rows, runner.model_config.get_hidden_size(), dtype=runner.dtype, device=runner.device)
        logits = runner.model.compute_logits(hidden)
        for own in (logits, logits[-1:]):
            yield own
            yield torch.empty_like(own, dtype=torch.float32)  # as vLLM's sampler makes them


def _layers_at_startup(runner: Any) -> Iterator[AttentionLayer]:
    """Layers of the target and of its draft model whose attention Triton kernels may compute."""
    tables, layers = runner.block_tables.input_block_tables, runner.compilation_config.static_forward_context
    for table, attn_groups in zip(tables, attention_layers_of(runner), strict=True):
        for attn_group in attn_groups:
            builder: Any = attn_group.get_metadata_builder(0)
            takes_trees = attention_builder_takes_trees(builder)
            # Without trees, shared reads where FlashAttention does not compute them.
            if takes_trees and (runner.speculation.takes_trees or (builder.may_take and not builder.splits)):
                heads = builder.num_heads_q, builder.num_heads_kv
                for layer in (layers[name] for name in attn_group.layer_names):
                    yield AttentionLayer(layer.impl.scoring, layer.kv_cache, table, heads)
