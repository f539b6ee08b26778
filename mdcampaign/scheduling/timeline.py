"""What a simulated run did: who ran where and when, and the figures that follow."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from mdcampaign.scheduling.workload import Job


@dataclass(frozen=True, slots=True)
class Stay:
    """One job in its slots, from `start_s` to `end_s`."""

    job: Job
    node: str
    device: str
    index: tuple[int, ...]
    start_s: float
    end_s: float

    @property
    def wait_s(self) -> float:
        return self.start_s - self.job.submitted_s


@dataclass
class Timeline:
    """The stays of all jobs in the order of their start, on `slots` slots in all.

    `aging` (levels per second) serves to say what effective priority a job had reached.
    """

    slots: int
    aging: float
    stays: list[Stay] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        """From the first submission to the last end."""
        return max(stay.end_s for stay in self.stays) - min(stay.job.submitted_s for stay in self.stays)

    @property
    def idle_fraction(self) -> float:
        """Share of the slot time until the end in which nothing ran."""
        busy_s = sum(len(stay.index) * stay.job.duration_s for stay in self.stays)
        return max(0.0, 1 - busy_s / (self.slots * self.makespan_s))

    @property
    def mean_wait_s(self) -> float:
        """Mean time from submission to start."""
        return sum(stay.wait_s for stay in self.stays) / len(self.stays)

    def top_waits(self, n: int = 3) -> list[dict[str, Any]]:
        """The longest waits, with the effective priority at the start."""
        longest = heapq.nlargest(n, self.stays, key=lambda stay: stay.wait_s)
        return [
            {
                "job": stay.job.name,
                "priority": stay.job.priority,
                "wait_s": stay.wait_s,
                "effective_priority": stay.job.priority + self.aging * stay.wait_s,
            }
            for stay in longest
        ]

    def waits_by_priority(self) -> dict[str, dict[str, float]]:
        """Number of jobs, mean and longest wait for each priority, the most urgent first."""
        waits: dict[float, list[float]] = {}
        for stay in self.stays:
            waits.setdefault(stay.job.priority, []).append(stay.wait_s)
        return {
            f"{priority:g}": {"jobs": len(some), "mean_s": sum(some) / len(some), "max_s": max(some)}
            for priority, some in sorted(waits.items(), reverse=True)
        }

    def figures(self) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        return {
            "makespan_s": self.makespan_s,
            "idle_fraction": self.idle_fraction,
            "mean_wait_s": self.mean_wait_s,
            "max_wait_s": max(stay.wait_s for stay in self.stays),
            "waits_by_priority": self.waits_by_priority(),
            "top_waits": self.top_waits(),
        }
