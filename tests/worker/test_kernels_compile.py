"""Every kernel compiles for a GPU and fits in its registers, though no GPU is at hand."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests import RUNS_V2
from vllm_trie.worker import kernels

pytestmark = pytest.mark.skipif(RUNS_V2, reason="Triton's interpreter compiles nothing")
HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES = 48 << 10  # that any kernel may have without asking
INT, LONG, LONGS, FLOATS = "i32", "i64", "*i64", "*fp32"
LOGITS = {"logits": "*bf16", "row_stride": LONG, "places": LONGS, "temperature": "fp32"}
ROWS = {"rows": LONGS, "num_rows": INT, "parents": "*i32"}
TABLES = {"table_pointers": "*u64", "table_strides": LONGS, "block_sizes": LONGS}
TILES = {"maxima": FLOATS, "sums": FLOATS, "vocab_size": INT, "num_tiles": INT}
CASES: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
    (kernels._partial_softmax, LOGITS | TILES, {"scales": True, "tile_size": kernels.TILE_SIZE}, 8),
    (
        kernels._continuation_keys,
        LOGITS
        | TILES
        | {"scores": FLOATS, "masked_token_ids": LONGS, "num_masked": INT, "keys": LONGS, "rows_per_group": INT},
        {"scales": True, "tile_size": kernels.TILE_SIZE, "tiles": 64},
        8,
    ),
    *(
        (
            kernels._settle,
            {"keys": LONGS, "stop_token_ids": LONGS, "packed": "*i32"}
            | dict.fromkeys(["num_ranked", "num_stops", "num_rows", "vocab_size", "width", "is_last"], INT),
            {"slots": slots, "chunk": kernels.candidates_at_a_time(slots)},
            kernels.warps_to_settle(slots),
        )
        for slots in (4, 64, 512)
    ),
    (
        kernels._permute_rows,
        ROWS | TABLES | {"tokens": "*i32", "tokens_stride": INT},
        {"tile_size": kernels.COPY_TILE},
        4,
    ),
    (
        kernels._copy_tails,
        ROWS | TABLES | {"num_tables": INT, "pointers": "*u64", "strides": LONGS, "words": LONGS},
        {"word": tl.int64, "tile_size": kernels.COPY_TILE},
        4,
    ),
]


@pytest.mark.parametrize(("kernel", "types", "constants", "num_warps"), CASES)
def test_kernel_compiles_for_hopper_and_spills_nothing(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int, tmp_path: Path
) -> None:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, values), HOPPER, {"num_warps": num_warps})
    assert compiled.metadata.shared <= SHARED_BYTES
    assert not re.search(r"\b(atom|red)\.", compiled.asm["ptx"]), "no atomics, so that ranks agree"
    cubin = tmp_path / "cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    dump = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert " STACK:0 " in usage, usage
    assert " LOCAL:0 " in usage, usage
