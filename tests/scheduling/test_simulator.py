"""The simulator against arithmetic that can be done by hand, and against the bounds that no schedule beats."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from mdcampaign.errors import BadWorkload
from mdcampaign.scheduling.device import DeviceSpec
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.simulator import ReplayJob, compare, continuous, fifo, fleet_of, replay, static
from mdcampaign.scheduling.workload import Job, drawn, lower_bound_s, tutorial


def test_the_teaching_example() -> None:
    """The published estimate for static batches of it, 15.67 s, is below what two slots can do at all."""
    figures = compare(tutorial(random.Random(42)), fleet_of(1, 2))
    assert figures["lower_bound_s"] == pytest.approx(25.77, abs=0.01)
    spans = {name: policy["makespan_s"] for name, policy in figures["policies"].items()}
    assert spans["fifo"] == pytest.approx(28.68, abs=0.01)
    assert spans["static"] == pytest.approx(33.43, abs=0.01)
    assert figures["lower_bound_s"] <= spans["continuous"] < spans["fifo"] < spans["static"]
    unknown = compare(tutorial(random.Random(42)), fleet_of(1, 2), known=False)
    assert unknown["policies"]["continuous"]["makespan_s"] == spans["fifo"]


def test_jobs_of_nearly_equal_length_come_within_a_tenth_whatever_the_policy() -> None:
    for seed in range(20):
        figures = compare(drawn(random.Random(seed), 8, "uniform:5,6"), fleet_of(1, 2))
        spans = [policy["makespan_s"] for policy in figures["policies"].values()]
        assert max(spans) <= 1.1 * min(spans)


@pytest.mark.parametrize("cv", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_the_tail_rule_ends_a_campaign_within_two_percent_of_the_bound(cv: int, seed: int) -> None:
    """Z1."""
    jobs, fleet = drawn(random.Random(seed), 1000, f"lognormal:600,{cv}"), fleet_of(8, 8)
    bound_s = lower_bound_s(jobs, fleet)
    assert bound_s <= continuous(jobs, fleet).makespan_s <= 1.02 * bound_s
    assert continuous(jobs, fleet, Policy(tail=False)).makespan_s > 1.02 * bound_s


def test_static_batches_lose_clearly_where_lengths_differ() -> None:
    figures = compare(drawn(random.Random(7), 200, "lognormal:10,1"), fleet_of(2, 4))["policies"]
    assert figures["static"]["makespan_s"] > 1.5 * figures["continuous"]["makespan_s"]
    assert figures["static"]["idle_fraction"] > 0.3 > figures["continuous"]["idle_fraction"]


def test_figures_by_hand() -> None:
    jobs = [Job("a", 4.0), Job("b", 1.0), Job("c", 2.0, priority=1.0), Job("d", 3.0)]
    batches = static(jobs, fleet_of(1, 2), aging=0.5)
    assert [(stay.job.name, stay.start_s) for stay in batches.stays] == [("a", 0), ("b", 0), ("c", 4), ("d", 4)]
    assert batches.makespan_s == 7.0
    assert batches.idle_fraction == pytest.approx(1 - 10 / 14)
    assert batches.mean_wait_s == 2.0
    assert batches.top_waits(1) == [{"job": "c", "priority": 1.0, "wait_s": 4.0, "effective_priority": 3.0}]
    assert batches.waits_by_priority()["0"] == {"jobs": 3, "mean_s": pytest.approx(4 / 3), "max_s": 4.0}
    refill = fifo(jobs, fleet_of(1, 2))
    assert [(stay.job.name, stay.start_s) for stay in refill.stays] == [("a", 0), ("b", 0), ("c", 1), ("d", 3)]
    ranked = continuous(jobs, fleet_of(1, 2), Policy(tail=False))
    assert [stay.job.name for stay in ranked.stays] == ["c", "a", "b", "d"]


def test_arrivals_are_waited_for_and_batches_take_who_is_there() -> None:
    jobs = [Job("late", 1.0, submitted_s=10.0), Job("early", 2.0), Job("between", 1.0, submitted_s=1.0)]
    batches = static(jobs, fleet_of(1, 2))
    assert [(stay.job.name, stay.start_s) for stay in batches.stays] == [("early", 0), ("between", 2), ("late", 10)]
    refill = fifo(jobs, fleet_of(1, 2))
    assert [(stay.job.name, stay.start_s) for stay in refill.stays] == [("early", 0), ("between", 1), ("late", 10)]
    assert refill.makespan_s == 11.0


def test_wide_and_exclusive_jobs_are_simulated_too() -> None:
    jobs = [
        Job("small", 1.0),
        Job("alone", 2.0, exclusive=True),
        Job("pair", 3.0, slots=2),
        Job("heavy", 1.0, memory_mb=9),
    ]
    fleet = [DeviceSpec("a", 2, 1, 10), DeviceSpec("b", 2, 1, 10)]
    assert lower_bound_s(jobs, fleet) == 3.0
    for timeline in (continuous(jobs, fleet), fifo(jobs, fleet), static(jobs, fleet)):
        assert len(timeline.stays) == 4
        taken = [(stay.device, slot, stay.start_s, stay.end_s) for stay in timeline.stays for slot in stay.index]
        for device, slot, start_s, end_s in taken:
            others = [t for t in taken if t[:2] == (device, slot) and t[2] < end_s and start_s < t[3]]
            assert len(others) == 1


def test_no_policy_beats_the_bound_and_nobody_runs_twice_at_once() -> None:
    for seed in range(30):
        dice = random.Random(seed)
        jobs = [
            Job(f"{n}", dice.uniform(1, 9), float(dice.randint(0, 3)), dice.choice([0.0, 5.0]), dice.choice([1, 1, 2]))
            for n in range(25)
        ]
        fleet = fleet_of(2, 2)
        for timeline in (continuous(jobs, fleet), fifo(jobs, fleet), static(jobs, fleet)):
            assert sorted(stay.job.name for stay in timeline.stays) == sorted(job.name for job in jobs)
            assert timeline.makespan_s >= lower_bound_s(jobs, fleet) - 1e-9
            assert all(stay.wait_s >= 0 for stay in timeline.stays)


def test_the_same_seed_gives_the_same_bytes() -> None:
    once, again = (
        json.dumps(compare(drawn(random.Random(3), 300, "lognormal:10,2"), fleet_of(3, 4))) for _ in range(2)
    )
    assert once == again


def test_lognormal_lengths_have_the_mean_and_spread_asked_for() -> None:
    lengths = [job.duration_s for job in drawn(random.Random(1), 20_000, "lognormal:10,1")]
    assert statistics.mean(lengths) == pytest.approx(10, rel=0.05)
    assert statistics.pstdev(lengths) == pytest.approx(10, rel=0.1)


def test_replay_of_measured_lengths() -> None:
    jobs = [ReplayJob("a", 0.0, 4.0), ReplayJob("b", 0.0, 1.0, 5.0), ReplayJob("c", 0.0, 2.0), ReplayJob("d", 0.5, 3.0)]
    walls = replay(jobs, slots=2)
    assert (walls.fifo_wall_s, walls.static_wall_s, walls.lower_bound_s) == (6.0, 7.0, 5.0)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [([], "jobs"), ([ReplayJob("a", 0.0, 0.0)], "duration_s"), ([ReplayJob("a", 0.0, 1.0, 0.0, 3)], "needs 3 slots")],
)
def test_a_workload_that_cannot_run_is_refused(jobs: list[ReplayJob], message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        replay(jobs, slots=2)


def test_jobs_that_never_report_are_never_made_to_yield() -> None:
    jobs = [Job("bulk", 9.0), Job("urgent", 1.0, priority=9.0, submitted_s=1.0)]
    timeline = continuous(jobs, fleet_of(1, 1), Policy(preempt_gap=1.0))
    assert [stay.start_s for stay in timeline.stays] == [0.0, 9.0]
