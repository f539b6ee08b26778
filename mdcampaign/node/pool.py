"""The runners of a node and the attempts in them.

An attempt is placed into slots. A warm runner of just these slots takes it; otherwise the idle runners of overlapping
slots are killed and, when they are gone, a new one is forked. An attempt has ended when its process tree is dead, or
its runner can stay warm because nothing descends from it: only then is its slot free.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import zmq

from mdcampaign.errors import ProtocolError
from mdcampaign.jobs import Slot
from mdcampaign.node import processes, wire
from mdcampaign.node.attempts import Attempt, Listener, Runner, overlap
from mdcampaign.node.exits import Ooms, judge
from mdcampaign.node.nursery import Nursery
from mdcampaign.node.protocol import Direct, Ended, Place
from mdcampaign.node.slots import SlotTable

logger = logging.getLogger(__name__)

WARM_AFTER = {None, "input", "unstable", "no progress", "engine"}
"""Kinds of failure after which a process may still be trusted; not after a crash, or trouble with device or memory."""

TRIES = 3
"""Runners that may die before one takes the task; each by an accident that has nothing to do with it."""

TEMPLATE_TRIES = 4
"""Templates that may end without having forked a runner."""

DEATH_LIMIT_S = 30.0
"""What SIGKILL does not end by then hangs in the kernel, on a sick card or file system."""

FORK_LIMIT_S = 60.0
TEMPLATE_LIMIT_S = 300.0
"""Imports from a cold shared file system take minutes."""

BATCH = 64
"""Datagrams read from one runner before the others have their turn."""


class Pool:
    """Runs attempts; everything it has to say it says to its listener."""

    def __init__(
        self, table: SlotTable, directory: Path, nursery: Nursery, poller: zmq.Poller, listener: Listener
    ) -> None:
        self.attempts: dict[tuple[int, int], Attempt] = {}
        self._table, self._directory, self._nursery = table, directory, nursery
        self._poller, self._listener = poller, listener
        self._runners: dict[int, Runner] = {}
        self._waiting: list[Attempt] = []
        self._handlers: dict[int, Callable[[], None]] = {}
        self._born = 0
        self._bereft_s: float | None = None  # since when the template is dead, and we kill what it left
        self._ooms = Ooms()
        self._watch(nursery.sock, self._hear_template)

    # ------------------------------------------------------------ orders

    def place(self, place: Place, payload: bytes) -> None:
        """Run a task in these slots.

        Raises:
            ProtocolError: there are no such slots, or they are taken.
        """
        slot = self._table.slot(place)
        attempt = Attempt(place, slot, payload, time.monotonic())
        busy = [other for other in self.attempts.values() if overlap(other.slot, slot)]
        if busy:
            raise ProtocolError(f"slots {place.index} of {place.device} are taken by task {busy[0].place.task}")
        self.attempts[attempt.id] = attempt
        self._start(attempt)

    def direct(self, message: Direct) -> None:
        """Put a directive into the mailbox of an attempt; dropped when the attempt has ended or its mailbox is full."""
        attempt = self.attempts.get((message.task, message.attempt))
        if attempt is None:
            return
        if not attempt.taken:
            attempt.directives.append(message.model_dump())
        if attempt.runner is not None:
            self._post(attempt, attempt.runner, message.model_dump())

    def yield_all(self) -> None:
        """Tell every attempt to save and leave at its next report."""
        for task, number in self.attempts:
            self.direct(Direct(task=task, attempt=number, id=0, kind="yield"))

    def kill(self, attempts: Iterable[Attempt], how: str, message: str) -> None:
        """End attempts with everything below them; a task that has ended by itself is not "lost", but "cancelled"."""
        for attempt in list(attempts):
            attempt.order = attempt.order if attempt.order and attempt.order[0] == "cancelled" else (how, message)
            if attempt.runner is None:
                self._waiting.remove(attempt)
                self._conclude(attempt)
            else:
                self._doom(attempt.runner)

    # ------------------------------------------------------------ events

    def handle(self, fd: int) -> None:
        """Read what has come in on a descriptor that the poller reported."""
        if handler := self._handlers.get(fd):
            handler()

    def reaped(self, statuses: dict[int, int]) -> None:
        """Hear of children of the agent that have ended; they may be the template."""
        status = statuses.get(self._nursery.pid)
        if status is None or self._bereft_s is not None:
            return
        logger.error("the template ended (wait status %d): all runners are lost, a new one will be started", status)
        self._hear_template()
        self._unwatch(self._nursery.sock)
        self._nursery.lost(status)
        self._bereft_s = time.monotonic()

    def due_s(self) -> float:
        """Return after how many seconds `tick` should be called again at the latest."""
        if self._bereft_s is not None or not self._nursery.flush():
            return 0.01
        return 5.0

    def tick(self, now: float) -> None:
        """Do what no event calls for: finish off a dead template's family, notice one that does not answer."""
        if self._bereft_s is not None:
            processes.kill_trees(processes.children(os.getpid()))
            if processes.childless():
                self._start_over()
            return
        unborn = [runner.asked_s for runner in self._runners.values() if runner.pid is None]
        if self._nursery.up and unborn and now - min(unborn) > FORK_LIMIT_S:
            logger.error("the template has not forked for %.0f s; it is killed", FORK_LIMIT_S)
            self._nursery.destroy()
        elif not self._nursery.up and now - self._nursery.started_s > TEMPLATE_LIMIT_S:
            logger.error("the template has not come up within %.0f s; it is killed", TEMPLATE_LIMIT_S)
            self._nursery.destroy()
        for runner in self._runners.values():
            if runner.doomed_s and now - runner.doomed_s > DEATH_LIMIT_S and not runner.stuck:
                runner.stuck = True
                logger.error("runner %d (pid %s) does not die; its slots stay taken", runner.id, runner.pid)
        self._retry_waiting()

    def hopeless(self, now: float) -> str:
        """Say why this node cannot go on, if so."""
        if self._nursery.deaths >= TEMPLATE_TRIES:
            return "the template cannot be kept alive; see template.log"
        if self._bereft_s is not None and now - self._bereft_s > DEATH_LIMIT_S:
            return "the template is dead, and what it left does not die"
        return ""

    # ------------------------------------------------------------ starting

    def _start(self, attempt: Attempt) -> None:
        """Give the attempt to a warm runner, or fork one, or let it wait until the slots are clear."""
        clear = self._nursery.up
        for runner in [one for one in self._runners.values() if overlap(one.slot, attempt.slot)]:
            if runner.slot.index == attempt.slot.index and not runner.doomed_s and self._hand(attempt, runner):
                return
            self._doom(runner)
            clear = False
        if not clear:
            self._waiting.append(attempt)
            return
        try:
            runner = self._fork(attempt.slot)
        except OSError as exc:  # no more descriptors
            self._again(attempt, str(exc))
            return
        if not self._hand(attempt, runner):
            self._doom(runner)
            self._again(attempt, "the task could not be sent to it")

    def _fork(self, slot: Slot) -> Runner:
        """Ask for a runner; what is sent to it waits in its socket until it is there."""
        sock, theirs = wire.pair()
        monitoring, their_monitoring = wire.pair()
        self._born += 1
        runner = Runner(self._born, slot, sock, monitoring, time.monotonic())
        self._runners[runner.id] = runner
        self._watch(sock, lambda: self._hear(runner))
        self._watch(monitoring, lambda: self._hear_monitoring(runner))
        stem = "slot-" + "-".join(map(str, self._table.ranks(slot)))
        birth = {
            "id": runner.id,
            "environ": self._table.environment(slot),
            "cores": list(slot.cores),
            "output": str(self._directory / stem),
        }
        self._nursery.fork(birth, (theirs, their_monitoring))
        return runner

    def _hand(self, attempt: Attempt, runner: Runner) -> bool:
        """Send the task to a runner; False if that is dead."""
        place = attempt.place
        header = {"type": "task", "task": place.task, "attempt": place.attempt, "name": place.name}
        header |= {"context": place.context, "slot": vars(attempt.slot)}
        try:
            if not wire.send(runner.sock, header, attempt.payload, wait=False):
                return False
        except OSError:
            return False
        runner.attempt, attempt.runner = attempt, runner
        for directive in attempt.directives:
            self._post(attempt, runner, directive)
        return True

    def _post(self, attempt: Attempt, runner: Runner, directive: dict[str, Any]) -> None:
        try:
            posted = wire.send(runner.sock, directive, wait=False)
        except OSError:
            return  # it is dead, and we shall hear of it
        if not posted:
            logger.warning("task %d does not read its directives; one is dropped: %s", attempt.place.task, directive)

    def _retry_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for attempt in waiting:
            self._start(attempt)

    # ------------------------------------------------------------ hearing

    def _hear_template(self) -> None:
        try:
            for message in self._nursery.messages():
                runner = self._runners.get(message.get("id", 0))
                if message["type"] == "up":
                    self._retry_waiting()
                elif runner and message["type"] == "forked":
                    runner.pid = message["pid"]
                elif runner and message["type"] == "gone":
                    self._gone(runner, message["status"], message.get("message", ""))
                    self._retry_waiting()
        except EOFError:
            self._unwatch(self._nursery.sock)  # its wait status will come

    def _hear(self, runner: Runner, limit: int = BATCH) -> None:
        """Read up to `limit` messages of a runner."""
        for _ in range(limit):
            try:
                message = wire.receive(runner.sock, wait=False)
            except EOFError:
                self._unwatch(runner.sock)  # its wait status will come
                return
            except ProtocolError as exc:
                logger.error("from runner %d: %s", runner.id, exc)
                continue
            if message is None:
                return
            try:
                self._understand(runner, message)
            except (KeyError, TypeError, ValueError) as exc:  # some process of the job writes to our socket
                logger.error("from runner %d, and dropped: %r (%r)", runner.id, message.header, exc)

    def _understand(self, runner: Runner, message: wire.Datagram) -> None:
        header = message.header
        attempt = runner.attempt
        if attempt is None or attempt.id != (header["task"], header["attempt"]):
            return
        if header["type"] == "taken":
            attempt.taken = True
            fork_s = 0.0 if runner.used else time.monotonic() - attempt.placed_s
            runner.used = True
            self._listener.started(attempt, header["pid"], fork_s)
        elif header["type"] == "report":
            attempt.reported = True
            self._listener.reported(attempt, header)
        elif header["type"] == "ended":
            self._hear_monitoring(runner)  # Parsl wants the messages of a task before its result
            self._finished(attempt, runner, header, message.payload)

    def _hear_monitoring(self, runner: Runner) -> None:
        try:
            while (message := wire.receive(runner.monitoring, wait=False)) is not None:
                self._listener.monitoring(message.payload)
        except EOFError:
            self._unwatch(runner.monitoring)
        except ProtocolError as exc:
            logger.error("monitoring message of runner %d: %s", runner.id, exc)

    def _finished(self, attempt: Attempt, runner: Runner, header: dict[str, Any], payload: bytes) -> None:
        """The task has ended by itself; the attempt has, too, if the runner can stay."""
        task, number = attempt.id
        outcome = header["outcome"]
        message = Ended(task=task, attempt=number, how=header["how"], failed=header["failed"], outcome=outcome)
        attempt.ending = message, None if message.how == "interrupted" else payload
        if header["clean"] and not runner.doomed_s and (outcome or {}).get("failure") in WARM_AFTER:
            runner.attempt = None
            self._conclude(attempt)
        else:
            self._doom(runner)

    # ------------------------------------------------------------ ending

    def _doom(self, runner: Runner) -> None:
        if not runner.doomed_s:
            runner.doomed_s = time.monotonic()
            self._nursery.kill(runner.id)

    def _gone(self, runner: Runner, status: int | None, why: str = "") -> None:
        """A runner and all below it are dead. What it had sent before still counts."""
        self._hear_monitoring(runner)
        self._hear(runner, limit=1_000_000)
        for sock in (runner.sock, runner.monitoring):
            self._unwatch(sock)
            sock.close()
        del self._runners[runner.id]
        attempt, runner.attempt = runner.attempt, None
        if attempt is None:
            return
        attempt.runner = None
        if attempt.ending or attempt.order:
            self._conclude(attempt)
        elif not attempt.taken:
            self._again(attempt, why or f"it ended with wait status {status}")
        else:
            fields = {"how": "lost", "message": "the template died"} if status is None else judge(status, self._ooms)
            self._conclude(attempt, Ended(task=attempt.id[0], attempt=attempt.id[1], **fields))

    def _again(self, attempt: Attempt, why: str) -> None:
        """No runner has taken the task yet: try another, a few times."""
        attempt.tries += 1
        logger.warning("a runner died before it took task %d: %s", attempt.place.task, why)
        if attempt.tries >= TRIES:
            attempt.order = "lost", f"no runner could be started: {why}; see template.log"
            self._conclude(attempt)
        else:
            self._waiting.append(attempt)

    def _conclude(self, attempt: Attempt, message: Ended | None = None) -> None:
        """Say how it ended: as ordered if cancelled, else as the task said, else as ordered or judged."""
        del self.attempts[attempt.id]
        payload = None
        task, number = attempt.id
        if attempt.ending and not (attempt.order and attempt.order[0] == "cancelled"):
            message, payload = attempt.ending
        elif attempt.order:
            how, why = attempt.order
            message = Ended(task=task, attempt=number, how=how, message=why)  # type: ignore[arg-type]
        assert message is not None
        self._listener.ended(attempt, message, payload)

    def _start_over(self) -> None:
        """Nothing of the dead template's family is left: say so, and start another."""
        self._bereft_s = None
        for runner in list(self._runners.values()):
            self._gone(runner, None, "the template died")
        self._nursery.start()
        self._watch(self._nursery.sock, self._hear_template)

    # ------------------------------------------------------------ descriptors

    def _watch(self, sock: socket.socket, handler: Callable[[], None]) -> None:
        self._handlers[sock.fileno()] = handler
        self._poller.register(sock.fileno(), zmq.POLLIN)

    def _unwatch(self, sock: socket.socket) -> None:
        if self._handlers.pop(sock.fileno(), None):
            self._poller.unregister(sock.fileno())
