"""What a job asks of the scheduler, and the shape by which jobs with like needs share one heap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from mdcampaign.errors import BadJob


class Shape(NamedTuple):
    """Needs that decide where a job fits. `memory_mb` is the upper edge of a bucket; what is placed and counted
    is each job's exact number."""

    slots: int
    exclusive: bool
    memory_mb: int
    cores: int


@dataclass(frozen=True, slots=True)
class Request:
    """A job as the scheduler sees it: an immutable wish for slots of one device.

    `submitted` is in seconds of any clock, the same for all requests. `memory_mb` unknown counts as 0 in the
    budget. `expected_s` is the expected time in the slot; None switches the tail rule's help off for this job.

    Raises:
        BadJob: a value that no device could serve or no queue could order.
    """

    id: int
    submitted: float
    priority: float = 0.0
    slots: int = 1
    exclusive: bool = False
    memory_mb: int | None = None
    cores: int | None = None
    expected_s: float | None = None
    preemptible: bool = True
    name: str = ""

    def __post_init__(self) -> None:
        for field in ("submitted", "priority"):
            if not math.isfinite(value := getattr(self, field)):
                raise BadJob(field, value, "is not a finite number", "Give a number.")
        for field, least in (("slots", 1), ("memory_mb", 0), ("cores", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise BadJob(field, value, "is too small", f"Give {least} or more.")
        if self.expected_s is not None and not 0 <= self.expected_s < math.inf:
            raise BadJob("expected_s", self.expected_s, "is not a time", "Give seconds, or leave it out.")

    @property
    def memory(self) -> int:
        """MiB that count in a device's budget."""
        return self.memory_mb or 0

    @property
    def shape(self) -> Shape:
        """The needs of this job, memory rounded up to its bucket."""
        return Shape(self.slots, self.exclusive, bucket_top(self.memory), self.cores or 0)

    def __str__(self) -> str:
        return f"job {self.id} ({self.name})" if self.name else f"job {self.id}"


def bucket_top(memory_mb: int) -> int:
    """Return the upper edge of the bucket of a memory need: eight buckets to each doubling, so at most 12.5 % wide."""
    step = 1 << max(0, memory_mb.bit_length() - 4)
    return -(-memory_mb // step) * step


def bucket_floor(top_mb: int) -> int:
    """Return the least memory need whose bucket ends at `top_mb`."""
    step = 1 << max(0, (top_mb - 1).bit_length() - 4) if top_mb else 1
    return max(0, top_mb - step + 1)
