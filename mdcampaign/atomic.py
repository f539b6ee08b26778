"""Files that appear whole or not at all, also on NFS and Lustre."""

from __future__ import annotations

import errno
import os
import platform
import uuid
from pathlib import Path

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def replace(path: Path, data: bytes) -> None:
    """Replace `path` as a whole: written aside, synced, renamed, the directory synced."""
    aside = _write_aside(path, data)
    aside.replace(path)
    sync_directory(path.parent)


def create(path: Path, data: bytes) -> bool:
    """Create `path` with this content; return False, and change nothing, where something of that name exists.

    Made by a hard link, which is exclusive on NFS too; whether it took is read from the link count, because the
    answer of a server can be lost. Where the file system has no hard links, O_EXCL decides.
    """
    aside = _write_aside(path, data)
    try:
        try:
            os.link(aside, path)
        except FileExistsError:
            if aside.stat().st_nlink != 2:
                return False
        except OSError as exc:
            if exc.errno not in _NO_LINKS:
                raise
            return _create_exclusive(path, data)
        sync_directory(path.parent)
        return True
    finally:
        aside.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Make what was created or renamed in a directory survive a crash of the machine."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _create_exclusive(path: Path, data: bytes) -> bool:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _write_aside(path: Path, data: bytes) -> Path:
    aside = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return aside
