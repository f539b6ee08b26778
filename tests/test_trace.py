"""The simulator and the real executor place one trace of jobs in the same order: they drive the same scheduler."""

from __future__ import annotations

import random

from parsl import python_app

from mdcampaign.scheduling.simulator import continuous, fleet_of
from mdcampaign.scheduling.workload import Job
from tests import apps
from tests.conftest import GUARD_S, Start, wait_until

nap = python_app(apps.nap)


def trace(dice: random.Random) -> list[Job]:
    """A blocker, behind which all others queue up, then jobs of all kinds."""
    jobs = [Job("t/blocker", 3.0, priority=1000.0, exclusive=True)]
    for n in range(40):
        exclusive = n % 13 == 5
        slots = 2 if n % 11 == 7 else 1
        seconds = dice.choice([0.05, 0.1, 0.15, 0.2, 0.9])
        jobs.append(Job(f"t/{n:02d}", seconds, float(dice.randrange(4)), slots=slots, exclusive=exclusive))
    return jobs


def test_simulator_and_executor_place_one_trace_in_the_same_order(start: Start, events) -> None:
    jobs = trace(random.Random(11))
    simulated = [stay.job.name for stay in continuous(jobs, fleet_of(1, 2)).stays]
    executor = start()
    seen = events(executor)

    def submit(job: Job):
        spec = {"name": job.name, "priority": job.priority, "slots": job.slots, "exclusive": job.exclusive}
        return nap(job.duration_s, parsl_resource_specification={**spec, "expected_s": job.duration_s})

    futures = [submit(jobs[0])]
    wait_until(lambda: executor.snapshot()["running"] == 1, "the blocker to run")
    futures += [submit(job) for job in jobs[1:]]
    for future in futures:
        future.result(GUARD_S)
    placed = [event["job"] for event in seen if event["event"] == "placed"]
    assert placed == simulated
