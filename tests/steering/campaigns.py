"""Small campaigns, each run by `python -m tests.steering.campaigns NAME [JSON]` in a process of its own.

The last line of stdout is a JSON object: the exit status, the outcomes, and what the Thinker saw.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from colmena.models import Result
from colmena.models.methods import PythonGeneratorMethod
from colmena.thinker import agent, event_responder, result_processor
from parsl.config import Config
from parsl.providers import LocalProvider

from mdcampaign.campaign import Campaign
from mdcampaign.engines.inputs import Synthetic
from mdcampaign.errors import BadInput, NameTaken
from mdcampaign.executor import SlotExecutor
from mdcampaign.jobs import MDJob, Outcome, Progress
from mdcampaign.steering.handlers import ReportInfo, on_progress, on_result
from mdcampaign.steering.queues import CampaignQueues, PipeQueues, RedisQueues
from mdcampaign.steering.run import run_campaign
from mdcampaign.steering.thinker import CampaignThinker
from tests.steering import methods
from tests.steering.standin import StandIn, toy_md

GUARD_S = 40.0


def job(name: str, steps: int = 20, step_s: float = 0.002, fail: Any = None, **fields: Any) -> MDJob:
    """A job that reports after each step."""
    engine = Synthetic(step_s=step_s, fail=fail)
    return MDJob(name=name, engine=engine, steps=steps, iteration_steps=1, **fields)


class Scenario(CampaignThinker):
    """Keeps what it saw, for the test to judge."""

    def __init__(self, queues: CampaignQueues) -> None:
        super().__init__(queues)
        self.seen: dict[str, Any] = {}


class Plain(Scenario):
    """Submits, sees all progress and all results, and ends by itself."""

    @agent(startup=True)
    def begin(self) -> None:
        self.seen |= {"steps": {}, "results": [], "third": [], "others": []}
        names = self.submit([job(f"j{n}", priority=n) for n in range(4)])
        self.seen["names"] = [*names, self.submit(job("x", group="others", fail="unstable"))]

    @on_progress(group="default")
    def look(self, name: str, progress: Progress, info: ReportInfo) -> None:
        assert info.attempt == 1
        self.seen["steps"].setdefault(name, []).append(progress.step)

    @on_progress(every=3, group="default")
    def look_seldom(self, name: str, progress: Progress, info: ReportInfo) -> None:
        if name == "default/j0":
            self.seen["third"].append(progress.step)

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen["results"].append([name, outcome.kind, outcome.step, result.success])
        if name == "default/j0":
            self.submit(job("late", steps=2))

    @on_result(group="others")
    def harvest_others(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen["others"].append([name, outcome.failure, outcome.message])


class Verbs(Scenario):
    """Every verb, on a job that runs, waits, has ended or never was."""

    @agent(startup=True)
    def begin(self) -> None:
        long = [job(name, steps=100_000) for name in ("stop-me", "cancel-me", "waits", "drop-me", "extend-me")]
        self.submit(long)
        acks: dict[str, Any] = {"at once": self.stop("waits"), "early": self.extend(long[4], 5)}
        acks["dropped"] = self.cancel("drop-me")
        acks["rerank"] = self.rerank("default/extend-me", 9)
        acks["explain"] = self.explain("extend-me")
        acks["stop"], acks["again"] = self.stop(long[0]), self.stop("stop-me")
        acks["cancel"] = self.cancel("cancel-me")
        acks["unknown"] = self.stop("nobody")
        self.seen["acks"] = {what: [ack.result(GUARD_S).ok, ack.result(0).state] for what, ack in acks.items()}

    @on_result
    def once_more(self, name: str, outcome: Outcome, result: Result) -> None:
        if name == "default/stop-me":
            ack = self.stop(name).result(GUARD_S)  # a handler may wait for an acknowledgement
            self.seen["late"] = [ack.ok, ack.state]


class Burst(Scenario):
    """1,000 verbs from six threads while large progress streams the other way and nobody reads an answer."""

    @agent(startup=True)
    def begin(self) -> None:
        self.submit([job(f"j{n}", steps=1_000_000, step_s=0.0005) for n in range(2)])
        acks: list[Any] = []

        def send(thread: int) -> None:
            for n in range(1000 // 6 + (thread < 1000 % 6)):
                acks.append(self.rerank(f"j{n % 2}", n))

        began = time.monotonic()
        threads = [threading.Thread(target=send, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD_S)
        sent = time.monotonic()
        self.seen["ok"] = sum(ack.result(GUARD_S).ok for ack in acks)
        self.seen |= {"verbs": len(acks), "sent_s": sent - began, "answered_s": time.monotonic() - began}
        latencies = []
        for _ in range(200):
            asked = time.perf_counter()
            self.explain("j0").result(GUARD_S)
            latencies.append(time.perf_counter() - asked)
        self.seen["verb_p50_ms"], self.seen["verb_p95_ms"] = percentiles(latencies)
        for n in range(2):
            self.stop(f"j{n}").result(GUARD_S)

    @on_progress
    def late_is(self, name: str, progress: Progress, info: ReportInfo) -> None:
        self.seen.setdefault("delays", []).append(time.time() - info.sent_s)


class Order(Scenario):
    """Verbs keep their place among the submissions, and among themselves."""

    @agent(startup=True)
    def begin(self) -> None:
        acks = []
        for n in range(60):
            self.submit(job(f"j{n}", steps=100_000))
            acks.append(self.stop(f"j{n}"))
        answers = [ack.result(GUARD_S) for ack in acks]
        self.seen["states"] = Counter(answer.state for answer in answers)
        self.seen["places"] = [int(answer.message) for answer in answers]


class SlowHandler(Scenario):
    """A handler far slower than the simulation."""

    @agent(startup=True)
    def begin(self) -> None:
        self.seen |= {"steps": [], "counted": 0}
        self.began = time.monotonic()
        self.submit(job("fast", steps=300, step_s=0.001))

    @on_progress
    def look(self, name: str, progress: Progress, info: ReportInfo) -> None:
        time.sleep(0.2)
        self.seen["steps"].append(progress.step)
        self.seen["counted"] += info.skipped + 1

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen["handled_when_done"] = len(self.seen["steps"])


class Raises(Scenario):
    """A handler that fails at the third result, while two more jobs run."""

    @agent(startup=True)
    def begin(self) -> None:
        self.submit([job(f"short{n}", steps=2, priority=5) for n in range(3)])
        self.submit([job(f"long{n}", steps=1_000_000) for n in range(3)])

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        if sum(o.kind == "done" for o in self.outcomes.values()) == 3:
            while not any(name.startswith("default/long") for name in self.reports):
                time.sleep(0.01)
            raise RuntimeError("I cannot go on")


class ServerKilled(Scenario):
    """The task server is killed while jobs run and an agent sleeps."""

    wanted = threading.Event()

    @agent(startup=True)
    def begin(self) -> None:
        self.submit(job("long", steps=1_000_000))
        while not self.reports:
            time.sleep(0.01)
        (server,) = multiprocessing.active_children()
        os.kill(server.pid or 0, signal.SIGKILL)
        self.killed_at = time.monotonic()

    @agent(startup=True)
    def sleep(self) -> None:
        self.wanted.wait()
        self.seen["done_when_woken"] = self.done.is_set()

    @result_processor(topic="default")
    def take(self, result: Result) -> None:
        raise AssertionError("nothing comes here")

    def tear_down_agent(self) -> None:
        self.seen["noticed_s"] = time.monotonic() - self.killed_at if hasattr(self, "killed_at") else None


class SetupFails(Scenario):
    """The task server cannot start its executor."""

    @agent(startup=True)
    def begin(self) -> None:
        self.seen["ack"] = self.stop(self.submit(job("never"))).result(GUARD_S).message


class Sleepers(Scenario):
    """Agents that wait for events that never come; two of them share a barrier."""

    wanted = threading.Event()

    def __init__(self, queues: CampaignQueues) -> None:
        super().__init__(queues)
        self.never = threading.Event()
        self.seen["results"] = []

    @agent(startup=True)
    def begin(self) -> None:
        self.submit([job(f"j{n}", steps=3) for n in range(5)])

    @agent
    def sleeper(self) -> None:
        self.never.wait()
        self.seen["done_when_woken"] = self.done.is_set()

    @agent
    def wakes_one(self) -> None:
        self.done.wait()
        self.ended_at = time.monotonic()

    @event_responder(event_name="wanted")
    def respond(self) -> None:
        raise AssertionError("nobody wanted this")

    @event_responder(event_name="wanted")
    def respond_too(self) -> None:
        raise AssertionError("nobody wanted this")

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen["results"].append(name)


class Interrupted(Scenario):
    """Runs until somebody interrupts it."""

    @agent(startup=True)
    def begin(self) -> None:
        self.submit([job(f"long{n}", steps=1_000_000) for n in range(3)])
        while len(self.reports) < 2:
            time.sleep(0.01)
        print("running", flush=True)

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen.setdefault("results", []).append(name)


class Mixed(Scenario):
    """MDJobs and plain methods side by side, bad input, and a job that goes on under its name."""

    def __init__(self, queues: CampaignQueues) -> None:
        super().__init__(queues)
        self.seen |= {"values": [], "refused": {}, "targets": []}

    @agent(startup=True)
    def begin(self) -> None:
        self.submit(job("a", steps=50))
        for n in range(5):
            self.queues.send_inputs(n, method="square", topic="default")
        bad: dict[str, Any] = {
            "no job": lambda: self.submit("a"),  # type: ignore[call-overload]
            "again": lambda: self.submit(job("a")),
            "other": lambda: self.submit(job("a", seed=1)),
            "twice in a list": lambda: self.submit([job("b"), job("b")]),
            "last of a list": lambda: self.submit([job("c"), job("a")]),
            "target_step": lambda: self.extend("a", 0),
            "priority": lambda: self.rerank("a", float("nan")),
        }
        for what, act in bad.items():
            try:
                act()
            except (BadInput, NameTaken) as exc:
                self.seen["refused"][what] = f"{type(exc).__name__}: {exc}"

    @result_processor(topic="default")
    def take(self, result: Result) -> None:
        self.seen["values"].append(result.value)

    @on_result
    def harvest(self, name: str, outcome: Outcome, result: Result) -> None:
        self.seen["targets"].append(outcome.target_step)
        if len(self.seen["targets"]) < 3:
            self.submit(job("a", steps=2 * outcome.target_step))


class OnSlots(Scenario):
    """Jobs, verbs, a plain method and a generator that streams, on the real executor."""

    def __init__(self, queues: CampaignQueues) -> None:
        super().__init__(queues)
        self.seen |= {"values": [], "streamed": []}

    @agent(startup=True)
    def begin(self) -> None:
        self.submit([job("extended", steps=10, step_s=0.05, priority=2), job("stopped", steps=100_000, priority=1)])
        self.submit([job("waits", steps=100_000), job("drop-me", steps=100_000), job("bad", fail="unstable")])
        acks = {"stop early": self.stop("waits"), "cancel early": self.cancel("drop-me")}
        self.queues.send_inputs(7, method="square")
        self.queues.send_inputs("no", method="complain")
        self.queues.send_inputs(4, method="stream")
        while not {"default/extended", "default/stopped"} <= set(self.reports):
            time.sleep(0.01)
        acks |= {"extend": self.extend("extended", 40), "rerank": self.rerank("stopped", 3)}
        acks["stop"] = self.stop("stopped")
        self.seen["acks"] = {what: [ack.result(GUARD_S).ok, ack.result(0).state] for what, ack in acks.items()}

    @result_processor(topic="default")
    def take(self, result: Result) -> None:
        if result.method == "stream" and result.complete is False:
            self.seen["streamed"].append([result.value, result.args[0]])
        else:
            self.seen["values"].append([result.method, result.value, result.success])


def percentiles(values: list[float]) -> tuple[float, float]:
    """Return the 50th and 95th percentile in milliseconds, of seconds."""
    values = sorted(values)
    return 1e3 * values[len(values) // 2], 1e3 * values[int(len(values) * 0.95)]


def main(name: str, options: dict[str, Any]) -> None:
    """Run a scenario; `redis_port` chooses RedisQueues, `slots` the real executor, the rest goes to the stand-in."""
    port, real, directory = options.pop("redis_port", None), options.pop("real", False), Path(options.pop("dir"))
    queues = RedisQueues(port=port) if port else PipeQueues()
    served: list[Any] = [methods.square, methods.complain]
    if port:
        served.append(PythonGeneratorMethod(methods.count, name="stream", streaming_queue=queues))
    server: dict[str, Any] = {"methods": served, "drain_s": options.pop("drain_s", 20.0)}
    executor: Any
    if real:
        provider = LocalProvider(init_blocks=1, max_blocks=1)
        Campaign(directory).acquire()
        executor = SlotExecutor(
            provider=provider, slots_per_device=2, address="127.0.0.1", encrypted=False, campaign_dir=str(directory)
        )
    else:
        executor, server["run_job"] = StandIn(**options), toy_md
    config = Config(executors=[executor], run_dir=str(directory / "runinfo"), strategy="none")
    thinker, status = run_campaign(globals()[name], {}, queues, config, directory, **server)
    seen = thinker.seen
    if delays := seen.pop("delays", None):
        seen["progress_p50_ms"], seen["progress_p95_ms"] = percentiles(delays)
    if hasattr(thinker, "ended_at"):
        seen["ended_s"] = time.monotonic() - thinker.ended_at
    outcomes = {name: [outcome.kind, outcome.step] for name, outcome in thinker.outcomes.items()}
    failures = [name for name, _ in thinker.failures]
    print(json.dumps({"status": status, "outcomes": outcomes, "failures": failures, "stuck": thinker.stuck} | seen))
    sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
