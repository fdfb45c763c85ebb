"""Attention over shared blocks, of tokens and of trees: by our kernels, and by two calls of FlashAttention 3.

All against torch, and timed against the same kernels that share nothing; of trees also xformers' `tree_attention`,
where that is installed. FlashAttention's library is vLLM's, which torch alone can load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_kernels import BLOCK_SIZE, HEAD_SIZE, KV_HEADS, device_us, host_us
from benchmarks.stand_ins import stand_in_for_vllm
from vllm_trie.worker.attention.prefix_suffix import Calls, Layer, PrefixSuffixAttention
from vllm_trie.worker.attention.shared_rows import (
    RowTrees,
    Scoring,
    SharedRows,
    attention_row_by_row,
    shared_attention_tokens,
)
from vllm_trie.worker.attention.triton_kernels import TritonAttentionPlan

QUERIES_PER_KV_HEAD = 4
OWN_TOKENS = 40
NUM_CHECKED, TOLERANCE = 4, 2e-2  # rows; of numbers of 8 bits
COLUMNS = (
    *("beams x prefix", "our kernels row by row, us", "once, us", "once, us of the host"),
    *(
        "FlashAttention row by row, us",
        "in two calls, us",
        "row by row, us of the host",
        "in two calls, us of the host",
    ),
)
SETTING = (
    f"one layer, bfloat16, {KV_HEADS * QUERIES_PER_KV_HEAD} heads of {HEAD_SIZE} on {KV_HEADS}, block size "
    f"{BLOCK_SIZE}, {OWN_TOKENS} tokens of each row's own"
)
NOTE = (
    f"{SETTING}; our kernels row by row assume that nothing is shared; FlashAttention in two calls: what rows "
    "share, and what comes after it, merged"
)
SCORINGS: dict[str, dict[str, Any]] = {"plain": {}, "soft cap": {"soft_cap": 5.0}, "sinks": {"has_sinks": True}}
TREE_COLUMNS = ("beams x nodes x prefix", "row by row, us", "shared blocks once, us", "times faster", "xformers, us")
TREE_NOTE = (
    f"{SETTING} and its tree; row by row: the nodes of a tree share what comes before it, the rows share nothing; "
    "xformers' tree_attention takes one tree for all rows, and the prefix once for each row"
)


class Shape(NamedTuple):
    width: int
    num_prefix: int
    num_kv_heads: int = KV_HEADS
    head_size: int = HEAD_SIZE
    num_nodes: int = 1  # of the tree that each row computes


SHAPES = tuple(Shape(width, prefix) for width in (16, 128, 512) for prefix in (256, 1024, 4096, 16384))
TREE_SHAPES = tuple(
    Shape(width, prefix, num_nodes=nodes) for width in (16, 128) for nodes in (7, 31) for prefix in (1024, 4096)
)
SMALL_SHAPES = (Shape(5, 64, 1, 32),)
SMALL_TREE_SHAPES = (Shape(3, 64, 1, 32, num_nodes=7),)


class Inputs:
    """One group in one step, its blocks in any order."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        width, num_prefix, num_kv_heads, head_size, num_nodes = shape
        self.start, self.length = num_prefix + OWN_TOKENS - 1, num_prefix + OWN_TOKENS - 1 + num_nodes
        num_heads, num_own = QUERIES_PER_KV_HEAD * num_kv_heads, -(-(self.length - num_prefix) // BLOCK_SIZE)
        shared, num_blocks = num_prefix // BLOCK_SIZE, num_prefix // BLOCK_SIZE + width * num_own
        random = torch.Generator(device).manual_seed(0)
        on: dict[str, Any] = {"device": device, "dtype": dtype, "generator": random}
        by_token = torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, 2 * head_size, **on)
        self.cache = by_token.transpose(1, 2)  # as vLLM lays it out
        self.sinks = torch.linspace(-2, 4, num_heads, device=device).to(dtype)
        self.queries = torch.randn(width * num_nodes, num_heads, head_size, **on)
        blocks = torch.randperm(num_blocks, device=device, generator=random).int()
        prefix, own = blocks[:shared].repeat(width, 1), blocks[shared:].view(width, num_own)
        self.tables, self.scale = torch.hstack([prefix, own]), head_size**-0.5
        lengths, starts = np.full(width, self.length), np.arange(width + 1) * num_nodes
        self.tree = binary_tree(num_nodes)
        rows, apart = SharedRows(np.arange(width), num_prefix), [SharedRows(np.arange(width), 0)]
        if num_nodes > 1:
            rows = rows._replace(trees=RowTrees(self.start, [self.tree] * width))
            apart = attention_row_by_row([rows])
        plans = [shared_attention_tokens(groups, starts, lengths, BLOCK_SIZE) for groups in ([rows], apart)]
        self.rows, self.lengths = rows, torch.from_numpy(lengths).int()
        self.once, self.row_by_row = (
            TritonAttentionPlan(
                shared, torch.from_numpy(shared.lengths).to(device), self.tables, (num_heads, num_kv_heads)
            )
            for shared in plans
        )

    def attend(self, plan: TritonAttentionPlan) -> torch.Tensor:
        outputs = torch.empty_like(self.queries)
        plan.attend(self.queries, outputs, self.cache, Scoring(self.scale))
        return outputs

    def reference(self, soft_cap: float = 0.0, has_sinks: bool = False) -> torch.Tensor:
        """[rows, nodes, heads, head size] float32, of the first NUM_CHECKED rows."""
        num_nodes, rows = len(self.tree), []
        sees = np.hstack([np.ones((num_nodes, self.start), dtype=bool), self.tree])
        hidden = torch.from_numpy(~sees).to(self.queries.device)
        by_row = self.queries.unflatten(0, (-1, num_nodes))[:NUM_CHECKED].float()
        for queries, of_row in zip(by_row, self.by_row(NUM_CHECKED).float(), strict=True):
            keys, values = of_row.repeat_interleave(QUERIES_PER_KV_HEAD, dim=1).chunk(2, dim=-1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
            scores = soft_cap * (scores / soft_cap).tanh() if soft_cap else scores
            scores = scores.masked_fill(hidden, -torch.inf)
            if has_sinks:
                sinks = self.sinks.float()[:, None, None].expand(-1, num_nodes, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            rows.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values))
        return torch.stack(rows)

    def by_row(self, count: int) -> torch.Tensor:
        """[rows, length, KV heads, 2 * head size], the keys and values of the first `count` rows."""
        return self.cache[self.tables[:count].long()].transpose(2, 3).flatten(1, 2)[:, : self.length]


def binary_tree(num_nodes: int) -> np.ndarray:
    """[nodes, nodes] bool, what each node sees, layer by layer."""
    sees = np.eye(num_nodes, dtype=bool)
    for node in range(1, num_nodes):
        sees[node] |= sees[(node - 1) // 2]
    return sees


def check(inputs: Inputs, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where kernels and torch differ."""
    reference = inputs.reference()
    for plan in (inputs.once, inputs.row_by_row):
        found = inputs.attend(plan).unflatten(0, (-1, len(inputs.tree)))
        difference = (found[:NUM_CHECKED].float() - reference).abs().max().item()
        assert difference <= tolerance, f"attention differs from torch by {difference:.2g}"


class Flash:
    """The same attention by FlashAttention, of a batch of one group.

    Args:
        inputs: Of rows that compute no trees.
        calls: Its functions.
    """

    def __init__(self, inputs: Inputs, calls: Calls) -> None:
        self.inputs, self.calls = inputs, calls
        width, device = len(inputs.tables), inputs.tables.device
        starts = torch.arange(width + 1, dtype=torch.int32)
        self.starts, self.seq_lens = starts.to(device), inputs.lengths.to(device)
        batch: Any = SimpleNamespace(
            num_actual_tokens=width,
            max_query_len=1,
            query_start_loc=self.starts,
            query_start_loc_cpu=starts,
            seq_lens=self.seq_lens,
            seq_lens_cpu_upper_bound=inputs.lengths,
            block_table_tensor=inputs.tables,
        )
        self.plan = PrefixSuffixAttention([inputs.rows], batch, BLOCK_SIZE)
        self.keys, self.values = inputs.cache.transpose(1, 2).chunk(2, dim=-1)

    def once(self, soft_cap: float = 0.0, has_sinks: bool = False) -> torch.Tensor:
        """By prefix, suffix and merge."""
        inputs = self.inputs
        outputs, sinks = torch.empty_like(inputs.queries), inputs.sinks if has_sinks else None
        scoring = Scoring(inputs.scale, soft_cap=soft_cap, sinks=sinks)
        self.plan.attend(self.calls, Layer(inputs.queries, outputs, self.keys, self.values, scoring, {}, 3))
        return outputs

    def row_by_row(self, soft_cap: float = 0.0, has_sinks: bool = False) -> torch.Tensor:
        """By one call, as vLLM does."""
        outputs, _ = self.calls.attend(
            q=self.inputs.queries,
            k=self.keys,
            v=self.values,
            cu_seqlens_q=self.starts,
            max_seqlen_q=1,
            seqused_k=self.seq_lens,
            max_seqlen_k=self.inputs.length,
            block_table=self.inputs.tables,
            softmax_scale=self.inputs.scale,
            causal=True,
            softcap=soft_cap,
            s_aux=self.inputs.sinks if has_sinks else None,
            return_softmax_lse=True,
            fa_version=3,
        )
        return outputs


def check_flash(flash: Flash, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError where FlashAttention, in one call or in two, and torch differ."""
    for name, scoring in SCORINGS.items():
        reference = flash.inputs.reference(**scoring)[:, 0]
        for way in (flash.row_by_row, flash.once):
            difference = (way(**scoring)[:NUM_CHECKED].float() - reference).abs().max().item()
            assert difference <= tolerance, f"{way.__name__} ({name}) differs from torch by {difference:.2g}"


def load_flash(library: Path, merge: Path | None) -> Calls:
    """FlashAttention 3 from vLLM's `_vllm_fa3_C.abi3.so`.

    Args:
        library: Its path.
        merge: Of vLLM's `triton_merge_attn_states.py`; None: torch merges, which takes longer.
    """
    torch.ops.load_library(str(library))
    if merge is None:
        return Calls(attend_by_library, merge_in_torch)
    stand_in_for_vllm()
    spec = spec_from_file_location("vllm_merge_attn_states", merge)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return Calls(attend_by_library, module.merge_attn_states)


def attend_by_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's `flash_attn_varlen_func` does with `fa_version=3`, of paged keys and values."""
    lengths = options["max_seqlen_q"], options["max_seqlen_k"]
    new_keys, out, of_keys, rotary = (None, None), None, (None, None, None), (None, None, None)
    batch = options["cu_seqlens_q"], *of_keys, options["seqused_k"], *lengths, options["block_table"], None, None
    scales = (options.get(name) for name in ("q_descale", "k_descale", "v_descale"))
    masks = options["softmax_scale"], options["causal"], -1, -1, options["softcap"], True
    others = None, 0, None, 0, options["s_aux"], 1, 0, None  # from the scheduler's metadata on
    result = torch.ops._vllm_fa3_C.fwd(q, k, v, *new_keys, None, out, *batch, *rotary, *scales, *masks, *others)
    return result[0], result[1]


def merge_in_torch(
    output: torch.Tensor, prefix: torch.Tensor, prefix_log: torch.Tensor, suffix: torch.Tensor, suffix_log: torch.Tensor
) -> None:
    """What vLLM's `merge_attn_states` does, of tokens that see something."""
    logs = torch.stack([prefix_log, suffix_log])
    weights = logs.masked_fill(logs == torch.inf, -torch.inf).softmax(0).transpose(1, 2)[..., None]
    output.copy_(prefix.float() * weights[0] + suffix.float() * weights[1])


def measured(shape: Shape, device: torch.device, calls: Calls | None) -> tuple[Any, ...]:
    """A row of `COLUMNS`, all checked; on the host no times."""
    is_device = device.type == "cuda"
    inputs, tolerance = Inputs(shape, device, torch.bfloat16 if is_device else torch.float32), TOLERANCE
    check(inputs)
    ways: list[Callable[[], torch.Tensor]] = [partial(inputs.attend, plan) for plan in (inputs.row_by_row, inputs.once)]
    if calls is not None:
        flash = Flash(inputs, calls)
        check_flash(flash, tolerance)
        ways += [flash.row_by_row, flash.once]
    name = f"{shape.width} x {shape.num_prefix}"
    if not is_device:
        return (name, *["-"] * (len(COLUMNS) - 1))
    times = [*(device_us([way]) for way in ways[:2]), host_us([ways[1]])]
    times += [measure([way]) for measure in (device_us, host_us) for way in ways[2:]]
    return (name, *times, *["-"] * (len(COLUMNS) - 1 - len(times)))


def by_xformers(inputs: Inputs) -> Callable[[], torch.Tensor]:
    """What computes the same trees by xformers: [rows, nodes, KV heads, queries of each, head size]."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask
    from xformers.ops.tree_attention import tree_attention

    width, num_nodes = len(inputs.tables), len(inputs.tree)
    queries = inputs.queries.unflatten(0, (width, num_nodes)).unflatten(2, (-1, QUERIES_PER_KV_HEAD))
    before, of_trees = inputs.by_row(width).unsqueeze(3).split([inputs.start, num_nodes], dim=1)
    heads = (-1, -1, -1, QUERIES_PER_KV_HEAD, -1)
    keys_and_values = [part.contiguous().expand(heads) for both in (of_trees, before) for part in both.chunk(2, dim=-1)]
    bias = torch.zeros(num_nodes, num_nodes, device=queries.device, dtype=queries.dtype)
    bias.masked_fill_(torch.from_numpy(~inputs.tree).to(bias.device), -torch.inf)
    lengths = {"q_seqlen": [num_nodes] * width, "kv_seqlen": [inputs.start] * width, "kv_padding": inputs.start}
    prefix_bias = BlockDiagonalPaddedKeysMask.from_seqlens(**lengths)
    return partial(tree_attention, queries, *keys_and_values, bias, prefix_bias)


def measured_tree(shape: Shape, device: torch.device) -> tuple[Any, ...]:
    """A row of `TREE_COLUMNS`, all checked; on the host no times."""
    is_device = device.type == "cuda"
    inputs = Inputs(shape, device, torch.bfloat16 if is_device else torch.float32)
    check(inputs)
    name = f"{shape.width} x {shape.num_nodes} x {shape.num_prefix}"
    if not is_device:
        return (name, *["-"] * (len(TREE_COLUMNS) - 1))
    plain, once = (device_us([partial(inputs.attend, plan)]) for plan in (inputs.row_by_row, inputs.once))
    theirs: float | str = "-"
    if find_spec("xformers") is not None:
        run = by_xformers(inputs)
        found, expected = run().flatten(2, 3).flatten(0, 1), inputs.attend(inputs.once)
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        theirs = device_us([run])
    return name, plain, once, plain / once, theirs
