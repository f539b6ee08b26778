"""The agent of one node: offers its slots to the broker and runs there what it is told to.

One event loop over the broker's socket, the template's, those of the runners, signals and timers; no threads of ours.
Started by Parsl's provider through HTEX's `launch_cmd`; Parsl's names that it touches: `curvezmq.ClientContext`,
`probe_addresses`, `tcp_url`, `set_file_logger`.

Exit codes: 0 told to, or drained; 1 the broker was not found, or the options are wrong; 2 refused; 3 fenced; 4 the
broker fell silent; 5 the template cannot be kept alive.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import psutil
import zmq
from parsl import curvezmq
from parsl.addresses import tcp_url
from parsl.executors.high_throughput.probe import probe_addresses
from parsl.log_utils import set_file_logger
from parsl.version import VERSION as PARSL_VERSION

from mdcampaign.errors import BadInput, ProtocolError
from mdcampaign.node import devices, options, output, processes, protocol, slots
from mdcampaign.node.attempts import Attempt
from mdcampaign.node.nursery import Nursery
from mdcampaign.node.pool import Pool

logger = logging.getLogger("mdcampaign.node.agent")

OK, NOT_FOUND, REFUSED, FENCED, SILENCE, BROKEN = 0, 1, 2, 3, 4, 5

DRAIN_S = 20.0
"""How long jobs have to save themselves after SIGTERM; Slurm's KillWait is 30 s by default."""

ORPHANED_S = 60.0
"""How long at most jobs may go on to their next report when the broker has been given up."""

LINGER_MS = 2000
BATCH = 100
"""Messages of the broker that are handled before the runners have their turn."""


class Agent:
    """Between the broker and the pool; `run` returns the exit code."""

    def __init__(self, opts: options.Options, nursery: Nursery, offered: list[protocol.DeviceReport]) -> None:
        self._options = opts
        self._offered = offered
        self._nursery = nursery
        self._code: int | None = None
        self._leaving: str | None = None
        self._exit_code = OK
        self._context = curvezmq.ClientContext(opts.cert_dir)
        self._socket = self._connect()
        self._waking = _wake_on(signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._waking, zmq.POLLIN)
        self._pool = Pool(slots.SlotTable(offered, opts), opts.directory, nursery, self._poller, self)
        now = time.monotonic()
        age_s = time.time() - psutil.Process().create_time()
        self._asked = self._registered = False
        self._silent_s = math.inf  # until we have asked for something
        self._beat_s = now + opts.hb_period
        self._drain_s = now - age_s + (opts.drain_period or math.inf)
        self._leave_by_s = math.inf
        self._handlers: dict[type[protocol.Message], Callable[[Any, bytes | None], None]] = {
            protocol.Registered: self._on_registered,
            protocol.Refused: self._on_refused,
            protocol.Place: self._on_place,
            protocol.Direct: lambda message, _: self._pool.direct(message),
            protocol.Cancel: self._on_cancel,
            protocol.Shutdown: self._on_shutdown,
            protocol.Fenced: self._on_fenced,
            protocol.Beat: lambda *_: None,
        }

    def run(self) -> int:
        """Serve until told to end, drained, or given up; return the exit code."""
        try:
            self._pool.reaped(processes.reap())  # what has ended before signals could tell
            while self._code is None:
                for ready, _ in self._poller.poll(self._wait_ms()):
                    if ready is self._socket:
                        self._hear_broker()
                    elif ready == self._waking:
                        self._hear_signals()
                    else:
                        self._pool.handle(ready)
                self._keep_time(time.monotonic())
            return self._code
        finally:
            self._nursery.close()
            self._context.destroy(LINGER_MS if self._code in (OK, SILENCE, BROKEN) else 0)

    # ------------------------------------------------------------ what the pool says

    def started(self, attempt: Attempt, pid: int, fork_s: float) -> None:
        """Tell the broker."""
        task, number = attempt.id
        self._send(protocol.Started(task=task, attempt=number, pid=pid, fork_s=fork_s))

    def reported(self, attempt: Attempt, report: dict[str, Any]) -> None:
        """Tell the broker."""
        task, number = attempt.id
        fields = {key: report[key] for key in ("seq", "skipped", "progress")}
        self._send(protocol.Report(task=task, attempt=number, **fields))

    def ended(self, attempt: Attempt, message: protocol.Ended, payload: bytes | None) -> None:
        """Tell the broker."""
        logger.debug("ended: %s", message)
        self._send(message, payload)

    def monitoring(self, payload: bytes) -> None:
        """Tell the broker."""
        self._send(protocol.Monitoring(), payload)

    # ------------------------------------------------------------ what the broker says

    def _hear_broker(self) -> None:
        self._silent_s = time.monotonic() + self._options.hb_threshold
        for _ in range(BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message, payload = protocol.decode_to_agent(frames)
                self._handlers[type(message)](message, payload)
            except ProtocolError as exc:
                logger.error("a message that is dropped: %s", exc)
            except Exception:
                logger.exception("a message that cannot be handled, and is dropped")

    def _on_registered(self, message: protocol.Registered, payload: bytes | None) -> None:
        logger.info("registered")
        self._registered = True

    def _on_refused(self, message: protocol.Refused, payload: bytes | None) -> None:
        logger.critical("refused by the broker: %s", message.reason)
        print(f"mdcampaign agent {self._options.uid}: refused by the broker: {message.reason}", file=sys.stderr)
        self._code = REFUSED

    def _on_place(self, message: protocol.Place, payload: bytes | None) -> None:
        """Run it, or say at once that it cannot be run here."""
        problem = f"this node is leaving: {self._leaving}" if self._leaving else ""
        if not problem:
            try:
                self._pool.place(message, payload or b"")
                return
            except ProtocolError as exc:
                problem = str(exc)
                logger.error("task %d cannot be placed: %s", message.task, problem)
        self._send(protocol.Ended(task=message.task, attempt=message.attempt, how="lost", message=problem))

    def _on_cancel(self, message: protocol.Cancel, payload: bytes | None) -> None:
        if attempt := self._pool.attempts.get((message.task, message.attempt)):
            self._pool.kill([attempt], "cancelled", "cancelled")

    def _on_shutdown(self, message: protocol.Shutdown, payload: bytes | None) -> None:
        logger.info("told to end: %s", message.reason)
        self._code = OK

    def _on_fenced(self, message: protocol.Fenced, payload: bytes | None) -> None:
        logger.critical("the broker does not know this agent any more; everything is ended, nothing reported")
        self._code = FENCED

    # ------------------------------------------------------------ time and signals

    def _hear_signals(self) -> None:
        for number in os.read(self._waking, 4096):
            if number != signal.SIGCHLD:
                self._leave(f"signal {signal.Signals(number).name}", DRAIN_S)
                self._kill([one for one in self._pool.attempts.values() if not one.reported])
                self._pool.yield_all()
        self._pool.reaped(processes.reap())

    def _keep_time(self, now: float) -> None:
        self._pool.tick(now)
        if self._nursery.up and not self._asked and not self._leaving:
            self._register()
        if self._exit_code == OK and (why := self._pool.hopeless(now)):
            self._leave(why, 0.0, BROKEN)
        if now >= self._beat_s:
            self._beat_s = now + self._options.hb_period
            self._beat()
        if now >= self._silent_s:
            self._silent_s = math.inf
            self._on_silence()
        if now >= self._drain_s:
            self._drain_s = math.inf
            self._leave("the drain period is over", math.inf)
        if self._leaving and not self._pool.attempts:
            self._code = self._exit_code
        elif now >= self._leave_by_s:
            self._leave_by_s = math.inf
            if any(attempt.order is None for attempt in self._pool.attempts.values()):
                self._kill(self._pool.attempts.values())
                self._leave_by_s = now + DRAIN_S
            else:
                logger.critical("what was killed does not die; leaving it behind")
                self._code = self._exit_code

    def _wait_ms(self) -> int:
        """Return the time until `_keep_time` has something to do."""
        now = time.monotonic()
        due_s = min(self._beat_s, self._silent_s, self._drain_s, self._leave_by_s) - now
        return int(max(0.0, min(due_s, self._pool.due_s())) * 1000) + 1

    def _beat(self) -> None:
        """Send a heartbeat; and keep the output of the slots small, also while a job runs for days."""
        if self._registered:
            self._send(protocol.Heartbeat(running=list(self._pool.attempts)))
        for path in self._options.directory.glob("slot-*"):
            output.trim(path)

    def _on_silence(self) -> None:
        """Nothing from the broker for too long: let jobs run to their next report, for a while."""
        reason = f"no word from the broker for {self._options.hb_threshold:.0f} s"
        print(f"mdcampaign agent {self._options.uid}: {reason}; leaving", file=sys.stderr)
        self._leave(reason, min(self._options.hb_threshold, ORPHANED_S), SILENCE)
        self._pool.yield_all()

    def _leave(self, reason: str, limit_s: float, code: int = OK) -> None:
        """Take no more work, and end when what runs has ended, after `limit_s` at the latest."""
        if self._leaving is None:
            logger.warning("leaving: %s", reason)
            if self._asked:
                self._send(protocol.Leaving(reason=reason))
            self._leaving = reason
        self._exit_code = self._exit_code or code
        self._leave_by_s = min(self._leave_by_s, time.monotonic() + limit_s)

    def _kill(self, attempts: Iterable[Attempt]) -> None:
        self._pool.kill(attempts, "lost", f"this node is leaving: {self._leaving}")

    # ------------------------------------------------------------ the wire

    def _connect(self) -> zmq.Socket[bytes]:
        """Find the address at which the broker answers, and connect.

        Raises:
            ConnectionError: it answers nowhere.
        """
        opts = self._options
        urls = {tcp_url(address, opts.port) for address in opts.addresses.split(",")}
        # Another identity than ours: the broker may still know that of the probe when we connect.
        limit_ms = int(1000 * opts.address_probe_timeout)
        url = probe_addresses(self._context, urls, timeout_ms=limit_ms, identity=f"{opts.uid}-probe".encode())
        logger.info("the broker answers at %s", url)
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, opts.uid.encode())
        socket.setsockopt(zmq.SNDHWM, 0)  # sending never waits
        socket.connect(url)
        return socket

    def _register(self) -> None:
        self._asked = True
        self._silent_s = time.monotonic() + self._options.hb_threshold
        opts = self._options
        self._send(
            protocol.Register(
                protocol=protocol.VERSION,
                version=version("mdcampaign"),
                parsl_version=PARSL_VERSION,
                python_version=platform.python_version(),
                uid=opts.uid,
                block_id=str(opts.block_id),
                hostname=platform.node(),
                pid=os.getpid(),
                os=platform.system(),
                directory=str(Path.cwd()),
                start_time=psutil.Process().create_time(),
                cpu_count=psutil.cpu_count(logical=False) or psutil.cpu_count() or 1,
                memory_mb=psutil.virtual_memory().total >> 20,
                packages={dist.metadata["Name"]: dist.version for dist in distributions()},
                devices=self._offered,
                drain_s=opts.drain_period,
            )
        )

    def _send(self, message: protocol.Message, payload: bytes | None = None) -> None:
        self._socket.send_multipart(protocol.encode(message, payload))


def _wake_on(*numbers: signal.Signals) -> int:
    """Have these signals write their number into a pipe; return the end to read."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return reading


def main() -> int:
    """Be the agent that the command line describes; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign process alone drains
    opts = options.parse()
    opts.directory.mkdir(parents=True, exist_ok=True)
    level = logging.DEBUG if opts.debug else logging.INFO
    set_file_logger(str(opts.directory / "agent.log"), name="mdcampaign", level=level)
    logging.getLogger("mdcampaign").setLevel(level)  # Parsl leaves it at DEBUG, at 50 us for each record not written
    logger.info("agent %s: %s", opts.uid, opts)
    processes.become_subreaper()
    nursery = Nursery(opts.directory / "template.log")
    nursery.start()  # before there is any socket or thread
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a result whose descriptor cannot be opened is lost
    try:
        offered = slots.equip(devices.discover(), opts)
        for device in offered:
            logger.info("device %s: %s", device.uuid, device)
        code = Agent(opts, nursery, offered).run()
    except (BadInput, ConnectionError) as exc:
        logger.critical("%s", exc)
        print(f"mdcampaign agent {opts.uid}: {exc}", file=sys.stderr)
        nursery.close()
        return NOT_FOUND
    except BaseException:
        logger.critical("the agent ends by an error of its own", exc_info=True)
        raise
    logger.info("the agent ends with exit code %d", code)
    return code


if __name__ == "__main__":
    sys.exit(main())
