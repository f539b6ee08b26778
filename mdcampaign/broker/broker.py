"""The broker: the one place that decides. It stands where HTEX runs its interchange process.

Towards the executor it speaks the client side of HTEX's interchange; towards the agents the protocol of
`mdcampaign.node.protocol`. Between them it turns messages into events for the pure `Scheduler`, and the decisions
of the `Scheduler` into messages. The modules beside this one say which non-public names of Parsl they touch.

The loop, one iteration: take what has come, place what can start, then tell. Refill first, report after.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

from mdcampaign import errors
from mdcampaign.broker.agents import Agents
from mdcampaign.broker.attempts import Attempts
from mdcampaign.broker.channels import Channels, drain
from mdcampaign.broker.drain import Drain
from mdcampaign.broker.outbox import Outbox
from mdcampaign.broker.records import Holdings
from mdcampaign.broker.verbs import Verbs
from mdcampaign.node import protocol
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.scheduler import DeviceSpec, Place, Preempt, Scheduler

logger = logging.getLogger("mdcampaign.broker")

HOUSEKEEPING_S = 1.0

ORPHANED_S = 20.0
"""How long running jobs may take to checkpoint after the campaign process has died."""


class Broker:
    """Messages to events, decisions to messages. `config` is what HTEX gives its interchange on stdin."""

    def __init__(self, config: dict[str, Any], policy: Policy, declared: list[DeviceSpec], events: bool) -> None:
        scheduler = Scheduler(policy)
        if declared:
            scheduler.declare(declared)
        self.holdings = Holdings(scheduler, now=time.monotonic())
        self.channels = Channels(config)
        self.outbox = Outbox(events)
        self.attempts = Attempts(self.holdings, self.channels, self.outbox)
        self.agents = Agents(config, self.holdings, self.channels, self.outbox, self.attempts)
        self.drain = Drain(self.holdings, self.outbox, self.attempts)
        self.verbs = Verbs(self.holdings, self.channels, self.outbox, self.attempts, self.drain)
        self._handlers: dict[type, Callable[[str, Any, bytes | None], None]] = {
            protocol.Heartbeat: self.agents.on_heartbeat,
            protocol.Leaving: self.agents.on_leaving,
            protocol.Started: self.attempts.on_started,
            protocol.Report: self.attempts.on_report,
            protocol.Ended: self.attempts.on_ended,
            protocol.Monitoring: self.on_monitoring,
        }

    def run(self) -> None:
        """Serve until told to end, or until the campaign process is gone."""
        swept = self.holdings.now
        while not self.holdings.ending:
            ready = self.channels.wait(HOUSEKEEPING_S)
            self.holdings.now = time.monotonic()
            if self.channels.commands in ready:
                self.serve_command()
            if self.channels.submissions in ready:
                self.take_submissions()
            if self.channels.wire in ready:
                self.take_messages()
            if self.holdings.now - swept >= HOUSEKEEPING_S:
                swept = self.holdings.now
                self.agents.expire()
            self.refill()
            self.tell()
            self.watch()
        self.close()

    def serve_command(self) -> None:
        """Answer a question of Parsl's block scaling."""
        self.channels.commands.send_pyobj(self.agents.answer(self.channels.commands.recv_pyobj()))

    def take_submissions(self) -> None:
        """Take tasks and control messages, in the order in which the executor sent them."""
        for frames in drain(self.channels.submissions):
            try:
                message = pickle.loads(frames[0])
                if "control" in message:
                    self.verbs.obey(message)
                else:
                    self.attempts.submit(message)
            except Exception:
                logger.exception("Dropped a message of the executor")

    def take_messages(self) -> None:
        """Take messages of agents; each is handled on its own, and a bad one harms nobody but its sender."""
        for identity, *frames in drain(self.channels.wire):
            uid = identity.decode("utf-8", "replace")
            try:
                if protocol.is_probe(frames):
                    self.channels.echo(identity)
                    continue
                message, payload = protocol.decode_from_agent(frames)
                if isinstance(message, protocol.Register):
                    self.agents.register(uid, message)
                elif uid in self.holdings.agents:
                    self.holdings.agents[uid].heard = self.holdings.now
                    self._handlers[type(message)](uid, message, payload)
                else:
                    self.channels.send(uid, protocol.Fenced())
            except errors.ProtocolError as exc:
                logger.warning("Dropped a message of %s: %s", uid, exc)
            except Exception:
                logger.exception("Dropped a message of %s", uid)

    def on_monitoring(self, uid: str, message: protocol.Monitoring, payload: bytes | None) -> None:
        """Hand a message of Parsl's monitoring on."""
        if payload is not None:
            self.channels.monitor(pickle.loads(payload)["payload"])

    def refill(self) -> None:
        """Act on what the scheduler decides."""
        if self.drain.begun:
            return
        for decision in self.holdings.scheduler.schedule(self.holdings.now):
            if isinstance(decision, Place):
                self.attempts.place(decision)
            elif isinstance(decision, Preempt):
                self.attempts.preempt(decision)

    def tell(self) -> None:
        """Send what the executor is to know."""
        for message in self.outbox.empty():
            self.channels.tell(message)

    def watch(self) -> None:
        """Acknowledge a drain that is over, and begin one of our own when the campaign process has died."""
        over = self.drain.over()
        if self.channels.orphaned and over:
            self.holdings.ending = "the campaign process is gone"
        elif self.channels.orphaned and not self.drain.begun:
            logger.warning("The campaign process is gone; running jobs may checkpoint for %s s", ORPHANED_S)
            self.drain.begin(ORPHANED_S, None)

    def close(self) -> None:
        """Tell every agent to end and go."""
        logger.info("Ending: %s", self.holdings.ending)
        for uid in self.holdings.agents:
            self.channels.send(uid, protocol.Shutdown(reason=self.holdings.ending))
        self.tell()
        self.channels.close()
