"""How fast a node is, without broker and executor: `python tests/benchmarks/bench_runner.py [ROUNDS]`.

* fork to ready: from placement to a new runner having the task, the eviction of the old one left out
* warm round trip: placement to `Ended`, one no-op after the other in one slot
* refill gap: from the end of a task to the start of the next in its slot, as the tasks see it
* no-ops a second: two slots kept busy

The fake broker, the agent and the runners share the machine's cores, so on two of them this is a lower bound.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from mdcampaign.node import protocol
from tests.node import tasks
from tests.node.fake_broker import FakeBroker


def fork_to_ready(broker: FakeBroker, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        broker.ended(broker.place(tasks.exit_by, 1))
        task = broker.place(tasks.nothing)
        times.append(broker.wait(protocol.Started, task).fork_s)
        broker.ended(task)
        broker.heard.clear()
    return times


def round_trip(broker: FakeBroker, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        broker.ended(broker.place(tasks.nothing))
        times.append(time.perf_counter() - start)
        broker.heard.clear()
    return times


def refill_gap(broker: FakeBroker, rounds: int) -> list[float]:
    ends, gaps = [0.0, 0.0], []
    where = {broker.place(tasks.stamp, 0.02, index=(i,)): i for i in (0, 1)}
    for _ in range(rounds):
        ended = broker.wait(protocol.Ended)
        slot = where.pop(ended.task)
        where[broker.place(tasks.stamp, 0.02, index=(slot,))] = slot
        start, end = broker.result(ended.task)
        if ends[slot]:
            gaps.append(start - ends[slot])
        ends[slot] = end
        broker.heard[:] = [one for one in broker.heard if getattr(one[0], "task", ended.task) != ended.task]
    for task in where:
        broker.ended(task)
    broker.heard.clear()
    return gaps


def rate(broker: FakeBroker, count: int) -> float:
    broker.heard.clear()
    start = time.perf_counter()
    ended, placed = 0, 2
    slot = {broker.place(tasks.nothing, index=(i,)): i for i in (0, 1)}
    while ended < count:
        broker.pump(1000)
        for message, _ in broker.heard:
            if isinstance(message, protocol.Ended):
                ended += 1
                if placed < count:
                    i = slot.pop(message.task)
                    slot[broker.place(tasks.nothing, index=(i,))] = i
                    placed += 1
        broker.heard.clear()
    return count / (time.perf_counter() - start)


def show(name: str, times: list[float]) -> None:
    cuts = statistics.quantiles(times, n=20)
    print(f"{name:18s} p50 {1000 * cuts[9]:6.2f} ms   p95 {1000 * cuts[18]:6.2f} ms   max {1000 * max(times):6.2f} ms")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    with tempfile.TemporaryDirectory() as directory:
        broker = FakeBroker(Path(directory))
        try:
            broker.start(slots=2)
            show("fork to ready", fork_to_ready(broker, rounds // 3))
            show("warm round trip", round_trip(broker, rounds * 3))
            show("refill gap", refill_gap(broker, rounds))
            print(f"{'no-ops a second':18s} {rate(broker, rounds * 10):6.0f}")
        finally:
            broker.close()


if __name__ == "__main__":
    main()
