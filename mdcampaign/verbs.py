"""The verbs by which the executor steers: what each does to a task that waits, runs or has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mdcampaign import errors
from mdcampaign.node import protocol

if TYPE_CHECKING:
    from mdcampaign.broker import Broker

Answer = dict[str, Any]


class Verbs:
    """Obeys the control messages of `SlotExecutor`, in order with the submissions on the same channel."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._verbs: dict[str, Callable[[dict[str, Any]], Answer | None]] = {
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

    def obey(self, message: dict[str, Any]) -> Answer | None:
        """Do what is asked and return the answer, or None where it comes later."""
        verb = self._verbs.get(message["control"])
        if verb is None:
            return {"ok": False, "state": "unknown", "message": f"no such verb: {message['control']!r}"}
        return verb(message)

    def cancel(self, message: dict[str, Any]) -> Answer:
        """End a task for good: out of the queue at once, or its process tree first."""
        task = self._broker.tasks.get(message["task_id"])
        if task is None:
            return {"ok": True, "state": "ended", "message": "it has ended already"}
        task.cancelled = True
        if task.agent:
            self._broker.send(task.agent, protocol.Cancel(task=task.id, attempt=task.attempt))
            return {"ok": True, "state": "running", "message": "its processes are being ended"}
        self._broker.scheduler.cancel_waiting(task.id, self._broker.now)
        self._broker.fail(task, errors.JobCancelled(f"{task.request.name} was cancelled while it waited"), "cancelled")
        return {"ok": True, "state": "waiting", "message": "taken out of the queue"}

    def direct(self, message: dict[str, Any]) -> Answer:
        """Send a directive to a running job, or keep it for the start of one that waits."""
        task = self._broker.tasks.get(message["task_id"])
        kind = message["control"]
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        if kind == "extend" and message["target_step"] <= task.target_step:
            text = f"its target is step {task.target_step} already; stop it to end it early"
            return {"ok": False, "state": "running" if task.agent else "waiting", "message": text}
        if kind == "extend":
            task.extended_to = max(task.extended_to or 0, message["target_step"])
        if task.agent:
            self._broker.send_directive(task, kind, message.get("target_step"))
            return {"ok": True, "state": "running", "message": "it will be told at its next report"}
        if kind == "stop" and not task.began:
            answer = self.cancel(message)
            return {**answer, "message": "it had not begun: taken out of the queue"}
        if kind == "stop":
            task.pending = self._broker.directive(task, "stop", None)
        return {"ok": True, "state": "waiting", "message": "noted for its next start" if kind != "yield" else ""}

    def rerank(self, message: dict[str, Any]) -> Answer:
        """Change the priority of a waiting or running job."""
        task = self._broker.tasks.get(message["task_id"])
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        self._broker.scheduler.rerank(task.id, float(message["priority"]), self._broker.now)
        self._broker.event("reranked", task, priority=message["priority"])
        return {"ok": True, "state": "running" if task.agent else "waiting", "message": ""}

    def explain(self, message: dict[str, Any]) -> Answer:
        """Say why a job is not running."""
        task = self._broker.tasks.get(message["task_id"])
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        if self._broker.draining:
            text = "nothing starts any more: the campaign is draining"
        elif not self._broker.agents and not task.agent:
            text = "no node has joined yet"
        else:
            text = self._broker.scheduler.explain(task.id, self._broker.now)
        return {"ok": True, "state": "running" if task.agent else "waiting", "message": text}

    def snapshot(self, message: dict[str, Any]) -> Answer:
        """Count what waits and runs, and list the agents."""
        nodes = [
            agent.as_manager(self._broker.now) | {"hostname": agent.info.hostname}
            for agent in self._broker.agents.values()
        ]
        counts = {"waiting": self._broker.scheduler.waiting, "running": self._broker.scheduler.running}
        return {"ok": True, "state": "", "message": "", "nodes": nodes, **counts}

    def switch_events(self, message: dict[str, Any]) -> Answer:
        """Begin or cease to send events, as somebody listens or nobody does."""
        self._broker.events = bool(message["on"])
        return {"ok": True, "state": "", "message": ""}

    def drain(self, message: dict[str, Any]) -> None:
        """Start nothing more and ask every job that may be repeated to checkpoint; acknowledged when they have."""
        self._broker.begin_drain(float(message["timeout_s"]), message["id"])

    def shutdown(self, message: dict[str, Any]) -> Answer:
        """End, as the executor is being shut down."""
        self._broker.ending = "the executor is being shut down"
        return {"ok": True, "state": "", "message": ""}
