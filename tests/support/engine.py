"""An engine in this process, what it must look like when nothing runs, and those that tests in a row share."""

from __future__ import annotations

import atexit
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import inspect_models_here
from tests.support.rows import WatchedRows
from vllm_trie.supported_engines import has_beams

ROOT = Path(__file__).resolve().parents[2]
TRAINED_TARGET = ROOT / "benchmarks" / "stdlib_pair" / "target"
BLOCK_SIZE = 32  # the smallest that vLLM's CPU attention takes
KV_CACHE_BYTES = 256 << 20

# vLLM collects garbage a dozen times per engine, a tenth of a second each if it looks at all that was imported. What is
# there is frozen twice: before the first engine, and before the second one, when all that the first imported is there.
_freeze, _starts = gc.freeze, itertools.count()
atexit.register(gc.unfreeze)  # or libraries complain of leaks
gc.freeze = gc.unfreeze = lambda: None


_inspect_models_here_once = cache(inspect_models_here)


@cache
def _look_for_plugins_once() -> None:
    from vllm.v1.worker.gpu.sample.logits_processor import loader

    loader.entry_points = cache(loader.entry_points)


@cache
def _let_kv_caches_take_what_is_written() -> None:
    """Memory of the system's is zero already, and costs nothing before it is used: a third of an engine's start."""
    from vllm.v1.worker.gpu import attn_utils

    allocate = attn_utils.allocate_kv_cache

    def zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.frombuffer(mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype)

    def allocate_by_pages(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        with mock.patch.object(torch, "zeros", zeros):
            return allocate(*args, **kwargs)

    attn_utils.allocate_kv_cache = allocate_by_pages


def freeze_all_there_is() -> None:
    """Look for garbage among objects that are made from now on alone."""
    _freeze()


@contextmanager
def _collecting_no_garbage() -> Iterator[None]:
    """vLLM collects it a dozen times at an engine's start and end, which costs more than all else there."""
    with mock.patch.object(gc, "collect", return_value=0):
        yield


def num_used_blocks(manager: Any) -> int:
    """KV blocks that are in use, by groups or by ordinary requests."""
    return int(manager.num_usable_blocks - manager.block_pool.get_num_free_blocks())


class Engine:
    """One in-process vLLM engine, and what it must look like when nothing runs."""

    def __init__(self, model: Path, **options: Any) -> None:
        from vllm import LLM

        options.setdefault("additional_config", {"trie_beam": {"check_invariants": True}})
        options.setdefault("max_model_len", 512)
        options.setdefault("max_num_seqs", 64)
        options.setdefault("kv_cache_memory_bytes", KV_CACHE_BYTES)
        options.setdefault("dtype", "float32")
        options.setdefault("block_size", BLOCK_SIZE)
        has_tokenizer = (model / "tokenizer.json").exists()
        _inspect_models_here_once()
        _look_for_plugins_once()
        if not torch.cuda.is_available():
            from tests.support import kernels_once  # noqa: F401

            _let_kv_caches_take_what_is_written()
        if next(_starts) < 2:
            freeze_all_there_is()
        with _collecting_no_garbage():
            self.llm = LLM(
                str(model),
                enforce_eager=True,
                skip_tokenizer_init=not has_tokenizer,
                **options,
            )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.watched = self.watch()

    def watch(self) -> WatchedRows | None:
        """Compare rows after every step."""
        return WatchedRows(self) if has_beams(self.core.vllm_config) else None

    @property
    def runner(self) -> Any:
        """The model runner of an engine that has one alone."""
        return self.core.model_executor.driver_worker.worker.model_runner

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def check_nothing_is_left(self) -> None:
        """Raise AssertionError if a block, a group, an output or a request outlived its search."""
        assert num_used_blocks(self.scheduler.kv_cache_manager) == 0, "KV blocks leak"
        assert not self.scheduler.kv_cache_manager._groups
        assert not self.scheduler.groups
        assert not self.scheduler.requests
        assert not self.scheduler.outbox
        assert not self.llm.llm_engine.has_unfinished_requests()

    def close(self) -> None:
        with _collecting_no_garbage():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.scheduler
        gc.collect()


class Engines:
    """Keeps the engine that was asked for last."""

    def __init__(self) -> None:
        self._key: object = None
        self._engine: Engine | None = None

    def __call__(self, model: Path, **options: Any) -> Engine:
        from vllm.distributed.parallel_state import model_parallel_is_initialized as is_usable

        key = (model, repr(sorted(options.items())))
        if self._engine is None or key != self._key or not is_usable():  # an engine's end takes that of all others
            self.close()
            self._engine, self._key = Engine(model, **options), key
        return self._engine

    @property
    def alive(self) -> Engine | None:
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
