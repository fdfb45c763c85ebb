"""Ranks that are Ray actors find what ranks that are processes find, whatever brings them their messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")

from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

from tests.conftest import TRAINED_TARGET
from tests.distributed.engines import RANKS, ParallelEngine
from tests.distributed.ray_on_cpu import local_ray
from tests.distributed.test_tensor_parallel import check_same, copied, jobs
from tests.engine.test_preemption import run


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with local_ray(num_devices=2 * RANKS):  # an engine that is gone still has those it reserved
        yield


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return found_by("mp", MultiprocExecutor)


def found_by(backend: Any, kind: type) -> list[Any]:
    engine = ParallelEngine(Path(TRAINED_TARGET), distributed_executor_backend=backend, max_num_batched_tokens=256)
    try:
        assert type(engine.core.model_executor) is kind
        found = run(engine, copied(jobs()), lambda: None)
        engine.check_nothing_is_left()
        return found
    finally:
        engine.close()


def test_ray_finds_what_processes_find(cluster: None, expected: list[Any]) -> None:
    check_same(found_by("ray", RayExecutorV2), expected)


def test_messages_survive_rays_compiled_graph(cluster: None, expected: list[Any]) -> None:
    """vLLM's older executor, which Ray hands arrays in memory that it would like to have back."""
    check_same(found_by(RayDistributedExecutor, RayDistributedExecutor), expected)
