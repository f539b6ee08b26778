"""The channels of the broker: sockets to the executor, to block scaling, agents and monitoring, and an eye on life.

Non-public names of Parsl used here: the keys of the interchange's start configuration, the task, result and command
channels with their pickled messages, and `ZMQRadioSender`. `tests/contract` watches them.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import zmq
from parsl import curvezmq
from parsl.addresses import tcp_url
from parsl.monitoring.radios.zmq import ZMQRadioSender

from mdcampaign.node import protocol

BATCH = 500
"""Messages taken from one socket before the others get their turn."""


class Channels:
    """All that the broker hears and says. `config` is what HTEX gives its interchange on stdin.

    `submissions` and `wire` carry messages of the executor and of agents; `commands` the questions of block scaling.
    `orphaned` turns true when the campaign process has died.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.orphaned = False
        self._context = curvezmq.ServerContext(config["cert_dir"])
        task_port, result_port, command_port = config["client_ports"]
        client = config["client_address"]
        self.submissions = self._context.socket(zmq.DEALER)
        self._results = self._context.socket(zmq.DEALER)
        self.commands = self._context.socket(zmq.REP)
        self.wire = self._context.socket(zmq.ROUTER)
        for sock in (self.submissions, self._results, self.wire):
            sock.set_hwm(0)
        self.submissions.connect(tcp_url(client, task_port))
        self._results.connect(tcp_url(client, result_port))
        self.commands.connect(tcp_url(client, command_port))
        self.worker_port = self._bind(config)
        self._radio = None
        if config["hub_address"] is not None and config["hub_zmq_port"] is not None:
            self._radio = ZMQRadioSender(config["hub_address"], config["hub_zmq_port"], config["cert_dir"])
        self._poller = zmq.Poller()
        self._parent = os.pidfd_open(os.getppid())
        for source in (self.submissions, self.commands, self.wire, self._parent):
            self._poller.register(source, zmq.POLLIN)

    def _bind(self, config: dict[str, Any]) -> int:
        """Open the wire to agents and return its port."""
        address = config["interchange_address"] or "*"
        if port := config["worker_port"]:
            self.wire.bind(tcp_url(address, port))
            return int(port)
        low, high = config["worker_port_range"]
        return int(self.wire.bind_to_random_port(tcp_url(address), low, high, 100))

    def wait(self, limit_s: float) -> set[Any]:
        """Wait until something has come, at most `limit_s`, and return the sockets that have it."""
        ready = dict(self._poller.poll(int(limit_s * 1000)))
        if self._parent in ready:  # noted once: it stays readable, and would wake the loop for ever
            self.orphaned = True
            self._poller.unregister(self._parent)
        return set(ready)

    def send(self, uid: str, message: protocol.Message, payload: bytes | None = None) -> None:
        """Send a message to an agent; one that is gone loses it, and its silence is noticed."""
        self.wire.send_multipart([uid.encode(), *protocol.encode(message, payload)])

    def echo(self, identity: bytes) -> None:
        """Answer an agent that tries which of our addresses it reaches."""
        self.wire.send_multipart([identity, b""])

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message to the executor."""
        self._results.send(pickle.dumps(message))

    def monitor(self, message: Any) -> None:
        """Send a message to Parsl's monitoring, where it is switched on."""
        if self._radio:
            self._radio.send(message)

    def close(self) -> None:
        """Send what is under way, within 2 s, and close."""
        self._context.destroy(linger=2000)


def drain(sock: Any) -> list[list[bytes]]:
    """Return the messages that have arrived, at most a batch."""
    messages: list[list[bytes]] = []
    try:
        while len(messages) < BATCH:
            messages.append(sock.recv_multipart(zmq.NOBLOCK))
    except zmq.Again:
        pass
    return messages
