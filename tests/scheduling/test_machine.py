"""The scheduler under any order of events: the books balance after each, and nobody is forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mdcampaign.scheduling.device import DeviceSpec
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.request import Request
from mdcampaign.scheduling.scheduler import Place, Preempt, Scheduler

specs = st.builds(
    DeviceSpec,
    id=st.just("gpu"),
    slots=st.integers(1, 4),
    cores_per_slot=st.integers(1, 2),
    memory_mb=st.sampled_from([None, 1000, 4000]),
)
policies = st.builds(
    Policy,
    aging=st.sampled_from([0.0, 0.01, 1.0]),
    place=st.sampled_from(["spread", "pack"]),
    tail=st.booleans(),
    preempt_gap=st.sampled_from([1.0, 2.5, None]),
    min_runtime_s=st.sampled_from([0.0, 3.0]),
    max_preemptions=st.integers(1, 2),
)
picks = st.integers(0, 1000)
priorities = st.integers(-2, 5).map(float)
expected = st.none() | st.integers(0, 50).map(float)
needs = st.fixed_dictionaries(
    {
        "priority": priorities,
        "slots": st.sampled_from([1, 1, 1, 2, 4]),
        "exclusive": st.sampled_from([False, False, True]),
        "memory_mb": st.sampled_from([None, 300, 900, 1000, 3999]),
        "cores": st.sampled_from([None, None, 1, 5]),
        "expected_s": expected,
        "preemptible": st.sampled_from([True, True, True, False]),
    }
)
some_jobs = st.lists(needs, min_size=3, max_size=6)


class SchedulerMachine(RuleBasedStateMachine):
    """Plays the broker: sends events in any order, carries decisions out, and looks at the books after each."""

    @initialize(policy=policies, devices=st.lists(specs, min_size=1, max_size=3), lazy=st.booleans(), jobs=some_jobs)
    def begin(self, policy: Policy, devices: list[DeviceSpec], lazy: bool, jobs: list[dict[str, Any]]) -> None:
        self.scheduler = Scheduler(policy)
        self.lazy = lazy  # a decision now and then, or after every event, as the broker does
        self.now = 0.0
        self.ids = 0
        self.nodes = 0
        self.reported: set[int] = set()
        self.told: dict[int, int] = {}
        self.yields: dict[int, int] = {}
        self.node_registers(devices)
        self.submit(jobs, 0.0)

    def _one_of(self, pick: int, ids: Iterable[Any]) -> Any:
        """Rules are always enabled and choose by number: hypothesis then finds far more happening."""
        ids = sorted(ids)
        return ids[pick % len(ids)] if ids else None

    @rule(seconds=st.integers(1, 10), remaining_s=expected, every=st.integers(1, 3))
    def time_passes(self, seconds: int, remaining_s: float | None, every: int) -> None:
        """Every running job, or every second or third, reports its progress."""
        self.now += seconds
        for id in list(self.scheduler.attempts)[::every]:
            self.scheduler.progress(id, remaining_s, self.now)
            self.reported.add(id)

    def node_registers(self, devices: list[DeviceSpec]) -> None:
        devices = [DeviceSpec(f"gpu{i}", d.slots, d.cores_per_slot, d.memory_mb) for i, d in enumerate(devices)]
        self.scheduler.add_node(f"node{self.nodes}", devices, self.now)
        self.nodes += 1

    @rule(devices=st.lists(specs, min_size=1, max_size=2))
    def shape_declared(self, devices: list[DeviceSpec]) -> None:
        self.scheduler.declare(devices)

    @rule(needs=some_jobs, age_s=st.sampled_from([0.0, 0.0, 20.0]))
    def submit(self, needs: list[dict[str, Any]], age_s: float) -> None:
        for need in needs:
            self.ids += 1
            self.scheduler.submit(Request(self.ids, self.now - age_s, **need), self.now)

    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        if id := self._one_of(pick, self.scheduler.attempts):
            self.scheduler.ended(id, self.now)
            self._left(id)
            self.told.pop(id, None)

    @rule(pick=picks)
    def interrupted(self, pick: int) -> None:
        if id := self._one_of(pick, self.yields or self.scheduler.attempts):
            self._requeue(id)

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if id := self._one_of(pick, self.scheduler.waiting_ids()):
            assert self.scheduler.cancel_waiting(id, self.now)
            assert not self.scheduler.cancel_waiting(id, self.now)
            self.told.pop(id, None)

    @rule(pick=picks, priority=priorities)
    def rerank(self, pick: int, priority: float) -> None:
        if id := self._one_of(pick, [*self.scheduler.waiting_ids(), *self.scheduler.attempts]):
            assert self.scheduler.rerank(id, priority, self.now)
            assert self.scheduler.request(id).priority == priority

    @rule(pick=picks, another=st.lists(specs, min_size=1, max_size=2))
    def drain(self, pick: int, another: list[DeviceSpec]) -> None:
        if node := self._one_of(pick, self._open_nodes()):
            self.scheduler.drain_node(node, self.now)
        else:
            self.node_registers(another)

    @rule(pick=picks, at_once=st.booleans(), another=st.lists(specs, min_size=1, max_size=2))
    def lose_node(self, pick: int, at_once: bool, another: list[DeviceSpec]) -> None:
        if node := self._one_of(pick, self.scheduler.fleet.nodes):
            lost = self.scheduler.remove_node(node, self.now)
            self.scheduler.check()
            for id in lost if at_once else lost[::2]:  # the others run nowhere for a while
                self._requeue(id)
        else:
            self.node_registers(another)

    def _open_nodes(self) -> list[str]:
        return sorted({device.node for device in self.scheduler.fleet.devices() if device.open})

    def _requeue(self, id: int) -> None:
        self.scheduler.requeue(id, self.now)
        if id in self.yields:
            self.told[id] = self.told.get(id, 0) + 1
        self._left(id)

    def _left(self, id: int) -> None:
        self.reported.discard(id)
        self.yields.pop(id, None)

    @rule()
    def decide(self) -> None:
        before = {id: a.started for id, a in self.scheduler.attempts.items()}
        drained = {d for d in self.scheduler.fleet.devices() if not d.open}
        for decision in self.scheduler.schedule(self.now):
            if isinstance(decision, Place):
                attempt = self.scheduler.attempts[decision.request.id]
                assert attempt.index == decision.index
                assert attempt.device not in drained
            else:
                self._may_preempt(decision, before)
        assert self.scheduler.schedule(self.now) == []
        self._nobody_was_overlooked()

    def _may_preempt(self, decision: Preempt, started: dict[int, float]) -> None:
        policy = self.scheduler.policy
        victim, asker = self.scheduler.attempts[decision.victim].request, self.scheduler.request(decision.for_request)
        assert policy.preempt_gap is not None
        assert policy.key(asker) - policy.key(victim) >= policy.preempt_gap > 0
        assert victim.preemptible and victim.id in self.reported
        assert self.now - started[victim.id] >= policy.min_runtime_s
        assert self.told.get(victim.id, 0) < policy.max_preemptions
        assert victim.id not in self.yields
        self.yields[victim.id] = asker.id

    def _nobody_was_overlooked(self) -> None:
        """No waiting job would fit in room that nobody holds, nor in the share that is held for it."""
        scheduler = self.scheduler
        for hold in [*scheduler.asked.values(), *([scheduler.hold] if scheduler.hold else [])]:
            assert not hold.device.fits(scheduler.queue[hold.owner], hold.rank)
        for id in scheduler.waiting_ids():
            kinds, _ = scheduler.fleet.fitting(scheduler.queue[id])
            assert scheduler.fleet.find(scheduler.queue[id], kinds, "spread") is None, scheduler.explain(id, self.now)

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()
            if not self.lazy:
                self.decide()
                self.scheduler.check()
            for id in (*self.scheduler.waiting_ids()[:2], *list(self.scheduler.attempts)[:2], 0):
                assert "job" in self.scheduler.explain(id, self.now)

    def teardown(self) -> None:
        """Liveness: as jobs end, all start that have a device, whatever was held and asked before."""
        if not hasattr(self, "scheduler"):
            return
        self._run_dry()
        fleet, queue = self.scheduler.fleet, self.scheduler.queue
        assert not [id for id in queue.ids() if fleet.open_kinds(fleet.fitting(queue[id])[0])]
        self.scheduler.add_node("last", [DeviceSpec("gpu", 5, 2)], self.now)
        self._run_dry()
        assert (self.scheduler.waiting, self.scheduler.running) == (0, 0)

    def _run_dry(self) -> None:
        """End one running job after the other, in the order of their ids."""
        self.decide()
        while self.scheduler.running:
            id = min(self.scheduler.attempts)
            self.scheduler.ended(id, self.now)
            self._left(id)
            self.scheduler.check()
            self.decide()


SchedulerMachine.TestCase.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerInAnyOrder = SchedulerMachine.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_a_long_random_walk(seed: int) -> None:
    """The same player, driven far: full fleets, many jobs that rank alike, yields in every state."""
    dice = random.Random(seed)
    machine = SchedulerMachine()

    def devices() -> list[DeviceSpec]:
        memory = [None, 1000, 4000]
        return [
            DeviceSpec("gpu", dice.randint(1, 4), dice.randint(1, 2), dice.choice(memory))
            for _ in range(dice.randint(1, 3))
        ]

    def jobs(n: int) -> list[dict[str, Any]]:
        return [
            {
                "priority": float(dice.randint(-2, 5)),
                "slots": dice.choice([1, 1, 1, 2, 4]),
                "exclusive": dice.random() < 0.15,
                "memory_mb": dice.choice([None, None, 300, 900, 1000, 3999]),
                "cores": dice.choice([None, None, None, 1, 5]),
                "expected_s": dice.choice([None, 0.0, 7.0, 20.0, 50.0]),
                "preemptible": dice.random() < 0.9,
            }
            for _ in range(n)
        ]

    policy = Policy(
        aging=dice.choice([0.0, 0.01, 1.0]),
        place=dice.choice(["spread", "pack"]),
        tail=dice.random() < 0.7,
        preempt_gap=dice.choice([None, 0.5, 1.0, 2.5]),
        min_runtime_s=dice.choice([0.0, 3.0]),
        max_preemptions=dice.randint(1, 3),
    )
    machine.begin(policy=policy, devices=devices(), lazy=dice.random() < 0.3, jobs=jobs(6))
    moves: list[tuple[float, Callable[[], object]]] = [
        (6, lambda: machine.submit(needs=jobs(dice.randint(1, 3)), age_s=dice.choice([0.0, 20.0]))),
        (7, lambda: machine.finish(pick=dice.randrange(1000))),
        (12, lambda: machine.time_passes(seconds=dice.randint(1, 5), remaining_s=dice.choice([None, 9.0]), every=1)),
        (4, lambda: machine.interrupted(pick=dice.randrange(1000))),
        (2, lambda: machine.cancel(pick=dice.randrange(1000))),
        (3, lambda: machine.rerank(pick=dice.randrange(1000), priority=float(dice.randint(-2, 5)))),
        (0.4, lambda: machine.drain(pick=dice.randrange(1000), another=devices())),
        (0.4, lambda: machine.lose_node(pick=dice.randrange(1000), at_once=dice.random() < 0.5, another=devices())),
        (0.2, lambda: machine.shape_declared(devices=devices())),
        (3, lambda: machine.decide()),
    ]
    weights = [weight for weight, _ in moves]
    for _ in range(120):
        dice.choices(moves, weights)[0][1]()
        machine.books_balance()
    machine.teardown()
