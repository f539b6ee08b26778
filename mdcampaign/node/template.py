"""The process that runners are forked from: small, one thread, nothing loaded that a fork must not inherit.

It is exec'd by the agent, before that opens any socket. It has loaded Parsl's serialiser and `execute_task` and no
engine: `import openmm` can start threads, numpy loaded here would give every fork the same random numbers, and a loaded
OpenMP runtime ignores thread counts set later. A child subreaper, it sees and reaps whatever a job leaves behind.

Requests (JSON over the control socket): {"type": "fork", "id", "environ", "cores", "output"} with the runner's two
sockets; {"type": "kill", "id"}. Answers: {"type": "up"} once; {"type": "forked", "id", "pid"}; {"type": "gone", "id",
"status"} when a runner and all that descends from it is dead and reaped, with its wait status; a fork that fails is
"gone" at once, with the status None and a "message". At end-of-file, when the agent has died, everything is killed.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from mdcampaign.errors import ProtocolError
from mdcampaign.node import processes, runner, wire

LOOK_AGAIN_S = 0.02
"""An orphan that was a zombie when it came to us tells nobody: look again while somebody is dying."""

END_S = 10.0
"""How long to go on killing at the end; what does not die by then hangs in the kernel."""


@dataclass
class Dying:
    """A runner that is dead, and the orphans that it left."""

    id: int
    status: int
    remains: set[int] = field(default_factory=set)


class Template:
    """Forks runners on request, and reaps."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._runners: dict[int, int] = {}  # pid -> id
        self._dying: list[Dying] = []
        self._waking, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Serve until the agent is gone, then kill everything."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to be woken
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._waking, select.POLLIN)
        try:
            wire.send(self._control, {"type": "up"})
            while True:
                for fd, _ in poll.poll(LOOK_AGAIN_S * 1000 if self._dying else None):
                    if fd == self._waking:
                        os.read(self._waking, 4096)
                    else:
                        self._serve()
                self._reap()
        except (EOFError, ConnectionError):
            pass
        finally:
            self._end()

    def _serve(self) -> None:
        """Handle one request."""
        try:
            request = wire.receive(self._control)
        except ProtocolError as exc:
            print(exc, file=sys.stderr)
            return
        assert request is not None
        if request.header["type"] == "fork":
            self._fork(request.header, request.fds)
        else:
            processes.kill_trees(pid for pid, id in self._runners.items() if id == request.header["id"])

    def _fork(self, birth: dict[str, Any], fds: tuple[int, ...]) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as exc:  # no more processes or memory
            for fd in fds:
                os.close(fd)
            wire.send(self._control, {"type": "gone", "id": birth["id"], "status": None, "message": str(exc)})
            return
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for mine in (self._control.detach(), self._waking, self._wake):
                os.close(mine)
            sock, monitoring = (socket.socket(fileno=fd) for fd in fds)
            runner.become(birth, sock, monitoring, parent)
        for fd in fds:
            os.close(fd)
        self._runners[pid] = birth["id"]
        wire.send(self._control, {"type": "forked", "id": birth["id"], "pid": pid})

    def _reap(self) -> None:
        """Reap; kill what dead runners left; report each runner of which nothing is left."""
        bereft: list[Dying] = []
        for pid, status in processes.reap().items():
            if pid in self._runners:
                bereft.append(Dying(self._runners.pop(pid), status))
                self._dying.append(bereft[-1])
            for dying in self._dying:
                if pid in dying.remains:
                    dying.remains.discard(pid)
                    bereft.append(dying)
        if bereft:
            self._adopt(bereft)
        for dying in [one for one in self._dying if not one.remains]:
            self._dying.remove(dying)
            wire.send(self._control, {"type": "gone", "id": dying.id, "status": dying.status})

    def _adopt(self, bereft: list[Dying]) -> None:
        """Kill the orphans that have come to us, and charge them to those whose process has just been reaped."""
        known = set(self._runners).union(*(dying.remains for dying in self._dying))
        orphans = {pid for pid in processes.children(os.getpid()) if pid not in known}
        processes.kill_trees(orphans)
        for dying in bereft:
            dying.remains |= orphans

    def _end(self) -> None:
        deadline = time.monotonic() + END_S
        while not processes.childless() and time.monotonic() < deadline:
            processes.kill_trees(processes.children(os.getpid()))
            time.sleep(0.01)


def main(fd: int) -> None:
    """Be the template of the agent at the other end of this socket."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # Slurm sends TERM to every process of a step; the agent gets it, too, and lets jobs save first.
        signal.signal(number, signal.SIG_IGN)
    processes.become_subreaper()
    gc.collect()
    gc.freeze()  # what is loaded by now stays shared with the forks
    Template(socket.socket(fileno=fd)).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
