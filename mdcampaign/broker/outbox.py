"""The outbox: what the executor is to know, kept until the slots have been filled again."""

from __future__ import annotations

import time
from typing import Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.serialize import serialize

from mdcampaign.broker.records import Task
from mdcampaign.node import protocol


class Outbox:
    """Results, acknowledgements and events for the executor. Events count only while somebody listens (`listened`)."""

    def __init__(self, listened: bool) -> None:
        self.listened = listened
        self._messages: list[dict[str, Any]] = []

    def empty(self) -> list[dict[str, Any]]:
        """Return what is to be sent, oldest first, and forget it."""
        messages, self._messages = self._messages, []
        return messages

    def result(self, task: Task, message: protocol.Ended, payload: bytes) -> None:
        """Report a result, or an exception that the task raised."""
        key = "result" if message.how == "result" else "exception"
        said = (message.outcome or {}).get("kind")
        how = said or ("failed" if message.failed or key == "exception" else "done")
        self._end(task, how=how, outcome=message.outcome, **{key: payload})

    def failure(self, task: Task, exc: Exception, how: str) -> None:
        """Report the end of a task that has no result."""
        wrapped = serialize(RemoteExceptionWrapper(type(exc), exc, None))
        self._end(task, how=how, outcome=None, exception=wrapped)

    def _end(self, task: Task, **facts: Any) -> None:
        self._messages.append({"type": "result", "task_id": task.id, **facts})

    def ack(self, ident: int, answer: dict[str, Any]) -> None:
        """Acknowledge a verb of the executor."""
        self._messages.append({"type": "ack", "id": ident, **answer})

    def event(self, kind: str, task: Task | None = None, /, **facts: Any) -> None:
        """Tell whoever listens what happened."""
        if not self.listened:
            return
        about = {} if task is None else {"job": task.request.name, "task": task.id, "attempt": task.attempt}
        self._messages.append({"type": "event", "event": {"event": kind, "t": time.time(), **about, **facts}})
