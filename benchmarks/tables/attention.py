"""Attention that reads shared blocks once: a layer compared with vLLM's, and whole searches with sampling."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

from benchmarks import models
from benchmarks.common import BLOCK_SIZE, alternate, generate, median_ratio
from benchmarks.harness import Bench, Cell, Measured, Setting, Table
from benchmarks.watch import runner_of
from vllm_trie import beam_params

HEAD_SIZE, OWN_TOKENS = 64, 20  # of a micro benchmark's rows
HEADS = ((8, 8), (8, 2))
DTYPES = ("float32", "bfloat16")
NUM_LAYERS = 4  # each with a KV cache of its own, as in a model, so that none is at hand in a core's caches
NUM_TOKENS, LONGEST = 32, 8192
OURS, STOCK, SAMPLING = "ours", "vLLM's", "sampling, n=b"


def shapes(setting: Setting) -> list[tuple[int, int]]:
    """Beams and prompt tokens."""
    widths = setting.widths or setting.pick((16,), (32, 128), (32, 128, 512))
    return [*product(widths, setting.pick((256,), (1024,), (512, 1024, 4096)))]


# One layer of one step.


def step_cells(setting: Setting) -> list[Cell]:
    dtypes = setting.pick(DTYPES[:1], DTYPES, DTYPES)
    return [(dtype, *heads, *shape) for dtype in dtypes for heads in HEADS for shape in shapes(setting)]


def measure_step(bench: Bench, dtype: str, num_heads: int, num_kv_heads: int, width: int, num_prompt: int) -> Measured:
    """All rows of one group, each a few tokens beyond the prompt."""
    ours, stock = layers_of_a_step(dtype, num_heads, num_kv_heads, width, num_prompt)
    seconds = alternate({OURS: ours, STOCK: stock}, bench.setting.pick(2, 7, 15))
    of_layer = [1000 * statistics.median(seconds[name]) / NUM_LAYERS for name in (STOCK, OURS)]
    kind = "MHA" if num_heads == num_kv_heads else f"GQA {num_heads}:{num_kv_heads}"
    kind += "" if dtype == DTYPES[0] else f", {dtype}"
    return Measured([(kind, width, num_prompt, *of_layer, median_ratio(seconds[STOCK], seconds[OURS]))])


def layers_of_a_step(
    dtype_name: str, num_heads: int, num_kv_heads: int, width: int, num_prompt: int
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What computes attention of several layers in one step: ours, and vLLM's own."""
    import numpy as np
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from vllm_trie.worker.attention import compiled
    from vllm_trie.worker.attention.shared_rows import Scoring, SharedRows, shared_attention_tokens

    if not current_platform.is_cpu():
        raise ValueError("it compares CPU kernels; benchmarks.gpu_check has those of GPUs")
    current_platform.import_kernels()
    dtype, num_shared = getattr(torch, dtype_name), num_prompt // BLOCK_SIZE
    num_blocks = num_shared + width
    shape = num_blocks, num_kv_heads, BLOCK_SIZE, 2 * HEAD_SIZE
    caches = [torch.randn(shape).to(dtype) for _ in range(NUM_LAYERS)]
    queries, outputs = torch.randn(2, width, num_heads, HEAD_SIZE).to(dtype)
    tables = torch.arange(num_shared, dtype=torch.int32).repeat(width, 1)
    tails = num_shared + torch.randperm(width, dtype=torch.int32)
    tables = torch.hstack([tables, tails[:, None]])
    lengths = torch.full((width,), num_shared * BLOCK_SIZE + OWN_TOKENS, dtype=torch.int32)
    starts, scale = torch.arange(width + 1, dtype=torch.int32), HEAD_SIZE**-0.5
    rows = SharedRows(np.arange(width), num_shared * BLOCK_SIZE)
    shared = shared_attention_tokens([rows], starts.numpy(), lengths.numpy(), BLOCK_SIZE)
    sizes = width, num_heads, num_kv_heads, HEAD_SIZE
    isa = _get_attn_isa(dtype, BLOCK_SIZE, HEAD_SIZE)
    schedule = ops.cpu_attn_get_scheduler_metadata(*sizes, lengths, dtype, starts, True, -1, isa, True)
    of_batch = starts, lengths, scale, True, None, -1, tables, 0.0, schedule, None

    def ours() -> None:
        plan = compiled.CompiledAttentionPlan(shared, tables, isa)
        for cache in caches:
            plan.attend(queries, outputs, cache, Scoring(scale))

    def stock() -> None:
        for cache in caches:
            halves = cache.view(num_blocks, num_kv_heads, 2 * BLOCK_SIZE, HEAD_SIZE).chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(queries, *halves, outputs, *of_batch)

    return ours, stock


STEP = Table(
    "Attention of one layer in a step, ms",
    ("attention", "beams", "prompt tokens", STOCK, OURS, "vLLM's time, times ours"),
    step_cells,
    measure_step,
    f"heads of {HEAD_SIZE}, {DTYPES[0]} where no other type is named, {OWN_TOKENS} tokens of each row's own, "
    f"{NUM_LAYERS} layers one after the other, in turn; medians",
)

# Whole searches.


def search_cells(setting: Setting) -> list[Cell]:
    variants = models.variants(setting.model)[: setting.pick(1, 2, 2)]  # which differ in their KV heads
    return [(variant, *shape) for variant in variants for shape in shapes(setting)]


def measure_search(bench: Bench, variant: str, width: int, num_prompt: int) -> Measured:
    """One call at a time on a prompt that is cached: a search with attention as it is and with vLLM's, and sampling."""
    from vllm import SamplingParams

    limits = {"max_num_batched_tokens": 8192, "max_model_len": LONGEST, "max_num_seqs": 512}
    llm = bench.engine(variant, hf_overrides={"max_position_embeddings": LONGEST}, **limits)
    (prompt,) = bench.prompts(1, 1000)
    prompts = [{"prompt_token_ids": (prompt * 5)[:num_prompt]}]
    options: dict[str, Any] = {"max_tokens": bench.setting.max_tokens or NUM_TOKENS, "ignore_eos": True}
    search = partial(generate, llm, prompts, beam_params(width, n=width, **options))
    sample = partial(generate, llm, prompts, SamplingParams(n=width, temperature=1.0, **options))

    builders = [group.get_metadata_builder(0) for groups in runner_of(llm).attn_groups for group in groups]
    sharing = [builder for builder in builders if builder.can_share]
    if not sharing:
        raise ValueError("no layer of this model reads shared blocks once")

    def by(shares: bool) -> Callable[[], object]:
        def run() -> object:
            for builder in sharing:
                builder.can_share = shares
            return search()

        return run

    runs = {OURS: by(True), STOCK: by(False), SAMPLING: sample}
    seconds = alternate(runs, bench.setting.pick(1, 3, 5))
    for builder in sharing:
        builder.can_share = True
    times = [median_ratio(seconds[name], seconds[SAMPLING]) for name in (STOCK, OURS)]
    own = [1000 * statistics.median(seconds[name]) for name in (SAMPLING, STOCK, OURS)]
    kind = models.attention_of(bench.model(variant), models.AS_IT_IS)
    return Measured([(kind, width, num_prompt, *own, *times)])


SEARCH = Table(
    "Whole searches with attention over shared blocks, ms",
    (
        *("attention", "beams", "prompt tokens", SAMPLING, "search, vLLM's attention", "search, ours"),
        *("vLLM's, times sampling", "ours, times sampling"),
    ),
    search_cells,
    measure_search,
    f"{NUM_TOKENS} tokens after a prompt that is cached, all b hypotheses returned, in turn; medians",
)
