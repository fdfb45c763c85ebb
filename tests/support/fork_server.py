"""Imports vLLM, and forks for each command that `tests.support.forks` asks for. Run by that alone."""

from __future__ import annotations

import array
import atexit
import gc
import json
import logging
import multiprocessing.context
import os
import runpy
import signal
import socket
import sys
import types
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import values

PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]
READS_SOUNDS = str(Path(__file__).with_name("sounds"))  # vLLM looks for it once, and a test of servers needs it
MOST_BYTES = 1 << 20
PID = 4


def next_fork(requests: socket.socket) -> dict[str, Any]:
    """Returns in forks alone, each with what it is to be. Ends when nobody can ask any more."""
    while True:
        message, ancillary, _, _ = requests.recvmsg(MOST_BYTES, socket.CMSG_SPACE(4 * array.array("i").itemsize))
        if not message:
            os._exit(0)
        (files,) = (array.array("i", data) for _, _, data in ancillary)
        if os.fork() == 0:  # it waits for the fork, and tells how that ended
            requests.close()
            pid = os.fork()
            if pid == 0:
                os.close(files.pop())
                return {**json.loads(message), "streams": list(files)}
            os.setsid()
            for stream in files[:3]:
                os.close(stream)
            answers = socket.socket(fileno=files[3])
            answers.send(pid.to_bytes(PID, "little"))
            status = os.waitpid(pid, 0)[1]
            try:
                answers.send(status.to_bytes(PID, "little"))
            finally:
                os._exit(0)
        for file in files:
            os.close(file)
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def become(request: dict[str, Any]) -> None:
    """Streams, session, folder and environment as if this process had just been started."""
    if request["leads_session"]:
        os.setsid()
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
    for stream in request["streams"]:
        if stream > 2:
            os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = added
    signal.signal(signal.SIGINT, signal.default_int_handler)
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO")
    logging.getLogger("vllm").setLevel(level)
    for handler in logging.getLogger("vllm").handlers:
        handler.setLevel(level)
    # What vLLM's processes spawn would import it again.
    multiprocessing.context._concrete_contexts["spawn"] = multiprocessing.context._concrete_contexts["fork"]
    atexit.register(gc.unfreeze)  # or libraries complain of leaks
    os.register_at_fork(after_in_child=_begin_anew)


def _begin_anew() -> None:
    """A loop's signals are not those of its forks. Metrics are shared if the environment says so then."""
    signal.set_wakeup_fd(-1)
    values.ValueClass = values.get_value_class()


def run(command: list[str]) -> None:
    """As Python does by its command line, or a script of Python."""
    options = command[1:] if command[0] == sys.executable else command
    if options[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *options[2:]], ""
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(options[1], "<string>", "exec"), vars(main))
    elif options[0] == "-m":
        sys.argv, sys.path[0] = options[1:], os.getcwd()
        runpy.run_module(options[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = options, os.path.dirname(options[0])
        runpy.run_path(options[0], run_name="__main__")


if __name__ == "__main__":
    sys.path.append(READS_SOUNDS)
    for module in PRELOADED:
        import_module(module)
    sys.path.remove(READS_SOUNDS)
    gc.freeze()
    request = next_fork(socket.socket(fileno=int(sys.argv[1])))
    become(request)
    run(request["command"])
