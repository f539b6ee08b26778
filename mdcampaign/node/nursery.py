"""The agent's end of the template: starts it, asks it for runners, hears of their ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mdcampaign.errors import ProtocolError
from mdcampaign.node import processes, wire

logger = logging.getLogger(__name__)

END_S = 12.0
"""A little more than the template takes at most to kill everything."""


class Nursery:
    """One template at a time. Nothing here blocks but `close`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._requests: deque[tuple[dict[str, Any], Sequence[socket.socket]]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self.sock: socket.socket
        self.up = False
        self.started_s = 0.0
        self.deaths = 0
        """How many templates have ended since the last time that one forked a runner."""

    @property
    def pid(self) -> int:
        """The process id of the template."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Exec a template; it says "up" when it can fork."""
        self.sock, theirs = wire.pair()
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mdcampaign.node.template", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._requests.clear()
        self.up = False
        self.started_s = time.monotonic()
        logger.info("template started, pid %d", self.pid)

    def fork(self, birth: dict[str, Any], socks: Sequence[socket.socket]) -> None:
        """Ask for a runner; its ends of the sockets are closed here when they have been sent."""
        self._requests.append(({"type": "fork", **birth}, socks))
        self.flush()

    def kill(self, runner: int) -> None:
        """Ask for the end of a runner and everything below it; it is "gone" when it is."""
        self._requests.append(({"type": "kill", "id": runner}, ()))
        self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as it goes without waiting; tell whether all was sent."""
        while self._requests:
            header, socks = self._requests[0]
            try:
                if not wire.send(self.sock, header, fds=[sock.fileno() for sock in socks], wait=False):
                    return False
            except OSError:  # dead; `lost` will be called
                return True
            self._requests.popleft()
            _close_all(socks)
        return True

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield what the template has said; at end-of-file nothing, as its death is learned from its wait status.

        Raises:
            EOFError: there will be no more.
        """
        while True:
            try:
                message = wire.receive(self.sock, wait=False)
            except ProtocolError as exc:
                logger.error("from the template: %s", exc)
                continue
            if message is None:
                return
            if message.header["type"] == "up":
                self.up = True
            elif message.header["type"] == "forked":
                self.deaths = 0
            yield message.header

    def lost(self, status: int) -> None:
        """Forget a template that has been reaped."""
        assert self._process is not None
        self._process.returncode = os.waitstatus_to_exitcode(status)  # or subprocess would wait for it
        self.up = False
        self.deaths += 1
        self.sock.close()
        for _, socks in self._requests:
            _close_all(socks)
        self._requests.clear()

    def destroy(self) -> None:
        """Kill the template, and by it the runners: for one that does not answer."""
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the template and everything below it, and wait until it is done."""
        self.sock.close()
        assert self._process is not None
        if self._process.returncode is None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                logger.error("the template does not end; it is killed")
        deadline = time.monotonic() + END_S
        while not processes.childless() and time.monotonic() < deadline:
            processes.kill_trees(processes.children(os.getpid()))
            time.sleep(0.01)


def _close_all(socks: Sequence[socket.socket]) -> None:
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.close()
