"""Files that this process may execute: only its user, or root, can have written them.

Modes are those of Linux. Where an access control list lets others write, the group bits show it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


class ForeignFileError(RuntimeError):
    """Others may have written this file; the message has the reason."""


def own_attention_library_folder(folder: Path) -> None:
    """Makes a folder, if it does not exist, that others cannot write; removes others' write permission from one's own.

    Raises:
        ForeignFileError: it belongs to another user, or is a symbolic link.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(f"{folder} is a symbolic link, which others may redirect")
    if status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        status = folder.lstat()
    _refuse_foreign_attention_library(folder, status)


def open_own_attention_library(file: Path) -> int | None:
    """A descriptor of a file, None if it does not exist. What is read from it cannot be replaced in the meantime.

    Raises:
        ForeignFileError: others may have written it, or it is a symbolic link.
        OSError: it cannot be read.
    """
    try:
        if file.is_symlink():
            raise ForeignFileError(f"{file} is a symbolic link, which others may redirect")
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        _refuse_foreign_attention_library(file, os.fstat(descriptor))
    except ForeignFileError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_foreign_attention_library(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), ROOT):
        raise ForeignFileError(f"{path} belongs to user {status.st_uid}, not to this process's user ({os.geteuid()})")
    if status.st_mode & OTHERS_WRITE:
        raise ForeignFileError(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")
