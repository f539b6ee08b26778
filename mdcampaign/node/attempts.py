"""Attempts, the runners that they are in, and who is told about them."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any, Protocol

from mdcampaign.jobs import Slot
from mdcampaign.node.protocol import Ended, Place


@dataclass(eq=False)
class Attempt:
    """A stay in a slot. `order` is how it ends because we said so, `ending` how because the task said so."""

    place: Place
    slot: Slot
    payload: bytes
    placed_s: float
    runner: Runner | None = None
    taken: bool = False
    reported: bool = False
    tries: int = 0
    directives: list[dict[str, Any]] = field(default_factory=list)
    order: tuple[str, str] | None = None
    ending: tuple[Ended, bytes | None] | None = None

    @property
    def id(self) -> tuple[int, int]:
        """Task and attempt number."""
        return self.place.task, self.place.attempt


@dataclass(eq=False)
class Runner:
    """A process, asked for or running; `doomed_s` is when we asked for its end, 0 if we did not."""

    id: int
    slot: Slot
    sock: socket.socket
    monitoring: socket.socket
    asked_s: float
    pid: int | None = None
    attempt: Attempt | None = None
    used: bool = False
    doomed_s: float = 0.0
    stuck: bool = False


class Listener(Protocol):
    """Who wants to know."""

    def started(self, attempt: Attempt, pid: int, fork_s: float) -> None:
        """A runner has taken the task."""

    def reported(self, attempt: Attempt, report: dict[str, Any]) -> None:
        """A progress report came."""

    def ended(self, attempt: Attempt, message: Ended, payload: bytes | None) -> None:
        """The attempt has left its slot."""

    def monitoring(self, payload: bytes) -> None:
        """A message of Parsl's monitoring came."""


def overlap(one: Slot, other: Slot) -> bool:
    """Tell whether two have a slot in common."""
    return one.device == other.device and not set(one.index).isdisjoint(other.index)
