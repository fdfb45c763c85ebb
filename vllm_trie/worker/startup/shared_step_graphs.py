"""Full CUDA graphs of decoding steps in which layers read the KV blocks that rows share once.

vLLM captures full graphs of decoding steps with its own attention, one for each number of rows. These are further ones,
for some of these numbers, whose attention is `PrefixSuffixAttention`. The runner selects them by a number of tokens per
row that no step has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager, ModelCudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_trie.supported_engines import plugin_config_of
from vllm_trie.worker.announce_shared_rows import builders_of_runner
from vllm_trie.worker.attention.gpu_backend import SharedPrefixAttentionBuilder
from vllm_trie.worker.attention.shared_rows import SHARES_BLOCKS
from vllm_trie.worker.startup.plain_step_graphs import decode_graph_sizes, has_full_decode_graphs, list_decode_graphs

logger = init_logger("vllm.trie_beam.attention")

PER_DOUBLING = 4  # graphs: a step is padded by at most a quarter
CAPTURED = (
    "captures %d more CUDA graphs, for steps of %d to %d rows that read the shared blocks of up to %d groups once"
)
IN_PIECES = "steps that read shared blocks once replay piecewise CUDA graphs: %s"


def capture_shared_step_graphs(runner: GPUModelRunner) -> None:
    """Makes vLLM capture, and replay, full graphs of decoding steps in which layers read shared blocks once.

    To be called before it captures. Adds nothing where no layer does that, or where it cannot pay off.
    """
    manager: Any = runner.cudagraph_manager
    builders = [builder for _, builder in builders_of_runner(runner)]
    captured = [builder for builder in builders if isinstance(builder, SharedPrefixAttentionBuilder)]
    captured = [builder for builder in captured if builder.may_take]
    if not captured or manager.cudagraph_mode == CUDAGraphMode.NONE:
        return
    if (hindrance := _hindrance_of_full_graphs(runner, captured)) is not None:
        logger.info_once(IN_PIECES, hindrance)
        return
    least = min(builder.least_rows_to_share for builder in captured)
    most = min(builder.most_rows_in_graphs for builder in captured)
    sizes = [size for size in decode_graph_sizes(manager) if size <= most]
    if not (chosen := shared_step_sizes(sizes, least, plugin_config_of(runner.vllm_config).max_beam_width)):
        logger.info_once(
            IN_PIECES, f"it pays off from {least} rows on, but graphs have at most {sizes[-1] if sizes else 0}"
        )
        return
    most_groups = min(builder.capture_in_graphs(chosen) for builder in captured)
    manager.__class__, manager.builders = SharedStepGraphManager, captured
    list_decode_graphs(manager, chosen, SHARES_BLOCKS, max_query_len=1)
    logger.info_once(CAPTURED, len(chosen), chosen[0], chosen[-1], most_groups)


def shared_step_sizes(sizes: Sequence[int], least: int, width: int | None) -> list[int]:
    """Rows of these graphs, ascending: some of those that vLLM captures, `PER_DOUBLING` for each doubling.

    Steps of a search of `width` beams, and of small multiples of it, are padded as little as vLLM pads.

    Args:
        sizes: Rows of vLLM's graphs, ascending.
        least: Rows of the narrowest step for which they may pay off.
        width: Of the widest search, if it is known.
    """
    if not sizes or least > sizes[-1]:
        return []
    first, chosen = bisect_left(sizes, least), {sizes[-1]}
    for step in _steps_up_to(sizes[-1], min(width or sizes[-1], sizes[-1])):
        chosen.add(sizes[max(bisect_left(sizes, step), first)])
    return sorted(chosen)


def _steps_up_to(most: int, width: int) -> Iterator[float]:
    """Numbers that include `width`, each greater than the last by at most a quarter of a power of two times it."""
    for doubling in range(-width.bit_length(), (most // width).bit_length() + 1):
        for part in range(PER_DOUBLING):
            step = width * 2.0**doubling * (1 + part / PER_DOUBLING)
            if step <= most:
                yield step


def _hindrance_of_full_graphs(runner: GPUModelRunner, builders: Sequence[SharedPrefixAttentionBuilder]) -> str | None:
    """The reason why there are no full graphs, if any."""
    manager: Any = runner.cudagraph_manager
    if not has_full_decode_graphs(manager):
        return (
            f"cudagraph_mode={manager.cudagraph_mode.name} has no full graphs of decoding steps; use FULL_AND_PIECEWISE"
        )
    if manager.decode_query_len > 1:
        return "rows of decoding steps may have several tokens"
    if runner.vllm_config.lora_config is not None:
        return "rows may have LoRA adapters"
    if runner.dp_size > 1:
        return "data-parallel ranks replay the same graphs"
    if runner.use_pp:
        return "pipeline stages pass on as many rows as the next one takes"
    return next((builder.graph_hindrance for builder in builders if builder.graph_hindrance is not None), None)


class _AnnouncesSharedSteps(CudaGraphManager):
    """Has builders make metadata of shared steps for the graphs of such steps."""

    builders: Sequence[SharedPrefixAttentionBuilder] = ()

    def capture(self, create_forward_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """See vLLM."""

        def create(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            if desc.uniform_token_count == SHARES_BLOCKS:
                for builder in self.builders:
                    builder.announce(())
            made: Callable[[CUDAGraphMode], None] = create_forward_fn(desc, warmup=warmup)
            return made

        super().capture(create, *args, **kwargs)


class SharedStepGraphManager(ModelCudaGraphManager, _AnnouncesSharedSteps):
    """vLLM's manager, with ours between its two classes that capture."""
