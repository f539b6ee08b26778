"""The agents: who has joined, who is silent, who is leaving; and what Parsl's block scaling asks about them.

Non-public names of Parsl used here: the commands of the interchange. `tests/contract` watches them.
"""

from __future__ import annotations

import logging
import platform
from importlib.metadata import version
from typing import Any

from parsl.monitoring.message_type import MessageType
from parsl.version import VERSION as PARSL_VERSION

from mdcampaign.broker.attempts import Attempts
from mdcampaign.broker.channels import Channels
from mdcampaign.broker.outbox import Outbox
from mdcampaign.broker.records import Agent, Holdings
from mdcampaign.node import protocol

logger = logging.getLogger("mdcampaign.broker")


class Agents:
    """Takes agents in, and gives up those that are silent or done. `config` as for `Channels`."""

    def __init__(
        self, config: dict[str, Any], holdings: Holdings, channels: Channels, outbox: Outbox, attempts: Attempts
    ) -> None:
        self._run_id = config["run_id"]
        self._silence_s = config["heartbeat_threshold"]
        self._check_python = bool(config.get("_check_python_mismatch", True))
        self._holdings, self._channels, self._outbox, self._attempts = holdings, channels, outbox, attempts
        self._scheduler, self._agents = holdings.scheduler, holdings.agents
        self._blocks: list[str] = []

    # ------------------------------------------------------------ what they say

    def register(self, uid: str, message: protocol.Register) -> None:
        """Take an agent in, or refuse it alone and in words."""
        if reason := mismatch(message, self._check_python):
            logger.error("Refused %s on %s: %s", uid, message.hostname, reason)
            self._channels.send(uid, protocol.Refused(reason=reason))
            self._outbox.event("warning", text=f"a pilot on {message.hostname} was refused: {reason}")
            return
        if uid in self._agents:
            self.lose(uid, "it registered again")
        now = self._holdings.now
        agent = self._agents[uid] = Agent(message, heard=now, idle_since=now)
        self._blocks.append(message.block_id)
        self._scheduler.add_node(uid, agent.devices(), now)
        self._channels.send(uid, protocol.Registered())
        self._send_node_info(agent)
        logger.info("Registered %s on %s with %d slots", uid, message.hostname, agent.slots)
        devices = [device.model_dump() for device in message.devices]
        self._outbox.event("node_joined", node=message.hostname, agent=uid, block=message.block_id, devices=devices)

    def on_heartbeat(self, uid: str, message: protocol.Heartbeat, _: bytes | None) -> None:
        """Answer a heartbeat; a task that two of them in a row do not list never arrived, and is lost."""
        self._channels.send(uid, protocol.Beat())
        agent = self._agents[uid]
        held = {task for task, _ in message.running}
        missing = agent.tasks - held
        for task_id in missing & agent.missing:
            self._attempts.lost(self._holdings.tasks[task_id], f"{agent.info.hostname} does not have it")
        agent.missing = missing & agent.tasks

    def on_leaving(self, uid: str, message: protocol.Leaving, _: bytes | None) -> None:
        """Start nothing more on an agent that is going."""
        agent = self._agents[uid]
        agent.leaving = message.reason
        self._scheduler.drain_node(uid, self._holdings.now)
        logger.info("%s on %s is leaving: %s", uid, agent.info.hostname, message.reason)
        if not agent.tasks:
            self.dismiss(uid)

    # ------------------------------------------------------------ how they go

    def expire(self) -> None:
        """Give up agents that have been silent for the threshold, and dismiss those that have finished leaving."""
        now = self._holdings.now
        for uid, agent in list(self._agents.items()):
            if now - agent.heard > self._silence_s:
                self.lose(uid, f"silent for {now - agent.heard:.0f} s")
            elif agent.leaving and not agent.tasks:
                self.dismiss(uid)

    def lose(self, uid: str, why: str) -> None:
        """Give an agent up; what it held goes back to the queue, and it is fenced if it speaks again."""
        agent = self._agents[uid]
        logger.warning("Lost %s on %s: %s", uid, agent.info.hostname, why)
        self._channels.send(uid, protocol.Fenced())
        self._scheduler.remove_node(uid, self._holdings.now)
        for task_id in sorted(agent.tasks):
            self._attempts.lost(self._holdings.tasks[task_id], f"{agent.info.hostname} was lost: {why}")
        self._forget(uid)
        self._outbox.event("node_lost", node=agent.info.hostname, agent=uid, why=why)

    def dismiss(self, uid: str) -> None:
        """Send an agent home that has nothing left to do."""
        agent = self._agents[uid]
        self._channels.send(uid, protocol.Shutdown(reason=agent.leaving))
        self._scheduler.remove_node(uid, self._holdings.now)
        self._forget(uid)
        self._outbox.event("node_left", node=agent.info.hostname, agent=uid, why=agent.leaving)

    def _forget(self, uid: str) -> None:
        """Drop the record of an agent."""
        agent = self._agents.pop(uid)
        agent.active = False
        self._send_node_info(agent)

    def _send_node_info(self, agent: Agent) -> None:
        """Tell Parsl's monitoring about a node."""
        self._channels.monitor((MessageType.NODE_INFO, agent.as_node_info(self._run_id)))

    # ------------------------------------------------------------ what block scaling asks

    def answer(self, request: Any) -> Any:
        """Answer one of the commands that Parsl's block scaling knows."""
        if request == "CONNECTED_BLOCKS":
            return self._blocks
        if request == "MANAGERS":
            return [agent.as_manager(self._holdings.now) for agent in self._agents.values()]
        if request == "MANAGERS_PACKAGES":
            return {uid: agent.info.packages for uid, agent in self._agents.items()}
        if request == "WORKER_BINDS":
            return self._channels.worker_port
        if isinstance(request, list) and len(request) == 2 and request[0] == "HOLD_MANAGER":
            self._hold(request[1])
        else:
            logger.error("Unknown command %r", request)
        return None

    def _hold(self, uid: str) -> None:
        """Start nothing more on an agent that Parsl is about to release."""
        if agent := self._agents.get(uid):
            agent.active = False
            self._scheduler.drain_node(uid, self._holdings.now)
            self._send_node_info(agent)


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
