"""The verbs: what `SlotExecutor.control` and its kin may ask of the broker, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mdcampaign.broker.attempts import Attempts
from mdcampaign.broker.channels import Channels
from mdcampaign.broker.drain import Drain
from mdcampaign.broker.outbox import Outbox
from mdcampaign.broker.records import Holdings
from mdcampaign.node import protocol

Answer = dict[str, Any]


def answer(ok: bool, state: str = "", message: str = "", **more: Any) -> Answer:
    """Return an acknowledgement."""
    return {"ok": ok, "state": state, "message": message, **more}


ENDED = answer(False, "ended", "it has ended already")


class Verbs:
    """Obeys the executor, one verb at a time."""

    def __init__(
        self, holdings: Holdings, channels: Channels, outbox: Outbox, attempts: Attempts, drain: Drain
    ) -> None:
        self._holdings, self._channels, self._outbox = holdings, channels, outbox
        self._attempts, self._drain = attempts, drain
        self._scheduler, self._tasks = holdings.scheduler, holdings.tasks
        self._known: dict[str, Callable[[dict[str, Any]], Answer | None]] = {
            "cancel": self.cancel,
            "stop": self.direct,
            "yield": self.direct,
            "extend": self.direct,
            "rerank": self.rerank,
            "explain": self.explain,
            "snapshot": self.snapshot,
            "drain": self.drain,
            "events": self.switch_events,
            "shutdown": self.shutdown,
        }

    def obey(self, message: dict[str, Any]) -> None:
        """Obey a verb and acknowledge it."""
        verb = self._known.get(message["control"])
        said = answer(False, "unknown", "no such verb") if verb is None else verb(message)
        if said is not None and message.get("id") is not None:
            self._outbox.ack(message["id"], said)

    def cancel(self, message: dict[str, Any]) -> Answer:
        """End a task for good: out of the queue at once, or its process tree first."""
        task = self._tasks.get(message["task_id"])
        if task is None:
            return {**ENDED, "ok": True}
        task.cancelled = True
        if task.agent:
            self._channels.send(task.agent, protocol.Cancel(task=task.id, attempt=task.attempt))
            return answer(True, "running", "its processes are being ended")
        self._attempts.cancel_waiting(task)
        return answer(True, "waiting", "taken out of the queue")

    def direct(self, message: dict[str, Any]) -> Answer:
        """Send a directive to a running job, or keep it for the start of one that waits."""
        task = self._tasks.get(message["task_id"])
        kind = message["control"]
        if task is None:
            return ENDED
        if kind == "extend" and message["target_step"] <= task.target_step:
            return answer(False, task.state, f"its target is step {task.target_step} already; stop it to end it early")
        if kind == "extend":
            task.extended_to = max(task.extended_to or 0, message["target_step"])
        if task.agent:
            self._attempts.direct(task, kind, message.get("target_step"))
            return answer(True, "running", "it will be told at its next report")
        if kind == "stop" and not task.began:
            return {**self.cancel(message), "message": "it had not begun: taken out of the queue"}
        if kind == "stop":
            task.pending = self._attempts.directive(task, "stop", None)
        return answer(True, "waiting", "noted for its next start" if kind != "yield" else "")

    def rerank(self, message: dict[str, Any]) -> Answer:
        """Change the priority of a waiting or running job."""
        task = self._tasks.get(message["task_id"])
        if task is None:
            return ENDED
        self._scheduler.rerank(task.id, float(message["priority"]), self._holdings.now)
        self._outbox.event("reranked", task, priority=message["priority"])
        return answer(True, task.state)

    def explain(self, message: dict[str, Any]) -> Answer:
        """Say why a job is not running."""
        task = self._tasks.get(message["task_id"])
        if task is None:
            return ENDED
        if self._drain.begun:
            text = "nothing starts any more: the campaign is draining"
        elif not self._holdings.agents and not task.agent:
            text = "no node has joined yet"
        else:
            text = self._scheduler.explain(task.id, self._holdings.now)
        return answer(True, task.state, text)

    def snapshot(self, message: dict[str, Any]) -> Answer:
        """Count what waits and runs, and list the agents."""
        agents, now = self._holdings.agents.values(), self._holdings.now
        nodes = [agent.as_manager(now) | {"hostname": agent.info.hostname} for agent in agents]
        return answer(True, nodes=nodes, waiting=self._scheduler.waiting, running=self._scheduler.running)

    def drain(self, message: dict[str, Any]) -> None:
        """Start nothing more and ask every job that may be repeated to checkpoint; acknowledged when they have."""
        self._drain.begin(float(message["timeout_s"]), message["id"])

    def switch_events(self, message: dict[str, Any]) -> Answer:
        """Begin or cease to send events, as somebody listens or nobody does."""
        self._outbox.listened = bool(message["on"])
        return answer(True)

    def shutdown(self, message: dict[str, Any]) -> Answer:
        """End, as the executor is being shut down."""
        self._holdings.ending = "the executor is being shut down"
        return answer(True)
