"""The files that take stdout and stderr of what runs in a slot, and the cap on them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CAP_BYTES = 1_000_000
_KEPT_BYTES = CAP_BYTES // 4


def trim(path: Path, cap_bytes: int = CAP_BYTES) -> bool:
    """Cut a file that has grown beyond the cap to its end, with a note in front; tell whether it was cut.

    A limit of the kernel (RLIMIT_FSIZE) would hit trajectories too. Whoever writes must have opened the file for
    appending; what is written in the moment of the cut may be lost.
    """
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if size > cap_bytes:
            file.seek(-min(_KEPT_BYTES, cap_bytes), os.SEEK_END)
            tail = file.read()
            file.truncate(0)
            file.seek(0)
            file.write(f"[mdcampaign: {size - len(tail)} bytes of output were dropped here]\n".encode() + tail)
            return True
    return False


def redirect(stem: Path) -> None:
    """Let this process, and what it starts, write to STEM.out and STEM.err from now on."""
    for number, ending in ((1, ".out"), (2, ".err")):
        fd = os.open(f"{stem}{ending}", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.dup2(fd, number)
        os.close(fd)


def overflows(cap_bytes: int = CAP_BYTES) -> bool:
    """Tell whether stdout or stderr of this process has grown beyond the cap."""
    return any(os.fstat(number).st_size > cap_bytes for number in (1, 2))
