"""One device with its slots: who runs there, what is free, and for whom it is held."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from mdcampaign.errors import BadInput, InvariantBroken
from mdcampaign.scheduling.policy import Rank
from mdcampaign.scheduling.request import Request


@dataclass(frozen=True)
class DeviceSpec:
    """A device as a node declares it: `slots` equal shares, each with `cores_per_slot` CPU cores.

    `memory_mb` None: unknown, so memory never refuses a job there.
    """

    id: str
    slots: int
    cores_per_slot: int = 1
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "cores_per_slot"):
            if getattr(self, name) < 1:
                raise BadInput(name, getattr(self, name), f"device {self.id!r} has too few", "Give 1 or more.")

    def width(self, request: Request) -> int:
        """Slots that the job takes here, cores included; 0 where it can never run."""
        return 0 if self.refusal(request) else self.slots if request.exclusive else self._needed(request)

    def _needed(self, request: Request) -> int:
        return max(request.slots, -(-(request.cores or 0) // self.cores_per_slot))

    def refusal(self, request: Request) -> str:
        """Say in a clause why the job can never run on such a device, or ""."""
        if request.slots > self.slots:
            return f"it needs {request.slots} slots of one device and there are {self.slots}"
        if self._needed(request) > self.slots:
            return f"it needs {request.cores} cores and a device has {self.slots} slots x {self.cores_per_slot} cores"
        if self.memory_mb is not None and request.memory > self.memory_mb:
            return f"it needs {request.memory} MB of device memory and there are {self.memory_mb} MB"
        return ""


@dataclass(slots=True)
class Attempt:
    """One stay of a job in slots. `device` is None once its node is lost.

    `ends` is the time at which it is expected to end (infinite: unknown). A `victim` may be made to yield: it is
    preemptible, has reported progress, and is past its shortest run time. `yields_to` is the job it was told to
    make room for.
    """

    request: Request
    key: float
    device: Device | None
    index: tuple[int, ...]
    started: float
    ends: float = math.inf
    reported: bool = False
    victim: bool = False
    yields_to: int | None = None


@dataclass(slots=True)
class Hold:
    """A share of a device kept for one waiting job.

    A plain hold is for the first job in rank order that fits nowhere: the share fills as slots drain, and a job of
    better rank may still use it. An `asked` hold is for a job to which others were told to yield, and
    nobody else gets what they give back.
    """

    rank: Rank
    device: Device
    width: int
    memory_mb: int
    asked: bool

    @property
    def owner(self) -> int:
        return self.rank[-1]


@dataclass(slots=True, eq=False)
class Device:
    """The books of one device."""

    node: str
    spec: DeviceSpec
    order: int
    open: bool = True
    free: list[int] = field(init=False)
    free_mb: float = field(init=False)
    attempts: dict[int, Attempt] = field(default_factory=dict)
    holds: dict[int, Hold] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = list(range(self.spec.slots))
        self.free_mb = math.inf if self.spec.memory_mb is None else self.spec.memory_mb

    def __str__(self) -> str:
        return f"device {self.spec.id} of node {self.node}"

    def take(self, request: Request) -> tuple[int, ...]:
        """Give the job its slots and memory; return the slots."""
        width = self.spec.width(request)
        index, self.free = tuple(self.free[:width]), self.free[width:]
        self.free_mb -= request.memory
        return index

    def give_back(self, attempt: Attempt) -> None:
        """Free what the attempt had."""
        del self.attempts[attempt.request.id]
        for slot in attempt.index:
            insort(self.free, slot)
        self.free_mb += attempt.request.memory

    def room(self, apart_from: Iterable[Hold]) -> tuple[int, float]:
        """Free slots and MiB that are not in one of these holds."""
        slots, memory_mb = len(self.free), self.free_mb
        for hold in apart_from:
            slots -= hold.width
            memory_mb -= hold.memory_mb
        return max(0, slots), max(0, memory_mb)

    def fits(self, request: Request, rank: Rank) -> bool:
        """Whether the job can start now, beside the holds that bind it.

        Asked holds bind all; of their owners the best is served first. Plain holds bind jobs of lesser rank, but not
        those for which others have yielded here.
        """
        if len(self.free) < request.slots:
            return False
        own = self.holds.get(request.id)
        asked = own is not None and own.asked
        others = [hold for hold in self.holds.values() if hold is not own]
        if asked:
            binding = [hold for hold in others if hold.asked and hold.rank < rank]
        else:
            binding = [hold for hold in others if hold.asked or hold.rank < rank]
        slots, memory_mb = self.room(binding)
        return 0 < self.spec.width(request) <= slots and request.memory <= memory_mb

    def free_at(self, width: int) -> tuple[float, int]:
        """When `width` slots will be free if nothing new starts, and how many must end first, for comparison."""
        missing = width - len(self.free)
        if missing <= 0:
            return -math.inf, 0
        ends = -math.inf
        for attempt in sorted(self.attempts.values(), key=lambda attempt: attempt.ends):
            ends, missing = attempt.ends, missing - len(attempt.index)
            if missing <= 0:
                break
        return ends, width - len(self.free)

    def victims(self, width: int, memory_mb: int) -> list[Attempt] | None:
        """The cheapest attempts that must yield for so much room, dearest last, or None if all of them do not make it.

        Cheapest first: lowest key, then shortest time since the start.
        """
        slots, free_mb = self._uncovered()
        cheap = (a for a in self.attempts.values() if a.victim and a.yields_to is None)
        chosen: list[Attempt] = []
        for attempt in sorted(cheap, key=lambda a: (a.key, -a.started, a.request.id)):
            chosen.append(attempt)
            slots, free_mb = slots + len(attempt.index), free_mb + attempt.request.memory
            if slots >= width and free_mb >= memory_mb:
                break
        else:
            return None
        for attempt in chosen[:-1]:  # a wide one may have made earlier ones needless
            if slots - len(attempt.index) >= width and free_mb - attempt.request.memory >= memory_mb:
                chosen.remove(attempt)
                slots, free_mb = slots - len(attempt.index), free_mb - attempt.request.memory
        return chosen

    def _uncovered(self) -> tuple[int, float]:
        """Free room less the part of every hold that no yielding attempt is about to fill; may be negative."""
        slots, memory_mb = len(self.free), self.free_mb
        for hold in self.holds.values():
            coming = [a for a in self.attempts.values() if a.yields_to == hold.owner]
            slots -= max(0, hold.width - sum(len(a.index) for a in coming))
            memory_mb -= max(0, hold.memory_mb - sum(a.request.memory for a in coming))
        return slots, memory_mb

    def check(self) -> None:
        """Raise InvariantBroken unless each slot is free or held once and no budget is exceeded."""
        taken = [slot for attempt in self.attempts.values() for slot in attempt.index]
        if sorted(taken + self.free) != list(range(self.spec.slots)):
            raise InvariantBroken(f"{self}: slots {taken} taken and {self.free} free are not each slot once")
        memory_mb = sum(attempt.request.memory for attempt in self.attempts.values())
        if self.spec.memory_mb is not None and self.free_mb != self.spec.memory_mb - memory_mb:
            raise InvariantBroken(f"{self}: {self.free_mb} MB free, but {memory_mb} of {self.spec.memory_mb} MB taken")
        if self.free_mb < 0:
            raise InvariantBroken(f"{self}: more memory given out than there is")
        for id, attempt in self.attempts.items():
            if attempt.device is not self or attempt.request.id != id:
                raise InvariantBroken(f"{self}: {attempt.request} is in its books but runs elsewhere")
            if attempt.request.exclusive and len(self.attempts) > 1:
                raise InvariantBroken(f"{self}: {attempt.request} is exclusive and has neighbours")
            if len(attempt.index) != self.spec.width(attempt.request):
                raise InvariantBroken(f"{self}: {attempt.request} holds {len(attempt.index)} slots, not what it needs")
        promised = sum(hold.width for hold in self.holds.values() if hold.asked)
        coming = sum(len(attempt.index) for attempt in self.attempts.values() if attempt.yields_to is not None)
        if promised > len(self.free) + coming:
            raise InvariantBroken(
                f"{self}: {promised} slots promised, but only {len(self.free)} free and {coming} coming"
            )
        if self.holds and not self.open:
            raise InvariantBroken(f"{self}: held although nothing may start there")
