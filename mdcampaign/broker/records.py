"""What the broker knows of each task and of each agent; plain records, no sockets and no decisions."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import Any

from mdcampaign.node.protocol import Direct, Place, Register
from mdcampaign.scheduling import scheduler as scheduling
from mdcampaign.scheduling.request import Request

MAX_BARREN = 5
"""Interruptions in a row without a newly saved step after which a job counts as making no progress."""


@dataclass
class Task:
    """A task from submission to its end. `attempt` counts placements; a message of another attempt is refused."""

    request: Request
    buffer: bytes
    context: dict[str, Any]
    requeue: bool
    attempt: int
    agent: str | None = None
    cancelled: bool = False
    target_step: int = 0
    saved_step: int = 0
    saved_before: int = -1
    barren: int = 0
    extended_to: int | None = None
    pending: Direct | None = None
    began: bool = False

    @property
    def id(self) -> int:
        """The executor's task id."""
        return self.request.id

    @property
    def state(self) -> str:
        """Whether it is "running" or "waiting"."""
        return "running" if self.agent else "waiting"

    def placed(self, place: scheduling.Place) -> Place:
        """Begin the next attempt and return the message for the agent."""
        self.attempt += 1
        self.agent = place.node
        self.began = True
        self.saved_before = self.saved_step
        return Place(
            task=self.id,
            attempt=self.attempt,
            name=self.request.name,
            device=place.device,
            index=list(place.index),
            exclusive=self.request.exclusive,
            memory_mb=self.request.memory_mb,
            context=self.context,
        )

    def interrupted(self) -> bool:
        """Record an interruption; False when it was one too many without a newly saved step."""
        self.agent = None
        self.pending = None
        self.barren = 0 if self.saved_step > self.saved_before else self.barren + 1
        return self.barren < MAX_BARREN


@dataclass
class Agent:
    """An agent that has registered. Times are the broker's monotonic seconds."""

    info: Register
    heard: float
    idle_since: float | None
    active: bool = True
    leaving: str = ""
    tasks: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)

    @property
    def slots(self) -> int:
        """Slots of all its devices."""
        return sum(len(device.slot_cores) for device in self.info.devices)

    def devices(self) -> list[scheduling.DeviceSpec]:
        """Return its devices as the scheduler knows them."""
        return [
            scheduling.DeviceSpec(
                device.uuid,
                slots=len(device.slot_cores),
                cores_per_slot=max(1, min(len(cores) for cores in device.slot_cores)),
                memory_mb=device.memory_mb,
            )
            for device in self.info.devices
        ]

    def as_manager(self, now: float) -> dict[str, Any]:
        """Return what HTEX's command MANAGERS says of a manager; Parsl's block scaling reads it."""
        return {
            "manager": self.info.uid,
            "block_id": self.info.block_id,
            "worker_count": self.slots,
            "tasks": len(self.tasks),
            "idle_duration": 0.0 if self.idle_since is None else now - self.idle_since,
            "active": self.active,
            "parsl_version": self.info.parsl_version,
            "python_version": self.info.python_version,
            "draining": bool(self.leaving),
        }

    def as_node_info(self, run_id: str) -> dict[str, Any]:
        """Return the row that Parsl's monitoring keeps of a node."""
        return {
            "run_id": run_id,
            "hostname": self.info.hostname,
            "uid": self.info.uid,
            "block_id": self.info.block_id,
            "cpu_count": self.info.cpu_count,
            "total_memory": self.info.memory_mb * 2**20,
            "active": self.active,
            "worker_count": self.slots,
            "python_v": self.info.python_version,
            "timestamp": datetime.datetime.now(),
            "last_heartbeat": datetime.datetime.now(),
        }


@dataclass
class Holdings:
    """All that the broker holds. `now` is the time of this turn of its loop (monotonic, s); `ending` why it ends."""

    scheduler: scheduling.Scheduler
    now: float
    tasks: dict[int, Task] = field(default_factory=dict)
    agents: dict[str, Agent] = field(default_factory=dict)
    ending: str = ""


def remaining_s(progress: dict[str, Any]) -> float | None:
    """Return the remaining seconds of a progress report, None when it does not tell a finite number."""
    value = progress.get("remaining_s")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
