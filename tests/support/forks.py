"""Processes that start as forks of one that has imported vLLM, where each would import it anew, for ten seconds.

For tests of what a command does once it runs. `Fork` is `subprocess.Popen`, for commands of Python alone.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
PID = 4  # bytes, as of a status


class Fork(subprocess.Popen):
    """Python with such a command line, folder, environment, session and streams, in a fork of `fork_server`.

    A process that it spawns by multiprocessing is a fork, too, of itself.
    """

    def __init__(self, command: Sequence[Any], **options: Any) -> None:
        self._options = options
        super().__init__([*map(str, command)], **options)

    def _execute_child(self, command: list[str], *args: Any, **kwargs: Any) -> None:
        """After `subprocess` has made the pipes: args end with their ends, and how the child is to begin."""
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = args[9:15]
        self._answers, theirs = socket.socketpair()
        streams = [own if own != -1 else fd for own, fd in ((p2cread, 0), (c2pwrite, 1), (errwrite, 2))]
        request = {
            "command": command,
            "folder": str(self._options.get("cwd") or Path.cwd()),
            "environment": dict(self._options.get("env") or os.environ),
            "leads_session": bool(self._options.get("start_new_session")),
        }
        with theirs:
            _ask_server(request, [*streams, theirs.fileno()])
        for of_fork, ours in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if ours != -1:
                os.close(of_fork)
        if getattr(self, "_devnull", None) is not None:
            os.close(self._devnull)
        self._closed_child_pipe_fds = True
        self.pid = self._answer()
        self._child_created = True

    def _answer(self) -> int:
        answer = self._answers.recv(PID, socket.MSG_WAITALL)
        assert len(answer) == PID, "the server of forks ended"
        return int.from_bytes(answer, "little")

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._answers], [], [], 0)[0]:
            return 0, 0
        with self._answers:
            return self.pid, self._answer()

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        with self._waitpid_lock:
            if self.returncode is None:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
        return self.returncode


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, in a fork."""
    with forking():
        return subprocess.run(command, **options)


@contextmanager
def forking() -> Iterator[None]:
    """Let `subprocess` fork."""
    with mock.patch.object(subprocess, "Popen", Fork):
        yield


@cache
def _server() -> socket.socket:
    """It ends when this process does, which closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.support.fork_server", str(theirs.fileno())]
    with theirs:
        subprocess_popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True)
    return ours


subprocess_popen = subprocess.Popen


def _ask_server(request: dict[str, Any], files: list[int]) -> None:
    fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    _server().sendmsg([json.dumps(request).encode()], fds)
