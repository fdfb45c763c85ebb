"""The compiled kernel computes attention as float64 does, whatever rows share, and leaves all other rows alone."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from tests.support.sharing import Batch, Group, any_groups
from tests.worker.attention.trees import TreeBatch, TreeGroup, all_kinds, any_trees, random_tree
from vllm_trie.worker.attention import compiled
from vllm_trie.worker.attention.cpu_backend import SharedPrefixAttentionBuilder
from vllm_trie.worker.attention.shared_rows import Scoring

UNTOUCHED = 123.0
KINDS = [pytest.param(dtype, isa, id=f"{isa}-{dtype}".replace("torch.", "")) for isa, dtype in compiled.MATRICES]
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.bfloat16: (8e-3, 4e-3), torch.float16: (1e-3, 2e-4)}

if not current_platform.is_cpu():
    pytest.skip("the kernel is for vLLM's CPU backend", allow_module_level=True)
if shutil.which(os.environ.get("CXX", "g++")) is None:
    pytest.skip("no C++ compiler is here, and the kernel is compiled at the start", allow_module_level=True)
current_platform.import_kernels()


IN_A_NEW_PROCESS = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm_trie.worker.attention import compiled
compiled.check_compiled_attention(2, 1, 64, 64, torch.bfloat16, "amx")
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_a_process_that_has_multiplied_nothing_yet_may_compare_kernels_that_use_tiles() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def attended(batch: Batch, dtype: torch.dtype, isa: str, **scoring: Any) -> torch.Tensor:
    """The kernel's outputs, on a cache that vLLM has written."""
    num_kv_heads, head_size = batch.keys.shape[1:]
    cache = torch.empty(batch.num_blocks, num_kv_heads, batch.block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(batch.num_blocks, num_kv_heads, 2 * batch.block_size, head_size).chunk(2, dim=2)
    keys, values = batch.keys.to(dtype), batch.values.to(dtype)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, torch.arange(len(keys)), isa)
    outputs = torch.full_like(batch.queries, UNTOUCHED, dtype=dtype)
    # As a model has them: queries beside keys and values.
    queries = torch.cat([batch.queries, torch.full_like(batch.queries, torch.nan)], dim=1).to(dtype)
    plan = compiled.CompiledAttentionPlan(batch.shared.on_host(), batch.tables, isa)
    plan.attend(queries[:, : outputs.shape[1]], outputs, cache, Scoring(batch.scale, **scoring))
    return outputs


def check(batch: Batch, dtype: torch.dtype = torch.float32, isa: str = "vec", **scoring: Any) -> None:
    """Raise AssertionError unless rows of groups are as in float64, and others untouched."""
    batch.forget_unused()
    for name in ("queries", "keys", "values"):
        setattr(batch, name, getattr(batch, name).to(dtype).float())
    found, of_groups = attended(batch, dtype, isa, **scoring), batch.of_groups()
    assert (found[~of_groups] == UNTOUCHED).all()
    expected, (rtol, atol) = batch.reference(**scoring)[of_groups], TOLERANCES[dtype]
    torch.testing.assert_close(found[of_groups].double(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 3), (16, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_heads_of_any_kind(heads: tuple[int, int], head_size: int) -> None:
    group = Group(13, 3, [1 + row for row in range(13)], [1] * 13)
    check(Batch([group], *heads, head_size, block_size=32))


@pytest.mark.parametrize("block_size", [32, 64, 96, 128, 512])
def test_blocks_of_any_size_and_prefixes_of_many(block_size: int) -> None:
    groups = [Group(5, blocks, [1, 31, 32, 33, 300], [1] * 5) for blocks in (1, 2, 7)]
    check(Batch(groups, 4, 2, 32, block_size))


def test_groups_of_many_rows_are_shared_out_among_threads() -> None:
    threads = torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            check(Batch([Group(700, 2, [5] * 700, [1] * 700), Group(1, 1, [3], [1])], 2, 1, 32, 32, others=2))
    finally:
        torch.set_num_threads(threads)


def test_rows_that_compute_several_tokens_see_only_what_came_before_each() -> None:
    check(Batch([Group(6, 2, [1, 4, 9, 33, 40, 64], [1, 4, 5, 33, 2, 64])], 4, 2, 32, 32, others=3))


def test_blocks_that_are_shared_but_not_known_to_be_are_read_row_by_row() -> None:
    check(
        Batch(
            [Group(4, 5, [3] * 4, [1] * 4, known_blocks=2), Group(3, 4, [8] * 3, [2] * 3, known_blocks=0)], 4, 2, 32, 32
        )
    )


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_any_batch(data: st.DataObject) -> None:
    groups = data.draw(any_groups(4, 30, 100, 8, 20))
    num_kv_heads = data.draw(st.integers(1, 3))
    num_heads = num_kv_heads * data.draw(st.integers(1, 5))
    others, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    check(Batch(groups, num_heads, num_kv_heads, 32 * data.draw(st.integers(1, 3)), 32, others, seed))


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_any_batch_with_trees(data: st.DataObject) -> None:
    """In a batch with groups whose rows are no trees, and with ordinary rows."""
    trees = data.draw(st.lists(any_trees(12, 70, 80, 20), min_size=1, max_size=3))
    groups = trees + data.draw(any_groups(2, 10, 40, 8, 20)) * data.draw(st.integers(0, 1))
    num_kv_heads = data.draw(st.integers(1, 3))
    num_heads = num_kv_heads * data.draw(st.integers(1, 5))
    others, seed = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 99))
    check(TreeBatch(groups, num_heads, num_kv_heads, 32 * data.draw(st.integers(1, 3)), 32, others, seed))


@pytest.mark.parametrize("without", ["", "-mno-avx512bf16", "-mno-avx512f"])
@pytest.mark.parametrize(("dtype", "isa"), KINDS)
def test_caches_of_all_kinds_on_all_processors(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, isa: str, without: str
) -> None:
    if isa == "amx" and (without or not torch.cpu._is_amx_tile_supported()):
        pytest.skip("this processor has no AMX, or it has all of this")
    if without:
        monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, without))
        monkeypatch.setattr(compiled, "compiled_attention", cache(compiled.compiled_attention.__wrapped__))
    trees = [random_tree(nodes, nodes) for nodes in (1, 7, 64, 65)]
    tree_group = TreeGroup(4, 2, [9 + len(tree) for tree in trees], [1, 5, 64, 65], trees=trees)
    groups = [Group(13, 3, [1 + row for row in range(13)], [1] * 13), Group(2, 0, [70, 33], [5, 33]), tree_group]
    for heads, block_size in (((4, 4), 32), ((14, 2), 96)):
        for head_size in (80, 112) if isa == "vec16" else (32, 96):
            check(TreeBatch(groups, *heads, head_size, block_size, others=1), dtype, isa)


def test_trees_of_many_nodes_are_shared_out_among_threads() -> None:
    trees = [random_tree(nodes, seed) for seed, nodes in enumerate((300, 1, 64, 65))]
    own, computed = [5 + len(tree) for tree in trees], [len(tree) for tree in trees]
    threads = torch.get_num_threads()
    try:
        for torch_threads in (1, 3):
            torch.set_num_threads(torch_threads)
            check(TreeBatch([TreeGroup(4, 1, own, computed, trees=trees)], 4, 2, 32, 32, others=1))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [None, 1, 9, 60])
@pytest.mark.parametrize("which", [(1,), (1, 2)], ids=["some", "all"])
def test_tokens_of_trees_may_come_in_any_order_whichever_rows_they_lie_in(window: int | None, which: list[int]) -> None:
    batch = all_kinds(32)
    batch.forget_rows("cpu", which)
    check(batch, window=window)


@settings(max_examples=40, derandomize=True)
@given(st.data())
def test_windows_caps_and_sinks(data: st.DataObject) -> None:
    """Of trees, and of rows that share blocks; what is before all windows is not read."""
    groups = data.draw(any_groups(2, 10, 40, 8, 20)) + data.draw(st.lists(any_trees(6, 70, 80, 20), max_size=2))
    batch = TreeBatch(groups, 6, 2, 32 * data.draw(st.integers(1, 3)), 32, others=1, seed=data.draw(st.integers(0, 99)))
    window = data.draw(st.none() | st.integers(1, 40) | st.integers(1, 800))
    batch.forget_what_is_before(window)
    sinks = data.draw(st.sampled_from([None, torch.linspace(-3, 8, 6)]))
    check(batch, window=window, soft_cap=data.draw(st.sampled_from([0.0, 1.5, 50.0])), sinks=sinks)


def test_great_scores_are_no_harm() -> None:
    batch = Batch([Group(9, 4, [5] * 9, [1] * 9)], 2, 2, 32, 32)
    batch.queries *= 300
    check(batch)


def test_vllms_kernel_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, compared = ops.cpu_attention_with_kv_cache, []
    monkeypatch.setattr(ops, "cpu_attention_with_kv_cache", lambda *args: compared.append(attention(*args)))
    kinds = [kind for kind in compiled.MATRICES if kind[0] != "amx" or torch.cpu._is_amx_tile_supported()]
    for isa, dtype in kinds:
        head_size = 80 if isa == "vec16" else 64
        compiled.check_compiled_attention.__wrapped__(6, 2, head_size, block_size=32, dtype=dtype, isa=isa)
    assert len(compared) == 2 * len(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cache_that_is_laid_out_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    attention = ops.cpu_attention_with_kv_cache
    monkeypatch.setattr(
        ops, "cpu_attention_with_kv_cache", lambda q, k, v, *rest: attention(q, k, v.flip(-1).contiguous(), *rest)
    )
    with pytest.raises(compiled.CompilerError, match="lays its KV cache out otherwise"):
        compiled.check_compiled_attention.__wrapped__(
            num_heads=2, num_kv_heads=2, head_size=32, block_size=32, dtype=dtype
        )


@pytest.fixture
def _no_kernel_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiled, "_attention_library_folder", lambda: tmp_path / "trie_beam")
    monkeypatch.setattr(compiled, "_attention_library", compiled._attention_library.__wrapped__)


@pytest.mark.usefixtures("_no_kernel_yet")
def test_the_kernel_is_compiled_once_and_finds_the_openmp_of_torch(tmp_path: Path) -> None:
    compiled.compiled_attention.__wrapped__("Rows<Float32>")
    (library,) = (tmp_path / "trie_beam").iterdir()
    written = library.stat().st_mtime_ns
    compiled.compiled_attention.__wrapped__("Rows<Float32>")
    assert [file.stat().st_mtime_ns for file in (tmp_path / "trie_beam").iterdir()] == [written]
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    assert "omp" not in needed
    runtimes = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "omp.so" in line}
    assert len(runtimes) == 1


@pytest.mark.usefixtures("_no_kernel_yet")
def test_without_a_compiler_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(compiled.CompilerError, match="no-such-compiler does not run"):
        compiled.compiled_attention.__wrapped__("Rows<Float32>")


@pytest.mark.usefixtures("_no_kernel_yet")
@pytest.mark.parametrize(("says", "why"), [("echo in file >&2; echo error: bad >&2", "error: bad"), ("", "status 1")])
def test_a_compiler_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, why: str
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{says}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", os.fspath(compiler))
    with pytest.raises(compiled.CompilerError, match=f"does not compile the attention kernel: {why}"):
        compiled.compiled_attention.__wrapped__("Rows<Float32>")
    assert not [*(tmp_path / "trie_beam").iterdir()]


@pytest.mark.usefixtures("_no_kernel_yet")
def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(compiled, "_attention_library_folder", lambda: tmp_path / "file" / "trie_beam")
    with pytest.raises(compiled.CompilerError, match=r"cannot be written: .*; set VLLM_CACHE_ROOT"):
        compiled.compiled_attention.__wrapped__("Rows<Float32>")


BUILT = "shared_prefix-0.so"  # what stands for a library that was compiled


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where libraries lie, in which compilers put nothing but a word."""
    folder = tmp_path / "trie_beam"
    monkeypatch.setattr(compiled, "_attention_library_folder", lambda: folder)
    monkeypatch.setattr(compiled, "_compile_attention", lambda library, _: library.write_text("compiled"))
    return folder


def opened(folder: Path) -> str:
    with os.fdopen(compiled._open_attention_library(folder / BUILT, ()), "r") as file:
        return file.read()


def test_a_library_of_ones_own_is_compiled_once(folder: Path) -> None:
    assert opened(folder) == "compiled"
    (folder / BUILT).write_text("kept")
    assert opened(folder) == "kept"


@pytest.mark.parametrize("how", ["group", "all", "link", "owner"])
def test_a_library_that_others_may_have_written_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, how: str
) -> None:
    folder.mkdir()
    library, target = folder / BUILT, tmp_path / "elsewhere.so"
    (target if how == "link" else library).write_text("planted")
    if how == "link":
        library.symlink_to(target)
    elif how == "owner":
        as_if_of_another(monkeypatch, library)
    else:
        library.chmod(0o775 if how == "group" else 0o757)

    def compile_(library: Path, _: Any) -> None:
        monkeypatch.setattr(os, "fstat", STAT)
        library.unlink()  # as renaming does
        library.write_text("compiled")
        library.chmod(0o755)

    monkeypatch.setattr(compiled, "_compile_attention", compile_)
    assert opened(folder) == "compiled"
    assert not target.exists() or target.read_text() == "planted"


STAT = os.fstat


def as_if_of_another(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let this, and nothing else, belong to another user."""
    inode = path.stat().st_ino

    def fstat(of: Any) -> os.stat_result:
        found = STAT(of)
        return os.stat_result([*found[:4], 12345, *found[5:]]) if found.st_ino == inode else found

    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_no_library_is_loaded_from_a_folder_of_somebody_else(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folder.mkdir()
    os.chown(folder, 54321, -1)
    (folder / BUILT).write_text("planted")
    with pytest.raises(compiled.CompilerError, match=r"belongs to user 54321, .*; set VLLM_CACHE_ROOT to a folder of"):
        opened(folder)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        compiled.CompilerError, match="trie_beam is a symbolic link, which others may redirect; set VLLM"
    ):
        opened(folder)


def test_others_lose_the_right_to_write_into_ones_own_folder(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    assert opened(folder) == "compiled"
    assert folder.stat().st_mode & 0o777 == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_has_compiled_serves_all_users_read_only(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert opened(folder) == "compiled"
    monkeypatch.setattr(compiled, "_compile_attention", None)
    for path in (folder, folder / BUILT):
        os.chown(path, 0, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert opened(folder) == "compiled"


def test_builders_are_called_as_vllm_calls_its_own() -> None:
    """vLLM derives builders from those of a backend, and calls theirs by position."""
    bound = inspect.signature(SharedPrefixAttentionBuilder.build).bind(None, 0, None, False)
    assert [*bound.arguments] == ["self", "common_prefix_len", "common_attn_metadata", "args"]
