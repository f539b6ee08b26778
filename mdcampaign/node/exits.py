"""What the wait status of a runner says about how its task ended."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

FROM_OUTSIDE = {
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
"""Signals that batch systems, people and a kernel short of memory send; bugs in a job cause others."""


def judge(status: int, ooms: Ooms) -> dict[str, Any]:
    """Return the fields of `protocol.Ended` for a runner that ended, not by our order, before its task did."""
    if not os.WIFSIGNALED(status):
        code = os.waitstatus_to_exitcode(status)
        return {"how": "crashed", "exit_code": code, "message": f"the process ended itself with exit code {code}"}
    number = os.WTERMSIG(status)
    try:
        name = signal.Signals(number).name
    except ValueError:  # a real-time signal
        name = f"signal {number}"
    if number not in FROM_OUTSIDE:
        return {"how": "crashed", "signal": number, "message": f"the process was ended by {name}"}
    by = "the kernel: memory ran out" if number == signal.SIGKILL and ooms.grew() else "from outside"
    return {"how": "lost", "signal": number, "message": f"the process was killed by {name}, {by}"}


class Ooms:
    """Counts what the kernel has killed for want of memory, in our control group if it tells, else on the node."""

    def __init__(self) -> None:
        self._seen = self._count()

    def grew(self) -> bool:
        """Tell whether there was one more since the last time."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        for path in (_memory_events(), Path("/proc/vmstat")):
            with contextlib.suppress(OSError, ValueError):
                for line in path.read_text().splitlines():
                    name, _, value = line.partition(" ")
                    if name == "oom_kill":
                        return int(value)
        return 0


def _memory_events() -> Path:
    """Return the memory.events file of our control group (version 2); it need not exist."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            if line.startswith("0::"):
                return Path("/sys/fs/cgroup") / line[3:].lstrip("/") / "memory.events"
    return Path("/nonexistent")
