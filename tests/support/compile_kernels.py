"""Compiles every kernel for a GPU that need not be there, and prints as JSON what each takes of it.

Run by a test, in a process of its own: where Triton interprets, it compiles nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_trie.worker import kernels
from vllm_trie.worker.attention import triton_kernels

HOPPER = GPUTarget("cuda", 90, 32)
INT, LONG, LONGS, FLOATS = "i32", "i64", "*i64", "*fp32"
ROWS = dict.fromkeys(["slots", "sources", "num_tokens"], LONGS)
TABLES = {"table_pointers": "*u64", "table_strides": LONGS, "block_sizes": LONGS}
ATTENTION = (
    dict.fromkeys(["queries", "outputs", "cache"], "*bf16")
    | dict.fromkeys(["query_stride", "output_stride", "block_stride", "head_stride", "token_stride"], INT)
    | dict.fromkeys(
        ["tables", "places", "rows", "num_shared", "lengths", "spans", "first_tokens", "end_tokens"], "*i32"
    )
    | dict.fromkeys(["table_stride", "num_words", "num_parts", "count", "num_kv_heads"], INT)
    | {"sums": FLOATS, "logs": FLOATS, "scale": "fp32", "soft_cap": "fp32", "tree_starts": "*i32", "trees": LONGS}
)
HEADS = {"heads": 4, "head_size": 128, "padded_size": 128, "block_size": 16, "keys_at_a_time": triton_kernels.KEYS}
OWN: dict[str, Any] = {"padded_heads": triton_kernels.LEAST_QUERIES}
NO_SINKS = {"sinks": None}
SCORING = [dict.fromkeys(["has_window", "has_soft_cap"], value) for value in (False, True)]
STAGES = triton_kernels.NUM_WARPS, triton_kernels.NUM_STAGES
CASES: list[tuple[Any, ...]] = [
    *(
        (
            kernels._select_next,
            dict.fromkeys(["parents", "tokens", "next_parents", "next_tokens"], LONGS)
            | {"scores": FLOATS, "next_scores": FLOATS, "lives": "*i8"}
            | dict.fromkeys(["count", "width", "num_rows"], INT),
            {"slots": slots, "chunk": kernels.candidates_at_a_time(slots)},
            kernels.warps_to_select(slots),
        )
        for slots in (4, 64, 512, kernels.MOST_SLOTS)
    ),
    (
        kernels._copy_histories,
        ROWS | TABLES | {"num_common": LONGS, "tokens": "*i32", "tokens_stride": INT},
        {"tile_size": kernels.COPY_TILE},
        4,
    ),
    (
        kernels._copy_tails,
        ROWS | TABLES | {"num_tables": INT, "pointers": "*u64", "strides": LONGS, "words": LONGS},
        {"word": tl.int64, "tile_size": kernels.COPY_TILE},
        4,
    ),
    *(
        (triton_kernels._attend_to_shared, ATTENTION, HEADS | scoring | {"tile": triton_kernels.TILE}, *STAGES)
        for scoring in SCORING
    ),
    *(
        (
            triton_kernels._attend_to_own,
            ATTENTION | ({"sinks": "*bf16"} if has_sinks else {}),
            HEADS | scoring | OWN | {"has_trees": has_trees, "has_sinks": has_sinks} | ({} if has_sinks else NO_SINKS),
            *STAGES,
        )
        for scoring, has_trees, has_sinks in (
            (SCORING[0], False, False),
            (SCORING[0], True, False),
            (SCORING[1], True, True),
        )
    ),
]


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, num_stages: int = 3
) -> dict[str, Any]:
    """Bytes of shared memory, whether there are atomics, and what is said of registers, stack and local memory."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    options = {"num_warps": num_warps, "num_stages": num_stages}
    code = triton.compile(ASTSource(kernel, signature, values), HOPPER, options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "cubin"
        cubin.write_bytes(code.asm["cubin"])
        dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
        usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    has_atomics = bool(re.search(r"\b(atom|red)\.", code.asm["ptx"]))
    return {"name": kernel.__name__, "shared": code.metadata.shared, "atomics": has_atomics, "usage": usage}


if __name__ == "__main__":
    print(json.dumps([compiled(*case) for case in CASES]))
