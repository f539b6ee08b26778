"""What the log and its index cost at scale; run by hand: python tests/benchmarks/bench_ledger.py [JOBS]."""

from __future__ import annotations

import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from mdcampaign.index import CampaignIndex
from mdcampaign.ledger import LedgerWriter, event, read_events
from mdcampaign.state import CampaignState

REPORTS = 3
"""Progress reports a job that reach the log, after thinning."""


def timed(what: str, function, per: int = 0):
    begin = time.perf_counter()
    result = function()
    seconds = time.perf_counter() - begin
    print(f"{what:<58} {seconds:8.3f} s" + (f" {seconds / per * 1e6:8.1f} us each" if per else ""))
    return result


def life(ledger: LedgerWriter, n: int, end: bool = True) -> None:
    """The events of one job, with the fields that the executor gives them; one in ten is interrupted once."""
    job = f"group-{n % 20}/replica-{n:06d}"
    ledger.append(
        event("submitted", job=job, task=n, identity=f"{n:064x}", group=f"group-{n % 20}", priority=float(n % 3),
              slots=1, exclusive=False, memory_mb=500, expected_s=600.0, requeue=True, target_step=500_000)
    )  # fmt: skip
    for attempt in (1, 2) if n % 10 == 0 else (1,):
        device = f"GPU-5a3c1f7e-0000-4000-8000-{n % 64:012d}"
        ledger.append(event("placed", job=job, task=n, attempt=attempt, node=f"gpu{n % 16}", device=device, index=[1]))
        ledger.append(event("started", job=job, task=n, attempt=attempt, pid=12345, fork_s=0.0021))
        for k in range(1, REPORTS + 1):
            facts = {"step": k * 100_000, "target_step": 500_000, "saved_step": k * 90_000, "rate_ns_per_day": 412.25}
            values = {"phi": -60.123456, "psi": -45.654321}
            ledger.append(event("progress", job=job, task=n, attempt=attempt, observables=values, **facts))
        ledger.append(
            event(
                "ended",
                job=job,
                task=n,
                attempt=attempt,
                how="interrupted" if attempt == 1 and n % 10 == 0 else "result",
            )
        )
    if end:
        ledger.append(event("done", job=job, task=n, outcome="done", step=500_000, ns=1.0, message="", frames=500))


def main(jobs: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        campaign, path = Path(place) / "c", Path(place) / "i.sqlite"
        with LedgerWriter(campaign, thin_s=0) as ledger:
            timed(f"append the lives of {jobs} jobs", lambda: [life(ledger, n) for n in range(jobs)])
            timed("  and wait until they are on disk", lambda: ledger.flush(600))
            latency(ledger)
            one_by_one(ledger)
            ledger.flush()
            events = timed("read the log", lambda: sum(1 for _ in read_events(campaign)))
            size = sum(file.stat().st_size for file in (campaign / "events").iterdir())
            print(f"{events} events, {size / 1e6:.1f} MB, {size / jobs:.0f} bytes a job")
            timed("fold the log (recovery)", lambda: CampaignState.replay(campaign), events)
            with CampaignIndex(campaign, path) as index:
                timed("index: first build", index.refresh, events)
                print(f"index file {path.stat().st_size / 1e6:.1f} MB")
                timed("index: nothing new", index.refresh)
                for n in range(jobs, jobs + jobs // 100):
                    life(ledger, n, end=False)
                ledger.flush()
            with CampaignIndex(campaign, path) as index:
                timed(f"status: open, catch up {jobs // 100} jobs, count", lambda: (index.refresh(), index.counts()))
                timed("all jobs as records", index.jobs)
                timed("one job with its attempts", lambda: index.job("group-7/replica-000007"))
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


def latency(ledger: LedgerWriter) -> None:
    """From append to the acknowledgement, one event at a time: what a future waits for the disk."""
    times = []
    for _ in range(500):
        safe, begin = threading.Event(), time.perf_counter()
        ledger.append(event("warning", text="x"), then=safe.set)
        safe.wait()
        times.append(time.perf_counter() - begin)
    times.sort()
    print(f"append to acknowledgement, alone: p50 {times[250] * 1e3:.2f} ms, p95 {times[475] * 1e3:.2f} ms")


def one_by_one(ledger: LedgerWriter) -> None:
    """Cost of an event in groups: 20,000 at once, each acknowledged."""
    count, left = 20_000, threading.Semaphore(0)
    begin = time.perf_counter()
    for n in range(count):
        ledger.append(event("warning", text="x", n=n), then=left.release)
    appended = time.perf_counter() - begin
    for _ in range(count):
        left.acquire()
    total = time.perf_counter() - begin
    print(
        f"{count} at once: append {appended / count * 1e6:.1f} us, append to acknowledged {total / count * 1e6:.1f} us"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
