"""The broker: the one place that decides. It stands where HTEX runs its interchange process.

Towards the executor it speaks the client side of HTEX's interchange; towards the agents the protocol of
`mdcampaign.node.protocol`. Between them it turns messages into events for the pure `Scheduler`, and the decisions
of the `Scheduler` into messages. Non-public names of Parsl used here: the keys of the interchange's start
configuration, the task, result and command channels with their pickled messages, `PKL_*`-free result packages,
`ManagerLost`, `WorkerLost`, and `ZMQRadioSender`. `tests/contract` watches them.

The loop, one iteration: take what has come, place what can start, then tell. Refill first, report after.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import platform
import signal
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import zmq
from parsl import curvezmq
from parsl.addresses import tcp_url
from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.high_throughput.errors import ManagerLost, WorkerLost
from parsl.log_utils import set_file_logger
from parsl.monitoring.message_type import MessageType
from parsl.monitoring.radios.zmq import ZMQRadioSender
from parsl.serialize import serialize
from parsl.version import VERSION as PARSL_VERSION

from mdcampaign import errors
from mdcampaign.node import protocol
from mdcampaign.records import Agent, Task, remaining_s, request_of
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.scheduler import DeviceSpec, Place, Preempt, Scheduler

logger = logging.getLogger("mdcampaign.broker")

HOUSEKEEPING_S = 1.0
BATCH = 500
"""Messages taken from one socket before the others get their turn."""

ORPHANED_S = 20.0
"""How long running jobs may take to checkpoint after the campaign process has died."""


class Broker:
    """Messages to events, decisions to messages. `config` is what HTEX gives its interchange on stdin."""

    def __init__(self, config: dict[str, Any], policy: Policy, declared: list[DeviceSpec], events: bool) -> None:
        self.config = config
        self.run_id = config["run_id"]
        self.events = events
        self.now = time.monotonic()
        self.scheduler = Scheduler(policy)
        if declared:
            self.scheduler.declare(declared)
        self.tasks: dict[int, Task] = {}
        self.agents: dict[str, Agent] = {}
        self.blocks: list[str] = []
        self.outbox: list[dict[str, Any]] = []
        self.directives = 0
        self.draining: tuple[float, int | None] | None = None
        self.ending = ""
        self._open_sockets()
        self._handlers: dict[type, Callable[[str, Any, bytes | None], None]] = {
            protocol.Heartbeat: self.on_heartbeat,
            protocol.Started: self.on_started,
            protocol.Report: self.on_report,
            protocol.Ended: self.on_ended,
            protocol.Monitoring: self.on_monitoring,
            protocol.Leaving: self.on_leaving,
        }
        self._verbs: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
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

    def _open_sockets(self) -> None:
        config = self.config
        self.context = curvezmq.ServerContext(config["cert_dir"])
        task_port, result_port, command_port = config["client_ports"]
        client = config["client_address"]
        self.submissions = self.context.socket(zmq.DEALER)
        self.results = self.context.socket(zmq.DEALER)
        self.commands = self.context.socket(zmq.REP)
        self.wire = self.context.socket(zmq.ROUTER)
        for sock in (self.submissions, self.results, self.wire):
            sock.set_hwm(0)
        self.submissions.connect(tcp_url(client, task_port))
        self.results.connect(tcp_url(client, result_port))
        self.commands.connect(tcp_url(client, command_port))
        address = config["interchange_address"] or "*"
        if config["worker_port"]:
            self.worker_port = config["worker_port"]
            self.wire.bind(tcp_url(address, self.worker_port))
        else:
            low, high = config["worker_port_range"]
            self.worker_port = self.wire.bind_to_random_port(tcp_url(address), low, high, 100)
        self.radio = None
        if config["hub_address"] is not None and config["hub_zmq_port"] is not None:
            self.radio = ZMQRadioSender(config["hub_address"], config["hub_zmq_port"], config["cert_dir"])

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until told to end, or until the campaign process is gone."""
        awakening = Awakening()
        poller = zmq.Poller()
        for source in (self.submissions, self.commands, self.wire):
            poller.register(source, zmq.POLLIN)
        awakening.register(poller)
        swept = self.now
        while not self.ending:
            ready = dict(poller.poll(int(HOUSEKEEPING_S * 1000)))
            awakening.settle(poller, ready)
            self.now = time.monotonic()
            if self.commands in ready:
                self.serve_command()
            if self.submissions in ready:
                self.take_submissions()
            if self.wire in ready:
                self.take_messages()
            if self.now - swept >= HOUSEKEEPING_S:
                swept = self.now
                self.expire_agents()
            self.refill()
            self.tell()
            self.watch(awakening)
        self.close()

    def take_submissions(self) -> None:
        """Take tasks and control messages, in the order in which the executor sent them."""
        for frames in drain(self.submissions):
            try:
                message = pickle.loads(frames[0])
                if "control" in message:
                    self.control(message)
                else:
                    self.submit(message)
            except Exception:
                logger.exception("Dropped a message of the executor")

    def take_messages(self) -> None:
        """Take messages of agents; each is handled on its own, and a bad one harms nobody but its sender."""
        for identity, *frames in drain(self.wire):
            uid = identity.decode("utf-8", "replace")
            try:
                if protocol.is_probe(frames):
                    self.wire.send_multipart([identity, b""])
                    continue
                message, payload = protocol.decode_from_agent(frames)
                if isinstance(message, protocol.Register):
                    self.register(uid, message)
                elif uid in self.agents:
                    self.agents[uid].heard = self.now
                    self._handlers[type(message)](uid, message, payload)
                else:
                    self.send(uid, protocol.Fenced())
            except errors.ProtocolError as exc:
                logger.warning("Dropped a message of %s: %s", uid, exc)
            except Exception:
                logger.exception("Dropped a message of %s", uid)

    def refill(self) -> None:
        """Act on what the scheduler decides."""
        if self.draining:
            return
        for decision in self.scheduler.schedule(self.now):
            if isinstance(decision, Place):
                self.place(decision)
            elif isinstance(decision, Preempt):
                self.preempt(decision)

    def tell(self) -> None:
        """Send what the executor is to know."""
        outbox, self.outbox = self.outbox, []
        for message in outbox:
            self.results.send(pickle.dumps(message))

    def watch(self, awakening: Awakening) -> None:
        """End a drain that is done or out of time, and notice the death of the campaign process."""
        if self.draining:
            limit, ack = self.draining
            running = [task.id for task in self.tasks.values() if task.agent and task.requeue]
            if not running or self.now >= limit:
                self.draining = (float("inf"), None)
                if ack is not None:
                    self.ack(ack, not running, "drained", f"{len(running)} jobs still running")
                if awakening.parent_gone:
                    self.ending = "the campaign process is gone"
        if awakening.parent_gone and not self.draining:
            logger.warning("The campaign process is gone; running jobs may checkpoint for %s s", ORPHANED_S)
            self.begin_drain(ORPHANED_S, None)

    def close(self) -> None:
        """Tell every agent to end and go."""
        logger.info("Ending: %s", self.ending)
        for uid in self.agents:
            self.send(uid, protocol.Shutdown(reason=self.ending))
        self.tell()
        self.context.destroy(linger=2000)

    # ------------------------------------------------------------ what the executor asks

    def submit(self, message: dict[str, Any]) -> None:
        """Put a task of the executor into the ready queue."""
        task_id, context = message["task_id"], message["context"]
        logger.debug("Putting task %s onto pending_task_queue", task_id)
        spec = context.get("resource_spec", {})
        task = Task(
            request=request_of(task_id, spec, self.now),
            buffer=message["buffer"],
            context=context,
            requeue=spec.get("requeue", False),
            attempt=spec.get("first_attempt", 1) - 1,
            target_step=spec.get("target_step", 0),
        )
        self.tasks[task_id] = task
        self.scheduler.submit(task.request, self.now)
        logger.debug("Put task %s onto pending_task_queue", task_id)

    def control(self, message: dict[str, Any]) -> None:
        """Obey a verb of `SlotExecutor.control` and acknowledge it."""
        verb = self._verbs.get(message["control"])
        if verb is None:
            answer: dict[str, Any] | None = {"ok": False, "state": "unknown", "message": "no such verb"}
        else:
            answer = verb(message)
        if answer is not None and message.get("id") is not None:
            self.outbox.append({"type": "ack", "id": message["id"], **answer})

    def ack(self, ident: int, ok: bool, state: str, text: str = "", **more: Any) -> None:
        """Acknowledge a verb later than at once."""
        self.outbox.append({"type": "ack", "id": ident, "ok": ok, "state": state, "message": text, **more})

    def cancel(self, message: dict[str, Any]) -> dict[str, Any]:
        """End a task for good: out of the queue at once, or its process tree first."""
        task = self.tasks.get(message["task_id"])
        if task is None:
            return {"ok": True, "state": "ended", "message": "it has ended already"}
        task.cancelled = True
        if task.agent:
            self.send(task.agent, protocol.Cancel(task=task.id, attempt=task.attempt))
            return {"ok": True, "state": "running", "message": "its processes are being ended"}
        self.scheduler.cancel_waiting(task.id, self.now)
        self.fail(task, errors.JobCancelled(f"{task.request.name} was cancelled while it waited"), "cancelled")
        return {"ok": True, "state": "waiting", "message": "taken out of the queue"}

    def direct(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a directive to a running job, or keep it for the start of one that waits."""
        task = self.tasks.get(message["task_id"])
        kind = message["control"]
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        if kind == "extend" and message["target_step"] <= task.target_step:
            text = f"its target is step {task.target_step} already; stop it to end it early"
            return {"ok": False, "state": "running" if task.agent else "waiting", "message": text}
        if kind == "extend":
            task.extended_to = max(task.extended_to or 0, message["target_step"])
        if task.agent:
            self.send_directive(task, kind, message.get("target_step"))
            return {"ok": True, "state": "running", "message": "it will be told at its next report"}
        if kind == "stop" and not task.began:
            answer = self.cancel(message)
            return {**answer, "message": "it had not begun: taken out of the queue"}
        if kind == "stop":
            task.pending = self.directive(task, "stop", None)
        return {"ok": True, "state": "waiting", "message": "noted for its next start" if kind != "yield" else ""}

    def rerank(self, message: dict[str, Any]) -> dict[str, Any]:
        """Change the priority of a waiting or running job."""
        task = self.tasks.get(message["task_id"])
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        self.scheduler.rerank(task.id, float(message["priority"]), self.now)
        self.event("reranked", task, priority=message["priority"])
        return {"ok": True, "state": "running" if task.agent else "waiting", "message": ""}

    def explain(self, message: dict[str, Any]) -> dict[str, Any]:
        """Say why a job is not running."""
        task = self.tasks.get(message["task_id"])
        if task is None:
            return {"ok": False, "state": "ended", "message": "it has ended already"}
        if self.draining:
            text = "nothing starts any more: the campaign is draining"
        elif not self.agents and not task.agent:
            text = "no node has joined yet"
        else:
            text = self.scheduler.explain(task.id, self.now)
        return {"ok": True, "state": "running" if task.agent else "waiting", "message": text}

    def snapshot(self, message: dict[str, Any]) -> dict[str, Any]:
        """Count what waits and runs, and list the agents."""
        nodes = [agent.as_manager(self.now) | {"hostname": agent.info.hostname} for agent in self.agents.values()]
        counts = {"waiting": self.scheduler.waiting, "running": self.scheduler.running}
        return {"ok": True, "state": "", "message": "", "nodes": nodes, **counts}

    def switch_events(self, message: dict[str, Any]) -> dict[str, Any]:
        """Begin or cease to send events, as somebody listens or nobody does."""
        self.events = bool(message["on"])
        return {"ok": True, "state": "", "message": ""}

    def drain(self, message: dict[str, Any]) -> None:
        """Start nothing more and ask every job that may be repeated to checkpoint; acknowledged when they have."""
        self.begin_drain(float(message["timeout_s"]), message["id"])

    def begin_drain(self, timeout_s: float, ack: int | None) -> None:
        """Tell running jobs to yield; `watch` sees the end of it."""
        self.draining = (self.now + timeout_s, ack)
        for task in self.tasks.values():
            if task.agent and task.requeue:
                self.send_directive(task, "yield", None)

    def shutdown(self, message: dict[str, Any]) -> dict[str, Any]:
        """End, as the executor is being shut down."""
        self.ending = "the executor is being shut down"
        return {"ok": True, "state": "", "message": ""}

    def serve_command(self) -> None:
        """Answer one of the commands that Parsl's block scaling knows."""
        request = self.commands.recv_pyobj()
        reply: Any = None
        if request == "CONNECTED_BLOCKS":
            reply = self.blocks
        elif request == "MANAGERS":
            reply = [agent.as_manager(self.now) for agent in self.agents.values()]
        elif request == "MANAGERS_PACKAGES":
            reply = {uid: agent.info.packages for uid, agent in self.agents.items()}
        elif request == "WORKER_BINDS":
            reply = self.worker_port
        elif isinstance(request, list) and len(request) == 2 and request[0] == "HOLD_MANAGER":
            self.hold(request[1])
        else:
            logger.error("Unknown command %r", request)
        self.commands.send_pyobj(reply)

    def hold(self, uid: str) -> None:
        """Start nothing more on an agent that Parsl is about to release."""
        if agent := self.agents.get(uid):
            agent.active = False
            self.scheduler.drain_node(uid, self.now)
            self.send_node_info(agent)

    # ------------------------------------------------------------ what agents say

    def register(self, uid: str, message: protocol.Register) -> None:
        """Take an agent in, or refuse it alone and in words."""
        if reason := mismatch(message, bool(self.config.get("_check_python_mismatch", True))):
            logger.error("Refused %s on %s: %s", uid, message.hostname, reason)
            self.send(uid, protocol.Refused(reason=reason))
            self.event("warning", text=f"a pilot on {message.hostname} was refused: {reason}")
            return
        if uid in self.agents:
            self.lose(uid, "it registered again")
        agent = self.agents[uid] = Agent(message, heard=self.now, idle_since=self.now)
        self.blocks.append(message.block_id)
        self.scheduler.add_node(uid, agent.devices(), self.now)
        self.send(uid, protocol.Registered())
        self.send_node_info(agent)
        logger.info("Registered %s on %s with %d slots", uid, message.hostname, agent.slots)
        devices = [device.model_dump() for device in message.devices]
        self.event("node_joined", node=message.hostname, agent=uid, block=message.block_id, devices=devices)

    def on_heartbeat(self, uid: str, message: protocol.Heartbeat, _: bytes | None) -> None:
        """Answer a heartbeat; a task that two of them in a row do not list never arrived, and is lost."""
        self.send(uid, protocol.Beat())
        agent = self.agents[uid]
        held = {task for task, _ in message.running}
        missing = agent.tasks - held
        for task_id in missing & agent.missing:
            self.ended(self.tasks[task_id], lost=f"{agent.info.hostname} does not have it")
        agent.missing = missing & agent.tasks

    def on_started(self, uid: str, message: protocol.Started, _: bytes | None) -> None:
        """Note that a runner has taken a task."""
        if task := self.held(uid, message):
            self.event("started", task, pid=message.pid, fork_s=message.fork_s)

    def on_report(self, uid: str, message: protocol.Report, _: bytes | None) -> None:
        """Take a progress report to the scheduler and to whoever listens."""
        if not (task := self.held(uid, message)):
            return
        task.reports += 1
        task.saved_step = max(task.saved_step, int(message.progress.get("saved_step") or 0))
        task.target_step = max(task.target_step, int(message.progress.get("target_step") or 0))
        self.scheduler.progress(task.id, remaining_s(message.progress), self.now)
        self.event("progress", task, seq=message.seq, skipped=message.skipped, progress=message.progress)

    def on_ended(self, uid: str, message: protocol.Ended, payload: bytes | None) -> None:
        """Free the slot, and decide what becomes of the task."""
        if not (task := self.held(uid, message)):
            return
        self.release(task)
        said = {"signal": message.signal, "exit_code": message.exit_code, "message": message.message}
        self.event("ended", task, how=message.how, outcome=message.outcome, **said)
        host = self.agents[uid].info.hostname
        if task.cancelled or message.how == "cancelled":
            self.scheduler.ended(task.id, self.now)
            self.fail(task, errors.JobCancelled(f"{task.request.name} was cancelled"), "cancelled")
        elif message.how in ("result", "exception") and payload is not None:
            self.scheduler.ended(task.id, self.now)
            self.finish(task, message, payload)
        elif message.how == "crashed":
            self.scheduler.ended(task.id, self.now)
            crash = errors.Crashed(f"{task.request.name} on {host}: {message.message}")
            self.fail(task, crash if task.requeue else WorkerLost(message.task, host), "failed")
        else:
            if message.outcome:
                task.saved_step = max(task.saved_step, int(message.outcome.get("step") or 0))
            self.again(task, message.message, WorkerLost(message.task, host))

    def on_monitoring(self, uid: str, message: protocol.Monitoring, payload: bytes | None) -> None:
        """Hand a message of Parsl's monitoring on."""
        if self.radio and payload is not None:
            self.radio.send(pickle.loads(payload)["payload"])

    def on_leaving(self, uid: str, message: protocol.Leaving, _: bytes | None) -> None:
        """Start nothing more on an agent that is going."""
        agent = self.agents[uid]
        agent.leaving = message.reason
        self.scheduler.drain_node(uid, self.now)
        logger.info("%s on %s is leaving: %s", uid, agent.info.hostname, message.reason)
        if not agent.tasks:
            self.dismiss(uid)

    def expire_agents(self) -> None:
        """Give up agents that have been silent for the threshold, and dismiss those that have finished leaving."""
        for uid, agent in list(self.agents.items()):
            if self.now - agent.heard > self.config["heartbeat_threshold"]:
                self.lose(uid, f"silent for {self.now - agent.heard:.0f} s")
            elif agent.leaving and not agent.tasks:
                self.dismiss(uid)

    # ------------------------------------------------------------ decisions to messages

    def place(self, decision: Place) -> None:
        """Send a task to its slots."""
        task = self.tasks[decision.request.id]
        agent = self.agents[decision.node]
        message = task.placed(decision)
        self.send(decision.node, message, task.buffer)
        agent.tasks.add(task.id)
        agent.idle_since = None
        if task.pending:
            pending, task.pending = task.pending, None
            self.send_directive(task, pending.kind, pending.target_step)
        if task.extended_to:
            self.send_directive(task, "extend", task.extended_to)
        where = {"node": agent.info.hostname, "agent": decision.node, "device": decision.device}
        self.event("placed", task, index=list(decision.index), **where)

    def preempt(self, decision: Preempt) -> None:
        """Ask a running job to yield to a more urgent one."""
        victim, urgent = self.tasks[decision.victim], self.tasks[decision.for_request]
        self.send_directive(victim, "yield", None, why=f"{urgent.request.name} is more urgent")

    def directive(self, task: Task, kind: Any, target_step: int | None) -> protocol.Direct:
        """Return a new directive for the task's present attempt."""
        self.directives += 1
        return protocol.Direct(
            task=task.id, attempt=task.attempt, id=self.directives, kind=kind, target_step=target_step
        )

    def send_directive(self, task: Task, kind: str, target_step: int | None, why: str = "") -> None:
        """Put a directive into the mailbox of a running attempt."""
        message = self.directive(task, kind, target_step)
        assert task.agent is not None, "only running attempts have a mailbox"
        self.send(task.agent, message)
        self.event("directive", task, kind=kind, target_step=target_step, id=message.id, why=why)

    def send(self, uid: str, message: protocol.Message, payload: bytes | None = None) -> None:
        """Send a message to an agent; one that is gone loses it, and its silence is noticed."""
        self.wire.send_multipart([uid.encode(), *protocol.encode(message, payload)])

    # ------------------------------------------------------------ ends of tasks and agents

    def held(self, uid: str, message: Any) -> Task | None:
        """Return the task of a message if this agent holds just that attempt of it; the attempt number is a fence."""
        task = self.tasks.get(message.task)
        if task is not None and task.agent == uid and task.attempt == message.attempt:
            return task
        logger.info("Refused a late %s of task %s from %s", message.type, message.task, uid)
        return None

    def release(self, task: Task) -> None:
        """Take the task off its agent."""
        assert task.agent is not None
        agent = self.agents[task.agent]
        agent.tasks.discard(task.id)
        if not agent.tasks:
            agent.idle_since = self.now
        task.agent = None

    def again(self, task: Task, why: str, otherwise: Exception) -> None:
        """Put an interrupted job back into the queue; a plain task gets Parsl's own exception instead."""
        if not task.requeue:
            self.scheduler.ended(task.id, self.now)
            self.fail(task, otherwise, "interrupted")
        elif not task.interrupted():
            self.scheduler.ended(task.id, self.now)
            text = f"{task.request.name} was interrupted {task.barren} times without a newly saved step; last: {why}. "
            self.fail(task, errors.NoProgress(text + "Use longer pilots or save more often."), "failed")
        else:
            self.scheduler.requeue(task.id, self.now)

    def ended(self, task: Task, lost: str) -> None:
        """End an attempt whose agent cannot tell us any more."""
        host = self.agents[task.agent].info.hostname if task.agent else "?"
        uid = task.agent or "?"
        self.release(task)
        self.event("ended", task, how="lost", outcome=None, message=lost)
        if task.cancelled:
            self.scheduler.ended(task.id, self.now)
            self.fail(task, errors.JobCancelled(f"{task.request.name} was cancelled"), "cancelled")
        else:
            self.again(task, lost, ManagerLost(uid.encode(), host))

    def lose(self, uid: str, why: str) -> None:
        """Give an agent up; what it held goes back to the queue, and it is fenced if it speaks again."""
        agent = self.agents[uid]
        logger.warning("Lost %s on %s: %s", uid, agent.info.hostname, why)
        self.send(uid, protocol.Fenced())
        self.scheduler.remove_node(uid, self.now)
        for task_id in sorted(agent.tasks):
            self.ended(self.tasks[task_id], lost=f"{agent.info.hostname} was lost: {why}")
        self.forget(uid)
        self.event("node_lost", node=agent.info.hostname, agent=uid, why=why)

    def dismiss(self, uid: str) -> None:
        """Send an agent home that has nothing left to do."""
        agent = self.agents[uid]
        self.send(uid, protocol.Shutdown(reason=agent.leaving))
        self.scheduler.remove_node(uid, self.now)
        self.forget(uid)
        self.event("node_left", node=agent.info.hostname, agent=uid, why=agent.leaving)

    def forget(self, uid: str) -> None:
        """Drop the record of an agent."""
        agent = self.agents.pop(uid)
        agent.active = False
        self.send_node_info(agent)

    def finish(self, task: Task, message: protocol.Ended, payload: bytes) -> None:
        """Report a result, or an exception that the task raised."""
        key = "result" if message.how == "result" else "exception"
        said = (message.outcome or {}).get("kind")
        how = said or ("failed" if message.failed or key == "exception" else "done")
        del self.tasks[task.id]
        self.outbox.append({"type": "result", "task_id": task.id, key: payload, "how": how, "outcome": message.outcome})

    def fail(self, task: Task, exc: Exception, how: str) -> None:
        """Report the end of a task that has no result."""
        del self.tasks[task.id]
        wrapped = serialize(RemoteExceptionWrapper(type(exc), exc, None))
        self.outbox.append({"type": "result", "task_id": task.id, "exception": wrapped, "how": how, "outcome": None})

    def event(self, kind: str, task: Task | None = None, /, **facts: Any) -> None:
        """Tell whoever listens what happened."""
        if not self.events:
            return
        about = {} if task is None else {"job": task.request.name, "task": task.id, "attempt": task.attempt}
        self.outbox.append({"type": "event", "event": {"event": kind, "t": time.time(), **about, **facts}})

    def send_node_info(self, agent: Agent) -> None:
        """Tell Parsl's monitoring about a node."""
        if self.radio:
            self.radio.send((MessageType.NODE_INFO, agent.as_node_info(self.run_id)))


class Awakening:
    """What wakes the loop beside sockets: the death of the campaign process."""

    def __init__(self) -> None:
        self.parent_gone = False
        self._pidfd = os.pidfd_open(os.getppid())

    def register(self, poller: zmq.Poller) -> None:
        """Have the loop's poller watch for it."""
        poller.register(self._pidfd, zmq.POLLIN)

    def settle(self, poller: zmq.Poller, ready: dict[Any, int]) -> None:
        """Take note of what woke the loop, so that it does not wake it again."""
        if self._pidfd in ready:
            self.parent_gone = True
            poller.unregister(self._pidfd)


def drain(sock: Any) -> list[list[bytes]]:
    """Return the messages that have arrived, at most a batch."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < BATCH:
            messages.append(sock.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages


def mismatch(message: protocol.Register, check_python: bool) -> str:
    """Say in what a pilot differs so that it must be refused, or ""."""
    ours, theirs = platform.python_version(), message.python_version
    if message.protocol != protocol.VERSION:
        return f"it speaks protocol {message.protocol}, this campaign {protocol.VERSION}"
    if message.version != (own := version("mdcampaign")):
        return f"it runs mdcampaign {message.version}, this campaign {own}"
    if check_python and ours.rsplit(".", 1)[0] != theirs.rsplit(".", 1)[0]:
        return f"it runs Python {theirs}, this campaign {ours}: results could not be read"
    if check_python and message.parsl_version != PARSL_VERSION:
        return f"it runs Parsl {message.parsl_version}, this campaign {PARSL_VERSION}"
    return ""


def main() -> None:
    """Start as HTEX starts its interchange: the configuration pickled on stdin, and ours as JSON in argv[1]."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the campaign process alone decides when to end
        signal.signal(number, signal.SIG_IGN)
    config = pickle.load(sys.stdin.buffer)
    ours = json.loads(sys.argv[1])
    Path(config["logdir"]).mkdir(parents=True, exist_ok=True)
    set_file_logger(f"{config['logdir']}/interchange.log", name="mdcampaign", level=config["logging_level"])
    declared = [DeviceSpec(**device) for device in ours["declared"]]
    broker = Broker(config, Policy(**ours["policy"]), declared, ours["events"])
    try:
        broker.run()
    except Exception:
        logger.exception("The broker ends by an error of its own")
        raise


if __name__ == "__main__":
    main()
