"""The child in a slot: executes Parsl task buffers, one after the other.

Does what the worker of HTEX does (`parsl.executors.high_throughput.process_worker_pool.worker`) and touches the same
names of Parsl: `execute_task`, `serialize`, `RemoteExceptionWrapper`, `monitoring_info.result_queue`. Before the first
task it has its mask, cores, thread counts, directory and output files.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import random
import signal
import socket
import sys
import time
import traceback
import types
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import parsl.executors.high_throughput.monitoring_info as monitoring_info
from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.execute_task import execute_task
from parsl.serialize import serialize

from mdcampaign import slot as slots
from mdcampaign.jobs import Directive, Progress, Slot
from mdcampaign.node import output, processes, wire

WARN_BYTES = 1_000_000
"""As in HTEX: a larger result only gives a warning in the log."""

BURST, PER_SECOND = 100, 100
"""Progress reports that go up at once, and the rate beyond them; those in between give way to the next."""

FROM_SLURM = (signal.SIGTERM, signal.SIGUSR1)
"""What Slurm sends to every process of a step before the end: to agent, runners and engines alike."""


class Uplink:
    """The channel of the code in this slot (`mdcampaign.slot.Channel`) for one attempt."""

    def __init__(self, sock: socket.socket, task: int, attempt: int) -> None:
        self._sock = sock
        self._task, self._attempt = task, attempt
        self._pending: Progress | None = None
        self._seq = self._skipped = 0
        self._tokens, self._filled = float(BURST), time.monotonic()

    def send_progress(self, progress: Progress) -> None:
        """Send a report, or keep it until the next when the way is full or reports come too fast."""
        self._skipped += self._pending is not None
        self._pending = progress
        self._seq += 1
        now = time.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * PER_SECOND)
        self._filled = now
        if self._tokens >= 1 and self._send(wait=False):
            self._tokens -= 1

    def take_directive(self) -> Directive | None:
        """Return the oldest directive for this attempt that waits, or None."""
        while (message := wire.receive(self._sock, wait=False)) is not None:
            header = message.header
            if header["type"] == "direct" and (header["task"], header["attempt"]) == (self._task, self._attempt):
                return Directive(header["kind"], header["id"], self._attempt, header["target_step"])
        return None

    def flush(self) -> None:
        """Send the last report if it could not be sent so far."""
        if self._pending is not None:
            self._send(wait=True)

    def _send(self, wait: bool) -> bool:
        header = {"type": "report", "task": self._task, "attempt": self._attempt, "seq": self._seq}
        header |= {"skipped": self._skipped, "progress": vars(self._pending)}
        if wire.send(self._sock, header, wait=wait):
            self._pending = None
            return True
        return False


class MonitoringQueue:
    """Stands where HTEX puts a queue: Parsl's monitoring helper uses it too, so each message is one datagram."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def put(self, message: bytes) -> None:
        """Send one pickled message up. Waits while the way is full; the agent never stops reading."""
        wire.send(self._sock, {"type": "monitoring"}, message)


class Runner:
    """Takes tasks from its socket until it is killed; `birth` is the agent's request (see `pool.Pool`)."""

    def __init__(self, birth: dict[str, Any], sock: socket.socket) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._context: slots.SlotContext | None = None
        self._cores = birth["cores"]
        self._stem = Path(birth["output"])
        self._directory = Path.cwd()
        self._environ = dict(os.environ)
        self._umask = os.umask(0o077)
        os.umask(self._umask)

    def run(self) -> NoReturn:
        """Take tasks, for ever."""
        self._handlers: dict[signal.Signals, Any] = {
            signal.SIGINT: signal.SIG_IGN,
            **dict.fromkeys(FROM_SLURM, self._on_signal),
        }
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in FROM_SLURM:
            os.register_at_fork(after_in_child=lambda number=number: signal.signal(number, signal.SIG_DFL))
        while True:
            message = wire.receive(self._sock)
            if message is not None and message.header["type"] == "task":  # a directive may come too late
                self._take(message.header, message.payload)

    def _on_signal(self, number: int, frame: object) -> None:
        """Leave a job that reports to the agent, which got the signal too and tells it to yield; else die of it."""
        if self._context is None or self._context.last is None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _take(self, header: dict[str, Any], buffer: bytes) -> None:
        identity = {"task": header["task"], "attempt": header["attempt"]}
        wire.send(self._sock, {"type": "taken", "pid": os.getpid(), **identity})
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in header["slot"].items()}
        uplink = Uplink(self._sock, **identity)
        self._context = context = slots.SlotContext(
            Slot(**fields), attempt=header["attempt"], name=header["name"], workdir=self._directory, channel=uplink
        )
        for key, value in header["context"].get("resource_spec", {}).items():  # as HTEX
            os.environ[f"PARSL_{key.upper()}"] = str(value)
        slots.enter(context)
        how, failed, body = perform(buffer, header["context"])
        if os.getpid() != self._pid:  # a child that the task forked and that came back here
            os._exit(0)
        slots.enter(None)
        self._context = None
        with contextlib.suppress(Exception):  # a task may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()
        uplink.flush()
        outcome = context.outcome
        if outcome is not None and outcome.kind == "interrupted":
            how, failed, body = "interrupted", False, b""
        ended = {"type": "ended", **identity, "how": how, "failed": failed, "clean": processes.childless()}
        ended["outcome"] = replace(outcome, attempt=header["attempt"]).as_dict() if outcome else None
        wire.send(self._sock, ended, body)
        self._tidy()

    def _tidy(self) -> None:
        """Take back what the task changed in this process, as far as the slot is concerned."""
        if dict(os.environ) != self._environ:
            os.environ.clear()
            os.environ.update(self._environ)
        with contextlib.suppress(OSError):  # somebody removed it
            os.chdir(self._directory)
        os.umask(self._umask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.sched_setaffinity(0, self._cores)
        if output.overflows():
            for ending in (".out", ".err"):
                output.trim(self._stem.with_name(self._stem.name + ending))


def become(birth: dict[str, Any], sock: socket.socket, monitoring: socket.socket, parent: int) -> NoReturn:
    """Turn this forked child of the template into a runner; never returns."""
    status = 1
    try:
        _settle(birth, parent)
        monitoring_info.result_queue = MonitoringQueue(monitoring)  # type: ignore[assignment]
        Runner(birth, sock).run()
    except EOFError:  # the agent closed the channel: it is gone, or wants this runner gone
        status = 0
    except SystemExit as exc:  # of a task; HTEX's worker ends by it, too
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if status and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def perform(buffer: bytes, context: dict[str, Any]) -> tuple[str, bool, bytes]:
    """Execute a task buffer; return "result" or "exception", whether it failed, and the serialised answer."""
    try:
        function, args, kwargs = execute_task, (), {}
        if executor := context.get("task_executor"):
            module, _, name = executor["f"].rpartition(".")
            function = getattr(importlib.import_module(module), name)
            args, kwargs = executor.get("a", ()), executor.get("k", {})
        result = function(buffer, *args, **kwargs)
        return "result", isinstance(result, RemoteExceptionWrapper), serialize(result, buffer_threshold=WARN_BYTES)
    except Exception as exc:
        return "exception", True, _exception(exc)


def _exception(exc: Exception) -> bytes:
    """Return the exception in Parsl's wrapping; in words where it cannot be serialised itself."""
    try:
        return serialize(RemoteExceptionWrapper(type(exc), exc, exc.__traceback__))
    except Exception as why:
        plain = RuntimeError(f"{type(exc).__name__}: {exc} (this exception could not be serialised: {why})")
        return serialize(RemoteExceptionWrapper(RuntimeError, plain, None))


def _settle(birth: dict[str, Any], parent: int) -> None:
    """Make this process what a job may rely on: its own session, environment, cores and output."""
    processes.die_with(parent)
    os.setsid()
    processes.become_subreaper()
    for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR2, *FROM_SLURM):  # whatever nohup or a shell ignored
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(birth["environ"])
    os.sched_setaffinity(0, birth["cores"])
    output.redirect(Path(birth["output"]))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    with contextlib.suppress(OSError):  # if memory runs out it shall be the job, not the agent
        Path("/proc/self/oom_score_adj").write_text("500")
    random.seed()
    sys.modules["__main__"] = types.ModuleType("__main__")  # users' functions must not meet the template's names
