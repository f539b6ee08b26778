"""The drain: nothing starts any more, and running jobs are asked to save their state."""

from __future__ import annotations

from mdcampaign.broker.attempts import Attempts
from mdcampaign.broker.outbox import Outbox
from mdcampaign.broker.records import Holdings


class Drain:
    """At most one at a time; once `begun` it never ends, and `over` says when nothing more is to be waited for."""

    def __init__(self, holdings: Holdings, outbox: Outbox, attempts: Attempts) -> None:
        self._holdings, self._outbox, self._attempts = holdings, outbox, attempts
        self.begun = False
        self._limit = float("inf")
        self._ack: int | None = None

    def begin(self, timeout_s: float, ack: int | None) -> None:
        """Tell running jobs that may be repeated to yield; `ack`, if any, is acknowledged when they have."""
        self.begun, self._limit, self._ack = True, self._holdings.now + timeout_s, ack
        for task in self._holdings.tasks.values():
            if task.agent and task.requeue:
                self._attempts.direct(task, "yield", None)

    def over(self) -> bool:
        """Look whether the drain is done or out of time, and acknowledge it once."""
        if not self.begun:
            return False
        running = [task for task in self._holdings.tasks.values() if task.agent and task.requeue]
        if running and self._holdings.now < self._limit:
            return False
        if self._ack is not None:
            text = f"{len(running)} jobs still running"
            self._outbox.ack(self._ack, {"ok": not running, "state": "drained", "message": text})
        self._ack = None
        return True
