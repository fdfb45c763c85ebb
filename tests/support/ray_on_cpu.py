"""A Ray cluster of this machine on which vLLM's CPU build runs workers.

vLLM 0.32 refuses Ray on a CPU for one reason alone: its CPU platform does not say what Ray calls the device. Here it
is called a GPU, of which Ray is told that there are some. vLLM's older executor for Ray asks for any free port seconds
before a worker listens on it, and other processes get that one meanwhile: here its port is out of their reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import ray
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import ray_executor

from benchmarks.server import free_port

DEVICE = "GPU"


def give_cpu_platform_a_device() -> None:
    CpuPlatform.ray_device_key = DEVICE


@contextmanager
def local_ray(num_devices: int) -> Iterator[None]:
    """A cluster for as long as the block lasts; nothing of it is left afterwards."""
    had = CpuPlatform.ray_device_key, ray_executor.get_open_port
    ray_executor.get_open_port = free_port
    give_cpu_platform_a_device()
    ray.init(
        num_cpus=4,
        num_gpus=num_devices,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"prestart_worker_first_driver": False},  # workers that nobody needs would import vLLM, too
        runtime_env={"worker_process_setup_hook": give_cpu_platform_a_device},
    )
    try:
        yield
    finally:
        ray.shutdown()
        CpuPlatform.ray_device_key, ray_executor.get_open_port = had
