"""Run programs that a model has written, each in a process of its own with limits on what it may do.

Time, memory and the size of files are limited by the system; sockets, other processes, and files outside the empty
folder that a program runs in are refused by an audit hook. That holds against mistakes, not against an attacker.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

CPU_SECONDS, WALL_SECONDS = 5, 15
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
GUARD = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_BYTES}, {FILE_BYTES}))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
REFUSED = (
    "socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "ctypes.",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate",
    "shutil.", "signal.",
)
HERE = os.getcwd() + os.sep
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

def guard(event, args):
    if event.startswith(REFUSED):
        raise PermissionError(event + " is refused here")
    if event == "open" and args[2] & WRITING and not os.path.realpath(os.fsdecode(args[0])).startswith(HERE):
        raise PermissionError("files outside this folder are refused here")

program = compile(sys.stdin.read(), "program", "exec")
sys.addaudithook(guard)
exec(program, {{"__name__": "__main__"}})
"""


def succeeds(program: str) -> bool:
    """Whether a Python program ends by itself, within the limits and without an exception."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-I", "-B", "-c", GUARD]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            result = subprocess.run(command, input=program.encode(), cwd=folder, env={}, timeout=WALL_SECONDS, **silent)
        except subprocess.TimeoutExpired:
            return False
    return result.returncode == 0


def which_succeed(programs: Sequence[str], at_once: int = 2) -> list[bool]:
    """`succeeds` of each."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(succeeds, programs))
