"""Processes as forks of one that has imported vLLM, which takes eight seconds of a core.

Where vLLM would spawn a process, they fork. No forks are the server of `tests/behaviour/serving/one_server/` with the
plugin, and those of several ranks: there vLLM spawns engines and ranks, as it does for users.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]


@cache
def context() -> Any:
    """Its processes are forks of one that has imported what engines and servers need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.before_forks"])
    return context


class Fork:
    """What `subprocess.Popen` would start, in a session of its own.

    Args:
        command: What Python is to run: a file, or "-m" and a module; and the arguments.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], stdout: IO[str], stderr: IO[str] | None = None
    ) -> None:
        arguments = (list(command), dict(environment), stdout.name, (stderr or stdout).name)
        self._process = context().Process(target=_run, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), seconds or 0)
        return self._process.exitcode


def run(command: Sequence[str], seconds: float, **variables: str) -> subprocess.CompletedProcess[str]:
    """A `Fork` that has run to its end, with these variables in its environment."""
    with tempfile.NamedTemporaryFile("r") as stdout, tempfile.NamedTemporaryFile("r") as stderr:
        fork = Fork(command, os.environ | variables, stdout, stderr)
        try:
            code = fork.wait(seconds)
        finally:
            if fork.poll() is None:
                os.killpg(fork.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, code, stdout.read(), stderr.read())


def _run(command: list[str], environment: dict[str, str], stdout: str, stderr: str) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which whatever a shell runs in the background ignores
    os.chdir(ROOT)
    for stream, path in ((sys.stdout, stdout), (sys.stderr, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    _configure_logging()
    os.register_at_fork(after_in_child=_choose_metrics)
    multiprocessing.get_context = lambda method=None: multiprocessing.context._default_context.get_context("fork")
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def _choose_metrics() -> None:
    """Of one process or of several, by the environment, which the client of Prometheus asked when it was imported."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()


def _configure_logging() -> None:
    """By the environment, which vLLM asked when it was imported."""
    from vllm.logger import _configure_vllm_root_logger

    _configure_vllm_root_logger()
