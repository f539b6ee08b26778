"""Cost of a scheduling pass, by hand: `python tests/benchmarks/bench_scheduler.py`.

Each row fills 1,000 devices x 8 slots, queues the jobs, and then times what one ended job costs: `ended` and the pass
that refills its slot (a pass that starts nothing, because the first job needs more than one slot, is among them).
"""

from __future__ import annotations

import argparse
import statistics
import time

from mdcampaign.scheduling.device import DeviceSpec
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.request import Request
from mdcampaign.scheduling.scheduler import Scheduler

PASSES = 300
DEVICE = {"slots": 8, "cores_per_slot": 4, "memory_mb": 80_000}


def one_slot(id: int, shapes: int) -> Request:
    """Jobs of one slot in `shapes` memory buckets of 5 % and more."""
    memory_mb = [500, 700, 1000, 1400, 2000, 2800, 3500, 4200, 5000, 6000][id % 10] if shapes == 10 else None
    return Request(id, float(id % 997), float(id % 5), memory_mb=memory_mb, expected_s=60.0 + id % 600)


def any_request(id: int, shapes: int) -> Request:
    """10,000 different requests: as many combinations of memory, slots and cores."""
    n = id * 7919 % shapes
    memory_mb, slots = 200 + 7 * (n % 1250), 1 + n // 1250 % 8
    return Request(id, float(id % 997), float(id % 5), slots=slots, memory_mb=memory_mb, expected_s=60.0 + id % 600)


def any_shape(id: int, shapes: int) -> Request:
    """The worst: 10,000 different shapes, which no bucket makes fewer."""
    n = id * 7919 % shapes
    memory_mb = (8 + n % 8) << (5 + n // 8 % 9)
    slots, cores = 1 + n // 72 % 8, 1 + n // 576 % 18
    return Request(id, float(id % 997), float(id % 5), slots=slots, memory_mb=memory_mb, cores=cores, expected_s=60.0)


def fill(policy: Policy, devices: int) -> tuple[Scheduler, int]:
    """Return a scheduler whose slots are all taken, and the next id."""
    scheduler = Scheduler(policy)
    for node in range(devices // 4):
        scheduler.add_node(f"n{node}", [DeviceSpec(f"g{gpu}", **DEVICE) for gpu in range(4)], 0.0)
    for id in range(devices * 8):
        scheduler.submit(Request(id, 0.0, memory_mb=500, expected_s=1000.0 + id % 977), 0.0)
    scheduler.schedule(0.0)
    for id in list(scheduler.attempts):
        scheduler.progress(id, 500.0 + id % 977, 1.0)
    return scheduler, devices * 8


def measure(name: str, make: object, shapes: int, queued: int, policy: Policy, devices: int = 1000) -> None:
    """Print one row."""
    scheduler, first = fill(policy, devices)
    start = time.process_time()
    for id in range(first, first + queued):
        scheduler.submit(make(id, shapes), 1.0)  # type: ignore[operator]
    submit_us = (time.process_time() - start) / queued * 1e6
    scheduler.schedule(1.0)
    took, placed, now = [], 0, 2.0
    for _ in range(PASSES):
        id = next(iter(scheduler.attempts))
        now += 1.0
        start = time.process_time()
        scheduler.ended(id, now)
        decisions = scheduler.schedule(now)
        took.append((time.process_time() - start) * 1e3)
        placed += len(decisions)
    took.sort()
    p50, p99 = statistics.median(took), took[int(0.99 * len(took))]
    print(
        f"{name:<34}{queued:>10,}{len(scheduler.queue.lanes):>8,}{p50:>10.3f}{p99:>10.3f}{took[-1]:>10.3f}"
        f"{placed / PASSES:>10.2f}{submit_us:>12.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", action="store_true", help="also with 1,000,000 queued jobs (2 GB, minutes)")
    args = parser.parse_args()
    print(
        f"{'1,000 devices x 8 slots':<34}{'queued':>10}{'heaps':>8}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}"
        f"{'decisions':>10}{'submit us':>12}"
    )
    plain, urgent = Policy(), Policy(preempt_gap=1.0)
    sizes = [1_000, 10_000, 100_000] + [1_000_000] * args.million
    for queued in sizes:
        measure("10 shapes", one_slot, 10, queued, plain)
    measure("10 shapes, preemption on", one_slot, 10, 100_000, urgent)
    for queued in sizes:
        measure("10,000 different requests", any_request, 10_000, queued, plain)
    measure("10,000 requests, preemption on", any_request, 10_000, 100_000, urgent)
    measure("10,000 different shapes (worst)", any_shape, 10_000, 100_000, plain)


if __name__ == "__main__":
    main()
