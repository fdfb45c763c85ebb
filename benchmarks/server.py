"""The real `vllm` command, serving the trained model to the real `openai` client."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import openai

from benchmarks.common import BLOCK_SIZE, TARGET

VLLM = str(Path(sys.executable).with_name("vllm"))
MODULE = (sys.executable, "-m", "vllm.entrypoints.cli.main")  # the same, also where pip made no scripts
SERVE = ("vllm", "serve", str(TARGET), "--served-model-name", "target")
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
START_SECONDS = 600
END_SECONDS = 120
ROOT = Path(__file__).resolve().parent.parent
PORTS_FOR_ANYBODY = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Server:
    """A running server."""

    def __init__(self, process: Any, port: int, log: Path) -> None:
        self.process, self.log = process, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=self.url, limits=limits, timeout=120)  # of a machine that is busy

    def metrics(self) -> str:
        """All that /metrics shows."""
        return self.http.get("/metrics").text

    def gauge(self, name: str, engine: str = "", label: str = "") -> float:
        """A metric of one engine, or its sum over all; `label`, as in `reason="x"`, picks among further labels."""
        start = f'{name}{{engine="{engine}'
        lines = [line for line in self.metrics().splitlines() if line.startswith(start) and label in line]
        values = [float(line.split()[-1]) for line in lines]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()[-3000:]}"
            try:
                if self.http.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < deadline, f"the server does not start:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    def wait_until_idle(self, *more: str, seconds: float = 20) -> None:
        """Raise AssertionError if requests run or KV blocks are held after that time, or other gauges are not zero."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", *more)
        deadline = time.monotonic() + seconds
        while busy := [name for name in names if self.gauge(name)]:
            assert time.monotonic() < deadline, f"never back to zero: {busy}"
            time.sleep(0.1)


def free_port() -> int:
    """A port on which nobody listens, below those that the system gives to processes that ask for any.

    So it is still free when a process that takes seconds to start listens on it.
    """
    end = int(PORTS_FOR_ANYBODY.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(end // 2, end)  # vLLM seeds the other alike in all processes
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@contextmanager
def serving(
    log: Path,
    *options: str,
    command: Sequence[str] = SERVE,
    start: Callable[..., Any] | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[Server]:
    """Serve the trained target, with the settings of the tests, on a free port.

    On leaving, interrupt the server and see that all its processes end; where this process is being ended, end them.

    Args:
        log: The file for what it prints.
        options: Of `vllm serve`, after those settings.
        command: The command before them.
        start: Starts the command, its environment and output given, in a session of its own.
        start_seconds: Within which it must be ready.
    """
    port = free_port()
    where = ["--host", "127.0.0.1", "--port", str(port)]
    limits = ["--max-model-len", "512", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 28)]
    engine = ["--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE), *limits]
    more = ["--max-logprobs", "64", "--chat-template", CHAT_TEMPLATE, *options]
    environment = {k: v for k, v in os.environ.items() if k not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_PLUGINS")}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"
    with log.open("w") as output:
        process = (start or _start)([VLLM, *command[1:], *where, *engine, *more], environment, output)
    server = Server(process, port, log)
    try:
        server.wait_until_ready(start_seconds)
        yield server
    except (KeyboardInterrupt, SystemExit):  # whoever ends this process may not wait
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(END_SECONDS)
        finally:
            survivors = _group_lives(process.pid)
            if survivors:
                os.killpg(process.pid, signal.SIGKILL)
    assert not survivors, "processes outlived the server"


def _start(command: list[str], environment: dict[str, str], output: IO[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [*MODULE, *command[1:]],
        env=environment,
        cwd=ROOT,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def _group_lives(group: int, seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
