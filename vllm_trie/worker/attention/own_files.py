"""Files that this process may run: nobody can have written them but its user, or root, who may do anything anyway.

Modes are those of Linux. Where an access control list lets others write, the bits of the group say so, too.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
ROOT = 0


class ForeignFileError(RuntimeError):
    """Others may have written this; says why."""


def own_attention_library_folder(folder: Path) -> None:
    """Make a folder, if there is none, into which others cannot write; let none of others write into one's own.

    Raises:
        ForeignFileError: it is somebody else's, or a link.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ForeignFileError(f"{folder} is a link, which others may turn elsewhere")
    if status.st_uid == os.geteuid() and status.st_mode & OTHERS_WRITE:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~OTHERS_WRITE)
        status = folder.lstat()
    _refuse_foreign_attention_library(folder, status)


def open_own_attention_library(file: Path) -> int | None:
    """A descriptor of what is in a file, None if there is none. What it reads cannot be replaced meanwhile.

    Raises:
        ForeignFileError: others may have written it, or it is a link.
        OSError: it cannot be read.
    """
    try:
        if file.is_symlink():
            raise ForeignFileError(f"{file} is a link, which others may turn elsewhere")
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
        raise ForeignFileError(f"{path} belongs to user {status.st_uid}, not to the one who runs this ({os.geteuid()})")
    if status.st_mode & OTHERS_WRITE:
        raise ForeignFileError(f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})")
