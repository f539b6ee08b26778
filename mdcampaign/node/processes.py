"""Process trees on Linux: who descends from whom, and how to end all of them.

A *child subreaper* (`prctl(2)`) becomes the parent of every descendant whose own parent has died, `setsid` or not. So
a subreaper with no children has no descendants, and whoever stands above a dead one inherits what it left behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Not every kernel is built with it (CONFIG_PROC_CHILDREN); it saves reading the status of every process of the node.
_KERNEL_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()


def become_subreaper() -> None:
    """Make this process the heir of all orphans below it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end it now if the parent is dead already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def children(pid: int) -> list[int]:
    """Return the direct children of a process, zombies included; none where there is no such process."""
    if not _KERNEL_LISTS_CHILDREN:
        return children_by_status(pid)
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def children_by_status(pid: int) -> list[int]:
    """Return what `children` does, by reading the status of every process."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                status = Path(entry.path, "stat").read_text()
                if int(status.rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def kill_trees(roots: Iterable[int]) -> None:
    """Kill processes and all their descendants.

    All are stopped before the first is killed, so that none can fork, or tell its heirs, in the meantime. Returns
    when the signals are sent; whoever is the parent reaps.
    """
    family: dict[int, None] = {}
    fresh = list(roots)
    while fresh:
        for pid in fresh:
            _signal(pid, signal.SIGSTOP)
            family[pid] = None
        fresh = [child for pid in family for child in children(pid) if child not in family]
    for pid in family:
        _signal(pid, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Reap every child that has ended; return the wait status of each."""
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            statuses[pid] = status
    return statuses


def childless() -> bool:
    """Reap what has ended and tell whether nothing is left: for a subreaper, no descendant at all."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _signal(pid: int, number: int) -> None:
    if pid > 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
