"""SlotExecutor beside stock HTEX, in one run on one machine: refill gap and no-op throughput.

    python tests/benchmarks/bench_executor.py [--rounds 5] [--slots 2]

The two take turns, round by round, so that the machine's mood meets both. Refill gap: from the end of a job in a
slot (its own clock) to the start of the next one there; one clock for all processes of a machine. HTEX has prefetch
0, its fairest setting for unequal jobs. Prints a Markdown table of medians with the spread over rounds.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time

import parsl
from parsl import python_app
from parsl.executors import HighThroughputExecutor
from parsl.providers import LocalProvider

from mdcampaign.executor import SlotExecutor

GAP_JOBS = 300
NOOPS = 2000


@python_app
def seat(seconds):
    import os
    import time

    began = time.monotonic()
    time.sleep(seconds)
    return int(os.environ["PARSL_WORKER_RANK"]), began, time.monotonic()


@python_app
def noop():
    return None


def executor(kind: str, slots: int):
    provider = LocalProvider(init_blocks=1, max_blocks=1)
    common = {"provider": provider, "address": "127.0.0.1", "max_workers_per_node": slots}
    if kind == "slots":
        return SlotExecutor(label=kind, slots_per_device=slots, **common)
    share = 2 / slots
    return HighThroughputExecutor(label=kind, cores_per_worker=share, prefetch_capacity=0, **common)


def measure(kind: str, slots: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        config = parsl.Config(executors=[executor(kind, slots)], run_dir=directory, strategy="none")
        with parsl.load(config):
            noop().result(120)
            first = time.monotonic() - began
            [f.result(120) for f in [noop() for _ in range(50)]]
            seats: dict[int, list[tuple[float, float]]] = {}
            for rank, start, end in [f.result(120) for f in [seat(0.01) for _ in range(GAP_JOBS)]]:
                seats.setdefault(rank, []).append((start, end))
            gaps = sorted(
                later[0] - earlier[1]
                for stays in seats.values()
                for earlier, later in zip(sorted(stays), sorted(stays)[1:])
            )
            started = time.monotonic()
            [f.result(120) for f in [noop() for _ in range(NOOPS)]]
            rate = NOOPS / (time.monotonic() - started)
            round_trips = []
            for _ in range(100):
                asked = time.monotonic()
                noop().result(120)
                round_trips.append(time.monotonic() - asked)
        parsl.clear()
    return {
        "refill gap p50 (ms)": 1e3 * statistics.median(gaps),
        "refill gap p95 (ms)": 1e3 * gaps[int(0.95 * len(gaps))],
        "no-op tasks/s": rate,
        "no-op round trip p50 (ms)": 1e3 * statistics.median(round_trips),
        "first result (s)": first,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=2)
    arguments = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"slots": [], "htex": []}
    for _ in range(arguments.rounds):
        for kind, results in rounds.items():
            results.append(measure(kind, arguments.slots))
    print(f"Python {platform.python_version()}, {platform.machine()}, {arguments.rounds} rounds each, in turns\n")
    print("| | SlotExecutor | HTEX, prefetch 0 |\n|---|---|---|")
    for name in rounds["slots"][0]:
        cells = []
        for results in rounds.values():
            values = [result[name] for result in results]
            cells.append(f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
