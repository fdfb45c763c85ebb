"""Compiles shared_prefix.cpp for this machine's CPU, once for all processes, and calls it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm.envs as envs
from vllm import _custom_ops as ops
from vllm.logger import init_logger

from vllm_trie.worker.attention.own_files import (
    ForeignFileError,
    open_own_attention_library,
    own_attention_library_folder,
)
from vllm_trie.worker.attention.shared_rows import (
    Scoring,
    SharedAttentionTokens,
    SharedRows,
    first_attention_keys,
    shared_attention_tokens,
)

logger = init_logger("vllm.trie_beam.attention")

SOURCE = Path(__file__).with_name("shared_prefix.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp")
OF_TYPES = {torch.float32: "Rows<Float32>", torch.bfloat16: "Rows<BFloat16>", torch.float16: "Rows<Float16>"}
MATRICES = {  # matrix types of shared_prefix.cpp, by vLLM's name of a cache's layout, and its dtype
    **{(isa, dtype): matrix for isa in ("vec", "vec16") for dtype, matrix in OF_TYPES.items()},
    ("amx", torch.bfloat16): "Pairs",
}
BLOCK_SIZES, HEAD_SIZES = 32, 16  # sizes must be multiples of these
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-3}


class CompilerError(RuntimeError):
    """There is no kernel for this machine; the message has the reason."""


class _Batch(ctypes.Structure):
    """`Batch` of shared_prefix.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("queries", "outputs")),
        *((name, ctypes.c_int64) for name in ("query_stride", "output_stride")),
        ("cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("block_stride", "head_stride")),
        ("tables", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "rows", "lengths", "firsts", "tree_starts", "trees")),
        *((name, ctypes.c_void_p) for name in ("starts", "num_shared")),
        *((name, ctypes.c_int32) for name in ("num_groups", "num_words", "block_size", "head_size")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "num_threads")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        ("sinks", ctypes.c_void_p),
    )


class CompiledAttentionPlan:
    """Attention of the tokens of groups in one step; prepares once what all layers have in common.

    Args:
        shared: The tokens.
        tables: [rows of the batch, blocks] int32.
        isa: vLLM's name of the cache's layout.
    """

    def __init__(self, shared: SharedAttentionTokens, tables: torch.Tensor, isa: str = "vec") -> None:
        assert tables.dtype == torch.int32
        assert tables.stride(1) == 1
        assert not shared.unseen
        assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in shared[:-2])
        assert isinstance(shared.trees, np.ndarray)
        assert shared.trees.dtype == np.int64
        assert shared.trees.flags.c_contiguous
        self.shared, self._tables, self._isa = shared, tables, isa  # the kernel reads the memory of the first two
        self._batch = batch = _Batch(tables=tables.data_ptr(), table_stride=tables.stride(0))
        batch.tokens, batch.rows, batch.lengths = (a.ctypes.data for a in (shared.places, shared.rows, shared.lengths))
        batch.tree_starts, batch.trees = shared.tree_starts.ctypes.data, shared.trees.ctypes.data
        batch.starts, batch.num_shared = shared.starts.ctypes.data, shared.num_shared.ctypes.data
        batch.num_groups, batch.num_words = len(shared.num_shared), shared.trees.shape[1]
        batch.num_threads = torch.get_num_threads()
        self._firsts: dict[int | None, tuple[np.ndarray, int]] = {}  # by window, with their addresses

    def attend(self, queries: torch.Tensor, outputs: torch.Tensor, kv_cache: torch.Tensor, scoring: Scoring) -> None:
        """Attention in one layer, causal or along trees. Other outputs of the batch stay unchanged.

        Args:
            queries: [tokens of the batch, heads, head size], the last two dimensions dense.
            outputs: As `queries`; written.
            kv_cache: [blocks, KV heads, block size, 2 * head size] of the same type, as vLLM's CPU backend lays it out
                in blocks of 32 tokens or multiples of that.
            scoring: The layer's; sinks are float32.

        Raises:
            CompilerError: there is no kernel for this machine.
        """
        block_stride, head_stride, *dense = kv_cache.stride()
        _, num_kv_heads, block_size, _ = kv_cache.shape
        _, num_heads, head_size = queries.shape
        assert queries.dtype == outputs.dtype == kv_cache.dtype
        assert queries.stride()[1:] == outputs.stride()[1:] == (head_size, 1)
        assert dense == [2 * head_size, 1]
        scale, window, soft_cap, sinks = scoring
        assert sinks is None or sinks.dtype == torch.float32
        assert block_size % BLOCK_SIZES == head_size % HEAD_SIZES == num_heads % num_kv_heads == 0
        batch = self._batch
        batch.queries, batch.outputs, batch.cache = queries.data_ptr(), outputs.data_ptr(), kv_cache.data_ptr()
        batch.query_stride, batch.output_stride = queries.stride(0), outputs.stride(0)
        batch.block_stride, batch.head_stride, batch.scale = block_stride, head_stride, scale
        if window not in self._firsts:
            firsts = first_attention_keys(self.shared, window)
            self._firsts[window] = firsts, firsts.ctypes.data
        _, batch.firsts = self._firsts[window]
        batch.soft_cap, batch.sinks = soft_cap, None if sinks is None else sinks.data_ptr()
        batch.block_size, batch.head_size = block_size, head_size
        batch.num_heads, batch.num_kv_heads = num_heads, num_kv_heads
        compiled_attention(MATRICES[self._isa, kv_cache.dtype])(ctypes.byref(batch))


@cache
def check_compiled_attention(
    num_heads: int, num_kv_heads: int, head_size: int, block_size: int, dtype: torch.dtype, isa: str = "vec"
) -> None:
    """Compares the kernel with vLLM's own on a small cache that vLLM has written.

    Raises:
        CompilerError: there is no kernel for this machine, or its results differ.
    """
    if isa == "amx":  # Linux grants AMX tiles to a process on request, as vLLM's first matrix product would make
        torch.cpu._init_amx()
    generator = torch.Generator().manual_seed(0)
    num_shared, num_rows = 2, 3
    num_blocks, num_tokens = num_shared + num_rows, (num_shared + num_rows) * block_size
    keys, values = torch.randn(2, num_tokens, num_kv_heads, head_size, generator=generator).to(dtype)
    queries = torch.randn(num_rows, num_heads, head_size, generator=generator).to(dtype)
    cache = torch.zeros(num_blocks, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(num_blocks, num_kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(num_tokens), isa)
    tables = torch.tensor([[*range(num_shared), num_shared + row] for row in range(num_rows)], dtype=torch.int32)
    lengths = torch.arange(num_rows, dtype=torch.int32) + num_shared * block_size + 1
    starts, scale = torch.arange(num_rows + 1, dtype=torch.int32), head_size**-0.5
    rows = SharedRows(np.arange(num_rows), num_shared * block_size)
    plan = CompiledAttentionPlan(
        shared_attention_tokens([rows], starts.numpy(), lengths.numpy(), block_size), tables, isa
    )
    of_heads = num_rows, num_heads, num_kv_heads, head_size
    schedule = ops.cpu_attn_get_scheduler_metadata(*of_heads, lengths, dtype, starts, True, -1, isa, True)
    for window, soft_cap, sinks in ((-1, 0.0, None), (block_size + 5, 2.0, torch.linspace(-1, 1, num_heads))):
        ours, theirs = torch.empty(2, *queries.shape, dtype=dtype)
        plan.attend(queries, ours, cache, Scoring(scale, window if window > 0 else None, soft_cap, sinks))
        of_batch = starts, lengths, scale, True, None, window, tables, soft_cap, schedule, sinks
        ops.cpu_attention_with_kv_cache(queries, *halves, theirs, *of_batch)
        if not torch.allclose(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]):
            raise CompilerError("the attention kernel and vLLM's differ: this vLLM lays its KV cache out otherwise")


@cache
def compiled_attention(matrix: str) -> Callable[[Any], None]:
    """The kernel's function, compiled for one of `MATRICES`.

    Raises:
        CompilerError: there is no compiler, or its output does not run here or is where others may write.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise CompilerError(f"there is no attention kernel for {platform.machine()}, only for x86_64")
    flags = *FLAGS, f"-DMATRIX={matrix}"
    descriptor = _open_attention_library(_attention_library(flags), flags)
    # The descriptor stays open because the loader identifies libraries by path. It finds torch's OpenMP runtime.
    try:
        function = ctypes.CDLL(f"/proc/self/fd/{descriptor}").attend_to_shared_prefixes
    except OSError as error:
        raise CompilerError(f"the kernel that {_attention_compiler()} made cannot be loaded: {error}") from error
    function.argtypes, function.restype = [ctypes.c_void_p], None
    return function


def _open_attention_library(library: Path, flags: tuple[str, ...]) -> int:
    """A descriptor of the library, which is compiled if it does not exist or others may have written it."""
    try:
        own_attention_library_folder(library.parent)
        try:
            descriptor = open_own_attention_library(library)
        except ForeignFileError as error:
            logger.warning("The attention kernel is compiled again: %s", error)
            descriptor = None
        if descriptor is None:
            _compile_attention(library, flags)
            descriptor = open_own_attention_library(library)
    except ForeignFileError as error:
        raise CompilerError(f"{error}; set VLLM_CACHE_ROOT to a folder of your own") from error
    except OSError as error:
        raise CompilerError(f"{_attention_library_folder()} cannot be written: {error}; set VLLM_CACHE_ROOT") from error
    assert descriptor is not None, f"{library} was removed as soon as it was compiled"
    return descriptor


def _attention_compiler() -> str:
    return os.environ.get("CXX", "g++")


@cache
def _attention_library(flags: tuple[str, ...]) -> Path:
    """Its path, named by a hash of everything that it depends on."""
    try:
        version = subprocess.run([_attention_compiler(), "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerError(
            f"{_attention_compiler()} does not run, which compiles the attention kernel at startup: {error}"
        ) from error
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "model name"))]
    made_of = [SOURCE.read_bytes(), version, *(line.encode() for line in sorted(set(cpu))), *map(str.encode, flags)]
    name = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:16]
    return _attention_library_folder() / f"shared_prefix-{name}.so"


def _attention_library_folder() -> Path:
    return Path(envs.VLLM_CACHE_ROOT) / "trie_beam"


def _compile_attention(library: Path, flags: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # another process may also compile it
        compiled, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        # -fopenmp is only for the compiler: the linker would add a second runtime to torch's.
        for command in (
            [*flags, "-c", str(SOURCE), "-o", str(compiled)],
            ["-shared", str(compiled), "-o", str(linked)],
        ):
            done = subprocess.run([_attention_compiler(), *command], capture_output=True, text=True)
            if done.returncode:
                why = next((line for line in done.stderr.splitlines() if "error" in line), f"status {done.returncode}")
                raise CompilerError(f"{_attention_compiler()} does not compile the attention kernel: {why}")
        linked.chmod(0o755)  # whatever the umask
        linked.rename(library)
