"""The attempts: tasks from their submission through placements to their end.

Non-public names of Parsl used here: `ManagerLost` and `WorkerLost`. `tests/contract` watches them.
"""

from __future__ import annotations

import logging
from typing import Any

from parsl.executors.high_throughput.errors import ManagerLost, WorkerLost

from mdcampaign import errors
from mdcampaign.broker.channels import Channels
from mdcampaign.broker.outbox import Outbox
from mdcampaign.broker.records import Holdings, Task, remaining_s
from mdcampaign.node import protocol
from mdcampaign.resources import request_of
from mdcampaign.scheduling.scheduler import Place, Preempt

logger = logging.getLogger("mdcampaign.broker")


class Attempts:
    """Places tasks, tells them to change their course, and decides what becomes of those that end."""

    def __init__(self, holdings: Holdings, channels: Channels, outbox: Outbox) -> None:
        self._holdings, self._channels, self._outbox = holdings, channels, outbox
        self._scheduler = holdings.scheduler
        self._directives = 0

    def submit(self, message: dict[str, Any]) -> None:
        """Put a task of the executor into the ready queue."""
        task_id, context = message["task_id"], message["context"]
        logger.debug("Putting task %s onto pending_task_queue", task_id)
        spec = context.get("resource_spec", {})
        task = Task(
            request=request_of(task_id, spec, self._holdings.now),
            buffer=message["buffer"],
            context=context,
            requeue=spec.get("requeue", False),
            attempt=spec.get("first_attempt", 1) - 1,
            target_step=spec.get("target_step", 0),
        )
        self._holdings.tasks[task_id] = task
        self._scheduler.submit(task.request, self._holdings.now)
        logger.debug("Put task %s onto pending_task_queue", task_id)

    # ------------------------------------------------------------ decisions to messages

    def place(self, decision: Place) -> None:
        """Send a task to its slots."""
        task = self._holdings.tasks[decision.request.id]
        agent = self._holdings.agents[decision.node]
        message = task.placed(decision)
        self._channels.send(decision.node, message, task.buffer)
        agent.tasks.add(task.id)
        agent.idle_since = None
        if task.pending:
            pending, task.pending = task.pending, None
            self.direct(task, pending.kind, pending.target_step)
        if task.extended_to:
            self.direct(task, "extend", task.extended_to)
        where = {"node": agent.info.hostname, "agent": decision.node, "device": decision.device}
        self._outbox.event("placed", task, index=list(decision.index), **where)

    def preempt(self, decision: Preempt) -> None:
        """Ask a running job to yield to a more urgent one."""
        victim, urgent = self._holdings.tasks[decision.victim], self._holdings.tasks[decision.for_request]
        self.direct(victim, "yield", None, why=f"{urgent.request.name} is more urgent")

    def directive(self, task: Task, kind: Any, target_step: int | None) -> protocol.Direct:
        """Return a new directive for the task's present attempt."""
        self._directives += 1
        return protocol.Direct(
            task=task.id, attempt=task.attempt, id=self._directives, kind=kind, target_step=target_step
        )

    def direct(self, task: Task, kind: str, target_step: int | None, why: str = "") -> None:
        """Put a directive into the mailbox of a running attempt."""
        message = self.directive(task, kind, target_step)
        assert task.agent is not None, "only running attempts have a mailbox"
        self._channels.send(task.agent, message)
        self._outbox.event("directive", task, kind=kind, target_step=target_step, id=message.id, why=why)

    # ------------------------------------------------------------ what agents say of attempts

    def held(self, uid: str, message: Any) -> Task | None:
        """Return the task of a message if this agent holds just that attempt of it; the attempt number is a fence."""
        task = self._holdings.tasks.get(message.task)
        if task is not None and task.agent == uid and task.attempt == message.attempt:
            return task
        logger.info("Refused a late %s of task %s from %s", message.type, message.task, uid)
        return None

    def on_started(self, uid: str, message: protocol.Started, _: bytes | None) -> None:
        """Note that a runner has taken a task."""
        if task := self.held(uid, message):
            self._outbox.event("started", task, pid=message.pid, fork_s=message.fork_s)

    def on_report(self, uid: str, message: protocol.Report, _: bytes | None) -> None:
        """Take a progress report to the scheduler and to whoever listens."""
        if not (task := self.held(uid, message)):
            return
        task.saved_step = max(task.saved_step, int(message.progress.get("saved_step") or 0))
        task.target_step = max(task.target_step, int(message.progress.get("target_step") or 0))
        self._scheduler.progress(task.id, remaining_s(message.progress), self._holdings.now)
        self._outbox.event("progress", task, seq=message.seq, skipped=message.skipped, progress=message.progress)

    def on_ended(self, uid: str, message: protocol.Ended, payload: bytes | None) -> None:
        """Free the slot, and decide what becomes of the task."""
        if not (task := self.held(uid, message)):
            return
        self._release(task)
        said = {"signal": message.signal, "exit_code": message.exit_code, "message": message.message}
        self._outbox.event("ended", task, how=message.how, outcome=message.outcome, **said)
        host = self._holdings.agents[uid].info.hostname
        if task.cancelled or message.how == "cancelled":
            self._cancelled(task)
        elif message.how in ("result", "exception") and payload is not None:
            self._scheduler.ended(task.id, self._holdings.now)
            del self._holdings.tasks[task.id]
            self._outbox.result(task, message, payload)
        elif message.how == "crashed":
            crash = errors.Crashed(f"{task.request.name} on {host}: {message.message}")
            self._fail(task, crash if task.requeue else WorkerLost(message.task, host), "failed")
        else:
            if message.outcome:
                task.saved_step = max(task.saved_step, int(message.outcome.get("step") or 0))
            self._again(task, message.message, WorkerLost(message.task, host))

    # ------------------------------------------------------------ ends

    def lost(self, task: Task, why: str) -> None:
        """End an attempt whose agent cannot tell us any more."""
        assert task.agent is not None, "only running attempts are lost"
        uid = task.agent
        host = self._holdings.agents[uid].info.hostname
        self._release(task)
        self._outbox.event("ended", task, how="lost", outcome=None, message=why)
        if task.cancelled:
            self._cancelled(task)
        else:
            self._again(task, why, ManagerLost(uid.encode(), host))

    def cancel_waiting(self, task: Task) -> None:
        """End a task that waits for a slot."""
        self._scheduler.cancel_waiting(task.id, self._holdings.now)
        self._report(task, errors.JobCancelled(f"{task.request.name} was cancelled while it waited"), "cancelled")

    def _cancelled(self, task: Task) -> None:
        self._fail(task, errors.JobCancelled(f"{task.request.name} was cancelled"), "cancelled")

    def _again(self, task: Task, why: str, otherwise: Exception) -> None:
        """Put an interrupted job back into the queue; a plain task gets Parsl's own exception instead."""
        if not task.requeue:
            self._fail(task, otherwise, "interrupted")
        elif not task.interrupted():
            text = f"{task.request.name} was interrupted {task.barren} times without a newly saved step; last: {why}. "
            self._fail(task, errors.NoProgress(text + "Use longer pilots or save more often."), "failed")
        else:
            self._scheduler.requeue(task.id, self._holdings.now)

    def _release(self, task: Task) -> None:
        """Take the task off its agent."""
        assert task.agent is not None
        agent = self._holdings.agents[task.agent]
        agent.tasks.discard(task.id)
        if not agent.tasks:
            agent.idle_since = self._holdings.now
        task.agent = None

    def _fail(self, task: Task, exc: Exception, how: str) -> None:
        """End a task that ran and has no result."""
        self._scheduler.ended(task.id, self._holdings.now)
        self._report(task, exc, how)

    def _report(self, task: Task, exc: Exception, how: str) -> None:
        """Report the end of a task that has no result, and forget it."""
        del self._holdings.tasks[task.id]
        self._outbox.failure(task, exc, how)
