"""A small executor with slots: threads in the task server's process, with the steering contract of SlotExecutor.

It lets the steering layer be tried alone: everything between the Thinker and the executor is real.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.base import ParslExecutor

from mdcampaign.errors import JobCancelled, JobInterrupted, Unstable
from mdcampaign.jobs import CONTINUE, Directive, Outcome, Progress

HERE = threading.local()
"""What the thread of a slot runs; the stand-in for `mdcampaign.slot.current`."""


class Yielded(Exception):
    """The job has saved its state and gives its slot back."""


@dataclass
class Entry:
    """One task and what has become of it."""

    call: Callable[[], Any]
    spec: dict[str, Any]
    future: Future[Any] = field(default_factory=Future)
    state: str = "waiting"
    attempt: int = 0
    seq: int = 0
    saved_step: int = 0
    mailbox: list[Directive] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.spec.get("name", id(self)))


class StandIn(ParslExecutor):
    """Runs tasks in `slots` threads, the most urgent first.

    `padding` makes each progress event so many bytes longer; `fail_start` makes the set-up fail; `drains` False makes
    jobs deaf to the end of the campaign.
    """

    def __init__(
        self,
        label: str = "standin",
        slots: int = 2,
        campaign_dir: str | None = None,
        padding: int = 0,
        fail_start: bool = False,
        drains: bool = True,
    ) -> None:
        super().__init__()
        self.label, self.slots, self.campaign_dir = label, slots, campaign_dir
        self.padding, self.fail_start, self.drains = padding, fail_start, drains
        self.entries: dict[str, Entry] = {}
        self.waiting: list[Entry] = []
        self.verbs = 0

    def start(self) -> None:
        if self.fail_start:
            raise RuntimeError("there is no such partition")
        self.changed = threading.Condition()
        self.callbacks: list[Callable[[dict[str, Any]], None]] = []
        self.closing = False
        for n in range(self.slots):
            threading.Thread(target=self._slot, name=f"slot-{n}", daemon=True).start()

    def submit(self, func: Callable, resource_specification: dict[str, Any], *args: Any, **kwargs: Any) -> Future:
        entry = Entry(lambda: func(*args, **kwargs), resource_specification)
        with self.changed:
            self.entries[entry.name] = entry
            self.waiting.append(entry)
            self.changed.notify_all()
        return entry.future

    def shutdown(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for entry in self.entries.values():
            if not entry.future.done():
                entry.future.set_exception(JobInterrupted("had not ended when the executor was shut down"))

    def subscribe(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def drain(self, timeout_s: float) -> bool:
        with self.changed:
            self.closing = True
            running = [entry for entry in self.entries.values() if entry.state == "running"]
            for entry in running:
                if self.drains:
                    entry.mailbox.append(Directive("yield"))
            return self.changed.wait_for(lambda: all(e.state != "running" for e in running), timeout_s)

    def control(self, verb: str, job: str, **payload: Any) -> Future[dict[str, Any]]:
        """Answer at once; the message of "explain" is the number of verbs so far."""
        ack: Future[dict[str, Any]] = Future()
        with self.changed:
            self.verbs += 1
            entry = self.entries.get(job)
            state = entry.state if entry else "unknown"
            ok = state in ("waiting", "running")
            if entry and ok:
                self._obey(entry, verb, payload)
        ack.set_result({"ok": ok, "state": state, "message": str(self.verbs)})
        return ack

    def _obey(self, entry: Entry, verb: str, payload: dict[str, Any]) -> None:
        if verb == "rerank":
            entry.spec["priority"] = payload["priority"]
        elif verb == "extend":
            entry.mailbox.append(Directive("extend", target_step=payload["target_step"]))
        elif verb in ("stop", "cancel") and entry.state == "waiting":
            entry.state = "ended"
            self.waiting.remove(entry)
            if verb == "cancel":
                entry.future.set_exception(JobCancelled(entry.name))
            else:
                entry.future.set_result(Outcome("stopped", step=entry.saved_step).as_dict())
        elif verb in ("stop", "yield", "cancel"):
            entry.mailbox.append(Directive("stop" if verb == "stop" else "yield", id=verb == "cancel"))

    # ------------------------------------------------------------ a slot

    def _slot(self) -> None:
        while (entry := self._next()) is not None:
            HERE.executor, HERE.entry = self, entry
            entry.attempt, entry.seq = entry.attempt + 1, 0
            try:
                value, error = entry.call(), None
            except BaseException as exc:
                value, error = None, exc
            self._ended(entry, value, error)

    def _next(self) -> Entry | None:
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self.waiting)
            if self.closing:
                return None
            entry = max(self.waiting, key=lambda e: e.spec.get("priority", 0))
            self.waiting.remove(entry)
            entry.state = "running"
            return entry

    def _ended(self, entry: Entry, value: Any, error: BaseException | None) -> None:
        found = value.get_exception() if isinstance(value, RemoteExceptionWrapper) else error
        with self.changed:
            entry.state = "ended"
            if isinstance(found, Yielded):
                entry.state = "waiting"
                self.waiting.append(entry)
            self.changed.notify_all()
        if entry.state == "waiting" or entry.future.done():
            return
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(value)

    def publish(self, event: dict[str, Any]) -> None:
        for callback in self.callbacks:
            callback(event | {"t": time.time()})


def report(progress: Progress) -> Directive:
    """Report an iteration from a slot's thread; the stand-in for `current().report`."""
    executor, entry = HERE.executor, HERE.entry
    entry.seq += 1
    event = {"event": "progress", "job": entry.name, "attempt": entry.attempt, "seq": entry.seq, "skipped": 0}
    executor.publish(event | {"progress": asdict(progress), "padding": "x" * executor.padding})
    with executor.changed:
        return entry.mailbox.pop(0) if entry.mailbox else CONTINUE


def toy_md(job: dict[str, Any], campaign_dir: str) -> dict[str, Any]:
    """Sleep through the steps of a Synthetic job, from where its last attempt stopped."""
    entry, engine = HERE.entry, job["engine"]
    step, target = entry.saved_step, job["steps"]
    while step < target:
        time.sleep(engine["step_s"] * job["iteration_steps"])
        step += job["iteration_steps"]
        if engine["fail"] and step >= engine["fail_step"]:
            raise Unstable(f"NaN at step {step}")
        directive = report(Progress(step, target, saved_step=entry.saved_step))
        if directive.kind == "extend":
            target = directive.target_step or target
        elif directive.kind == "stop":
            return Outcome("stopped", step=step, target_step=target, attempt=entry.attempt).as_dict()
        elif directive.kind == "yield":
            if directive.id:
                raise JobCancelled(entry.name)
            entry.saved_step = step
            raise Yielded
    return Outcome("done", step=step, target_step=target, attempt=entry.attempt).as_dict()
