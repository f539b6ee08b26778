"""A discrete-event simulation of a campaign, driven by the scheduler that also runs the real ones.

One heap of events; time is what the next event says (the model is SimPy's core). Simulated jobs report no progress, so
they are never made to yield.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mdcampaign.errors import BadWorkload
from mdcampaign.scheduling.device import Attempt, DeviceSpec
from mdcampaign.scheduling.fleet import Fleet
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.request import Request
from mdcampaign.scheduling.scheduler import Place, Scheduler
from mdcampaign.scheduling.timeline import Stay, Timeline
from mdcampaign.scheduling.workload import Job, lower_bound_s

POLICIES = ("continuous", "fifo", "static")
NODE = "node"


class ReplayJob(NamedTuple):
    """A job of a finished campaign with its measured length; times are seconds of one clock."""

    name: str
    submitted_s: float
    duration_s: float
    priority: float = 0.0
    slots: int = 1


@dataclass(frozen=True)
class Replay:
    """How long the same jobs would have taken in other orders, and the least that any order takes."""

    fifo_wall_s: float
    static_wall_s: float
    lower_bound_s: float


def fleet_of(devices: int, slots: int) -> list[DeviceSpec]:
    """Return `devices` equal devices of `slots` slots each. Raises BadWorkload for fewer than one of either."""
    for field, value in (("devices", devices), ("slots", slots)):
        if value < 1:
            raise BadWorkload(field, value, "must be at least 1", "Give a whole number.")
    return [DeviceSpec(f"device-{n}", slots) for n in range(devices)]


def continuous(
    jobs: Sequence[Job], devices: Sequence[DeviceSpec], policy: Policy | None = None, *, known: bool = True
) -> Timeline:
    """Run the jobs by the scheduler: a slot is refilled at once, by rank, with the tail rule.

    Args:
        jobs: the workload.
        devices: the devices of the one node.
        policy: `Policy()` by default.
        known: whether the scheduler is told how long the jobs run.
    """
    policy = policy or Policy()
    requests = [job.request(id, known=known) for id, job in enumerate(jobs)]
    return _run(jobs, requests, devices, policy, Timeline(_slots(devices), policy.aging))


def fifo(jobs: Sequence[Job], devices: Sequence[DeviceSpec], aging: float = Policy.aging) -> Timeline:
    """Run the jobs by refill in the order of submission: what HTEX and Slurm's job arrays do.

    `aging` serves only to name the effective priorities that the jobs had reached.
    """
    requests = [replace(job.request(id, known=False), priority=0.0) for id, job in enumerate(jobs)]
    return _run(jobs, requests, devices, Policy(aging=0.0, tail=False), Timeline(_slots(devices), aging))


def static(jobs: Sequence[Job], devices: Sequence[DeviceSpec], aging: float = Policy.aging) -> Timeline:
    """Run the jobs in batches, in the order of submission: as many as the slots hold, each until its slowest ends."""
    fleet = Fleet()
    fleet.know(devices)
    fleet.add_node(NODE, devices)
    timeline = Timeline(_slots(devices), aging)
    requests = [job.request(id, known=False) for id, job in enumerate(jobs)]
    _all_fit(requests, devices)
    waiting = sorted(requests, key=lambda request: (request.submitted, request.id), reverse=True)
    now = waiting[-1].submitted
    while waiting:
        now = max(now, waiting[-1].submitted)
        batch: list[Attempt] = []
        while waiting and waiting[-1].submitted <= now and (device := fleet.find(waiting[-1], -1, "pack")):
            request = waiting.pop()
            attempt = Attempt(request, 0.0, device, device.take(request), now)
            fleet.start(attempt)
            batch.append(attempt)
            job = jobs[request.id]
            timeline.stays.append(Stay(job, NODE, device.spec.id, attempt.index, now, now + job.duration_s))
        for attempt in batch:
            now = max(now, attempt.started + jobs[attempt.request.id].duration_s)
            fleet.end(attempt)
    return timeline


def _run(
    jobs: Sequence[Job], requests: list[Request], devices: Sequence[DeviceSpec], policy: Policy, timeline: Timeline
) -> Timeline:
    """Play submissions and ends in the order of time; after each moment let the scheduler decide."""
    _all_fit(requests, devices)
    scheduler = Scheduler(policy)
    scheduler.add_node(NODE, devices, 0.0)
    events = [(request.submitted, id, True) for id, request in enumerate(requests)]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, id, arrives = heapq.heappop(events)
            if arrives:
                scheduler.submit(requests[id], now)
            else:
                scheduler.ended(id, now)
        for decision in scheduler.schedule(now):
            if isinstance(decision, Place):
                id = decision.request.id
                end_s = now + jobs[id].duration_s
                timeline.stays.append(Stay(jobs[id], decision.node, decision.device, decision.index, now, end_s))
                heapq.heappush(events, (end_s, id, False))
    return timeline


def compare(
    jobs: Sequence[Job], devices: Sequence[DeviceSpec], policy: Policy | None = None, *, known: bool = True
) -> dict[str, Any]:
    """Run the jobs by all `POLICIES`; return the figures as plain JSON values, the same for the same input.

    Raises:
        BadWorkload: no jobs, or one that fits no device.
    """
    if not jobs:
        raise BadWorkload("jobs", 0, "must be at least 1", "Give the number of jobs.")
    policy = policy or Policy()
    timelines = (continuous(jobs, devices, policy, known=known), fifo(jobs, devices, policy.aging))
    return {
        "lower_bound_s": lower_bound_s(jobs, devices),
        "jobs": len(jobs),
        "devices": len(devices),
        "slots": _slots(devices),
        "policies": {
            name: timeline.figures()
            for name, timeline in zip(POLICIES, (*timelines, static(jobs, devices, policy.aging)))
        },
    }


def replay(jobs: Iterable[ReplayJob], slots: int) -> Replay:
    """Replay the measured lengths of a finished campaign through `fifo` and `static` on one device of `slots` slots.

    Raises:
        BadWorkload: no jobs, a length of 0, or a job that needs more slots than there are.
    """
    replayed = [Job(job.name, job.duration_s, job.priority, job.submitted_s, job.slots) for job in jobs]
    figures = compare(replayed, fleet_of(1, slots))
    walls = {name: figures["policies"][name]["makespan_s"] for name in POLICIES}
    return Replay(walls["fifo"], walls["static"], figures["lower_bound_s"])


def _slots(devices: Sequence[DeviceSpec]) -> int:
    return sum(device.slots for device in devices)


def _all_fit(requests: Iterable[Request], devices: Sequence[DeviceSpec]) -> None:
    """Refuse a workload with a job that no device could ever hold."""
    scheduler = Scheduler()
    scheduler.declare(devices)
    for request in requests:
        if problem := scheduler.can_ever_fit(request):
            raise BadWorkload("jobs", request.name or request.id, problem, "Give it less, or the devices more.")
