"""Each rule of the scheduler on a small fleet."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mdcampaign.errors import BadInput, BadJob, InvariantBroken
from mdcampaign.scheduling.device import DeviceSpec
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.request import Request
from mdcampaign.scheduling.scheduler import Place, Preempt, Scheduler


class Fleet:
    """A scheduler with nodes of GPUs, and its decisions in short form."""

    def __init__(self, *slots: int, memory_mb: int | None = None, cores_per_slot: int = 1, **policy: Any) -> None:
        self.scheduler = Scheduler(Policy(**policy))
        for n, count in enumerate(slots):
            self.scheduler.add_node(f"n{n}", [DeviceSpec("g", count, cores_per_slot, memory_mb)], 0.0)

    def submit(self, *ids: int, at: float = 0.0, **needs: Any) -> None:
        for id in ids:
            self.scheduler.submit(Request(id, at, **needs), at)

    def decide(self, now: float = 0.0) -> list[tuple[Any, ...]]:
        """Return (job, node, slots) for a placement and (victim, "yields to", job) for a preemption."""
        decisions = self.scheduler.schedule(now)
        self.scheduler.check()
        return [
            (d.request.id, d.node, d.index) if isinstance(d, Place) else (d.victim, "yields to", d.for_request)
            for d in decisions
        ]

    def started(self, now: float = 0.0) -> list[int]:
        return [decision[0] for decision in self.decide(now) if decision[1] != "yields to"]

    def end(self, *ids: int, now: float = 0.0) -> list[int]:
        """End jobs; return those that start instead."""
        for id in ids:
            self.scheduler.ended(id, now)
        return self.started(now)

    def report(self, *ids: int, now: float = 0.0, remaining_s: float | None = None) -> None:
        for id in ids:
            self.scheduler.progress(id, remaining_s, now)


# Order


def test_larger_priority_first_and_first_come_first_served_among_equals() -> None:
    fleet = Fleet(1, aging=0.0)
    fleet.submit(1, 2)
    fleet.submit(3, priority=5.0)
    fleet.submit(4, priority=5.0, at=-1.0)
    order = fleet.started()
    while fleet.scheduler.running:
        order += fleet.end(order[-1])
    assert order == [4, 3, 1, 2]


def test_age_outranks_priority_at_the_rate_of_the_policy() -> None:
    fleet = Fleet(1, aging=0.01)
    fleet.submit(1, at=0.0)
    fleet.submit(2, at=101.0, priority=1.0)
    assert fleet.started(101.0) == [1]  # 1.01 levels of age against one level of priority
    fleet.submit(3, at=150.0, priority=1.0)
    fleet.submit(4, at=60.0)
    assert fleet.end(1, now=150.0) == [2]
    assert fleet.end(2, now=150.0) == [3]  # job 4 has gained 0.9 of a level
    assert fleet.scheduler.effective_priority(4, 150.0) == pytest.approx(0.9)


def test_an_urgent_job_that_arrives_late_takes_the_next_freed_slot() -> None:
    """S2."""
    fleet = Fleet(2)
    fleet.submit(*range(200))
    assert fleet.started() == [0, 1]
    fleet.submit(999, priority=10.0, at=5.0)
    assert fleet.end(1, now=6.0) == [999]


def test_the_order_of_heads_of_different_shapes_is_that_of_their_ranks() -> None:
    fleet = Fleet(4, memory_mb=8000, aging=0.0, tail=False)
    for id in range(20):
        fleet.submit(id, memory_mb=100 * (1 + id % 3), priority=float(id % 2))
    assert fleet.started() == [1, 3, 5, 7]
    assert fleet.end(3, 7) == [9, 11]


def test_rerank_moves_a_waiting_job_and_keeps_its_age() -> None:
    fleet = Fleet(1)
    fleet.submit(1, 2, 3)
    fleet.started()
    assert fleet.scheduler.rerank(3, 1.0, 0.0)
    assert fleet.scheduler.waiting_ids() == [3, 2]
    assert fleet.end(1) == [3]
    assert fleet.scheduler.rerank(3, 7.0, 0.0)  # running
    assert fleet.scheduler.request(3).priority == 7.0
    assert not fleet.scheduler.rerank(1, 7.0, 0.0)  # gone


def test_cancel_of_a_waiting_job_only() -> None:
    fleet = Fleet(1)
    fleet.submit(1, 2)
    fleet.started()
    assert not fleet.scheduler.cancel_waiting(1, 0.0)
    assert fleet.scheduler.cancel_waiting(2, 0.0)
    assert (fleet.end(1), fleet.scheduler.state(2)) == ([], None)


# Place


@pytest.mark.parametrize(("place", "nodes"), [("spread", ["n0", "n1", "n0", "n1"]), ("pack", ["n0", "n0", "n0", "n1"])])
def test_spread_and_pack(place: str, nodes: list[str]) -> None:
    fleet = Fleet(3, 3, place=place)
    fleet.submit(1, 2, 3, 4)
    assert [node for _, node, _ in fleet.decide()] == nodes


def test_pack_and_spread_compare_devices_of_different_kinds_by_their_free_share() -> None:
    for place, second in (("pack", "big"), ("spread", "small")):
        fleet = Fleet(place=place)
        fleet.scheduler.add_node("big", [DeviceSpec("g", 4)], 0.0)
        fleet.submit(1)
        fleet.started()
        fleet.scheduler.add_node("small", [DeviceSpec("g", 2)], 0.0)
        fleet.submit(2)
        assert fleet.decide()[0][1] == second


def test_a_slot_is_refilled_with_the_same_index() -> None:
    fleet = Fleet(3)
    fleet.submit(1, 2, 3, 4)
    assert [index for _, _, index in fleet.decide()] == [(0,), (1,), (2,)]
    fleet.scheduler.ended(2, 0.0)
    assert fleet.decide() == [(4, "n0", (1,))]


def test_memory_is_a_budget_of_the_device_and_unknown_counts_as_nothing() -> None:
    fleet = Fleet(4, memory_mb=1000)
    fleet.submit(1, 2, 3, memory_mb=500)
    fleet.submit(4)
    assert fleet.started() == [1, 2, 4]
    assert fleet.end(1) == [3]


def test_the_exact_memory_counts_not_its_bucket() -> None:
    fleet = Fleet(2, memory_mb=7900)
    fleet.submit(1, memory_mb=7900)
    assert fleet.started() == [1]


def test_cores_beyond_the_share_of_a_slot_take_more_slots() -> None:
    fleet = Fleet(4, cores_per_slot=2)
    fleet.submit(1, cores=3)
    fleet.submit(2, cores=2)
    assert fleet.decide() == [(1, "n0", (0, 1)), (2, "n0", (2,))]


def test_a_job_takes_its_slots_on_one_device() -> None:
    fleet = Fleet(2, 3)
    fleet.submit(1, slots=3)
    fleet.submit(2, slots=2)
    assert fleet.decide() == [(1, "n1", (0, 1, 2)), (2, "n0", (0, 1))]


def test_jobs_go_only_where_they_fit_in_a_mixed_fleet() -> None:
    fleet = Fleet(1, memory_mb=100)
    fleet.scheduler.add_node("big", [DeviceSpec("g", 2, 4, 4000)], 0.0)
    fleet.submit(1, memory_mb=3900)
    fleet.submit(2, cores=8)
    assert fleet.decide() == [(1, "big", (0,))]
    assert fleet.scheduler.schedule(0.0) == []
    fleet.scheduler.ended(1, 0.0)
    assert fleet.decide() == [(2, "big", (0, 1))]


# Exclusive jobs and the hold


def test_an_exclusive_job_is_alone_from_first_to_last_second() -> None:
    """M6: the slots drain, nothing new enters, and nobody comes in beside it."""
    fleet = Fleet(2, aging=0.0)
    fleet.submit(1, 2, 3, 4)
    assert fleet.started() == [1, 2]
    fleet.submit(9, exclusive=True, priority=1.0)
    assert fleet.end(1) == []  # the slot drains
    assert fleet.end(2) == [9]
    assert fleet.end(9) == [3, 4]


def test_a_stream_of_small_jobs_never_starves_a_large_one() -> None:
    """S3: with 2 slots that are never free at the same time, the hold lets the wide job in after one job's length."""
    fleet = Fleet(2)
    fleet.submit(0, 1)
    fleet.started()
    fleet.submit(500, slots=2, at=1.0)
    fleet.submit(*range(2, 50), at=2.0)
    assert fleet.end(0, now=3.0) == []
    assert fleet.end(1, now=4.0) == [500]


def test_the_hold_is_on_the_device_that_drains_soonest_and_no_other_is_kept_idle() -> None:
    fleet = Fleet(2, 2, 2, aging=0.0)
    fleet.submit(1, 2, 3, 4, 5, 6)
    where = {id: node for id, node, _ in fleet.decide()}
    first_out = [id for id in where if where[id] == "n1"]
    fleet.report(*where, remaining_s=100.0)
    fleet.report(*first_out, remaining_s=10.0)
    fleet.submit(9, exclusive=True, priority=1.0)
    fleet.submit(10, 11, 12)
    elsewhere = [id for id in where if where[id] == "n0"]
    assert fleet.end(elsewhere[0]) == [10]
    assert fleet.end(first_out[0]) == []
    assert "n1" in fleet.scheduler.explain(9, 0.0) and "in about 10 s" in fleet.scheduler.explain(9, 0.0)
    assert fleet.end(first_out[1]) == [9]


def test_jobs_of_unknown_length_count_as_long() -> None:
    fleet = Fleet(1, 1, aging=0.0)
    fleet.submit(1, 2)
    where = {id: node for id, node, _ in fleet.decide()}
    fleet.report(2, remaining_s=1e6)
    fleet.scheduler.add_node("small", [DeviceSpec("g", 1, 1, 100)], 0.0)
    fleet.submit(9, memory_mb=200, priority=1.0)
    assert fleet.started() == []
    assert fleet.scheduler.hold is not None and fleet.scheduler.hold.device.node == where[2]


def test_a_better_ranked_job_may_use_the_held_share() -> None:
    fleet = Fleet(2, aging=0.0)
    fleet.submit(1, 2)
    fleet.started()
    fleet.submit(9, exclusive=True, priority=1.0)
    assert fleet.end(1) == []
    fleet.submit(10, priority=2.0)
    assert fleet.started() == [10]
    assert fleet.end(10, 2) == [9]


def test_the_hold_passes_to_a_better_ranked_job_and_ends_with_a_cancel() -> None:
    fleet = Fleet(2, aging=0.0)
    fleet.submit(1, 2, 3)
    fleet.started()
    fleet.submit(8, exclusive=True, priority=1.0)
    assert fleet.end(1) == []
    fleet.submit(9, slots=2, priority=2.0)
    assert fleet.started() == []
    assert fleet.scheduler.hold is not None and fleet.scheduler.hold.owner == 9
    fleet.scheduler.cancel_waiting(9, 0.0)
    fleet.scheduler.cancel_waiting(8, 0.0)
    assert fleet.started() == [3]


def test_what_was_held_is_free_at_once_when_its_owner_starts_elsewhere() -> None:
    fleet = Fleet(2, memory_mb=1000, aging=0.0)
    fleet.submit(1, 2)
    fleet.started()
    fleet.submit(9, exclusive=True, priority=1.0)
    fleet.submit(3, memory_mb=500)
    assert fleet.end(1) == []
    fleet.scheduler.add_node("small", [DeviceSpec("g", 1, 1, 100)], 0.0)
    assert fleet.decide() == [(9, "small", (0,)), (3, "n0", (0,))]


def test_the_next_hold_goes_by_the_latest_reports() -> None:
    fleet = Fleet(1, 1, aging=0.0)
    fleet.submit(1, 2, expected_s=100.0)
    where = {id: node for id, node, _ in fleet.decide()}

    def held_for(id: int) -> str:
        fleet.scheduler.add_node(f"small{id}", [DeviceSpec("g", 1, 1, 100)], 0.0)
        fleet.submit(id, memory_mb=200, priority=1.0)
        assert fleet.started() == []
        assert fleet.scheduler.hold is not None
        node = fleet.scheduler.hold.device.node
        fleet.scheduler.cancel_waiting(id, 0.0)
        return node

    fleet.report(1, remaining_s=10.0)
    assert held_for(8) == where[1]
    fleet.report(2, remaining_s=5.0)
    assert held_for(9) == where[2]


def test_a_plain_hold_binds_jobs_of_lesser_rank_only() -> None:
    fleet = Fleet(2, aging=0.0)
    fleet.submit(1, 2)
    fleet.started()
    fleet.submit(9, exclusive=True, priority=1.0)
    fleet.end(1)
    device = next(fleet.scheduler.fleet.devices())
    policy = fleet.scheduler.policy
    lesser, better = Request(10, 0.0), Request(11, 0.0, priority=2.0)
    assert not device.fits(lesser, policy.rank(lesser))
    assert device.fits(better, policy.rank(better))


def test_what_can_never_start_holds_nothing() -> None:
    fleet = Fleet(2, aging=0.0)
    fleet.submit(9, slots=3, priority=9.0)
    fleet.submit(1, 2, 3)
    assert fleet.started() == [1, 2]
    assert fleet.end(1) == [3]


# The tail rule


def test_the_longest_job_starts_early_when_the_end_would_wait_for_it() -> None:
    """Z1: by rank it would come last."""
    fleet = Fleet(2)
    fleet.submit(*range(1, 7), expected_s=1.0)
    fleet.submit(9, expected_s=6.0)
    decisions = fleet.scheduler.schedule(0.0)
    assert [(d.request.id, d.rule) for d in decisions if isinstance(d, Place)] == [(9, "tail"), (1, "rank")]


def test_the_tail_rule_waits_while_enough_other_work_is_there() -> None:
    fleet = Fleet(2)
    fleet.submit(*range(1, 15), expected_s=1.0)
    fleet.submit(99, expected_s=6.0)
    assert fleet.started() == [1, 2]


def test_the_tail_rule_never_passes_over_the_head_twice() -> None:
    fleet = Fleet(4, aging=0.0)
    fleet.submit(1, 2, 3, 4, expected_s=50.0)
    assert fleet.started() == [1, 2, 3, 4]
    fleet.submit(5, 6, 7, expected_s=40.0)
    fleet.submit(9, 10, expected_s=1.0, priority=9.0)
    assert fleet.end(1) == [5]  # by the tail rule
    assert "tail rule" in fleet.scheduler.explain(9, 0.0)
    assert fleet.end(2) == [9]
    assert fleet.end(3) == [6]
    assert fleet.end(4) == [10]


def test_the_tail_rule_leaves_urgent_jobs_in_front() -> None:
    fleet = Fleet(1, aging=0.0, preempt_gap=5.0)
    fleet.submit(1, expected_s=50.0)
    fleet.submit(9, expected_s=1.0, priority=9.0)
    assert fleet.started() == [9]


def test_without_estimates_the_tail_rule_is_off_and_says_so() -> None:
    fleet = Fleet(1)
    fleet.submit(1, 2)
    fleet.submit(9, expected_s=6.0)
    assert fleet.started() == [1]
    assert fleet.scheduler.tail_problem == ""  # one of two: it goes by the mean of those that have one
    assert fleet.scheduler.backlog.work_s(1) == 12.0
    fleet.submit(3, 4)
    assert fleet.scheduler.tail_problem == "3 of 4 waiting jobs have no expected time"
    assert Fleet(1, tail=False).scheduler.tail_problem == "the policy switches it off"


def test_a_requeued_job_counts_with_the_time_it_had_left() -> None:
    fleet = Fleet(1)
    fleet.submit(1, expected_s=100.0)
    fleet.started()
    fleet.report(1, now=90.0, remaining_s=10.0)
    fleet.scheduler.requeue(1, 92.0)
    assert fleet.scheduler.request(1).expected_s == 8.0
    assert fleet.scheduler.backlog.work_s(1) == 8.0


# Preemption


def full_fleet(*slots: int, reported: bool = True, **policy: Any) -> Fleet:
    """A fleet full of bulk jobs 1, 2, ... that have reported."""
    fleet = Fleet(*slots, aging=0.0, **({"preempt_gap": 2.0} | policy))
    fleet.submit(*range(1, sum(slots) + 1))
    assert len(fleet.started()) == sum(slots)
    if reported:
        fleet.report(*range(1, sum(slots) + 1))
    return fleet


def test_an_urgent_job_makes_the_cheapest_yield_and_gets_its_slot() -> None:
    fleet = full_fleet(2)
    fleet.scheduler.rerank(1, 1.0, 0.0)
    fleet.submit(9, priority=5.0, at=1.0)
    fleet.submit(10, priority=0.5, at=1.0)
    assert fleet.decide(1.0) == [(2, "yields to", 9)]
    assert "as soon as job 2 has yielded" in fleet.scheduler.explain(9, 1.0)
    assert "told to yield to job 9" in fleet.scheduler.explain(2, 1.0)
    fleet.scheduler.requeue(2, 2.0)
    assert fleet.decide(2.0) == [(9, "n0", (1,))]
    assert fleet.end(9, now=3.0) == [10]
    assert fleet.scheduler.waiting_ids() == [2]


def test_among_equals_the_latest_started_yields() -> None:
    fleet = full_fleet(2)
    fleet.scheduler.ended(1, 10.0)
    fleet.submit(3, at=10.0)
    assert fleet.started(10.0) == [3]
    fleet.report(3, now=11.0)
    fleet.submit(9, priority=5.0, at=12.0)
    assert fleet.decide(12.0) == [(3, "yields to", 9)]


def test_equal_jobs_and_those_within_the_gap_never_preempt_each_other() -> None:
    fleet = full_fleet(2)
    fleet.submit(8, priority=0.0)
    fleet.submit(9, priority=1.9)
    assert fleet.decide() == []
    with pytest.raises(BadInput, match="preempt_gap"):
        Policy(preempt_gap=0.0)


def test_who_never_reports_or_is_not_preemptible_never_yields() -> None:
    fleet = full_fleet(2, reported=False)
    fleet.submit(9, priority=5.0)
    assert fleet.decide() == []
    assert "never reported progress" in fleet.scheduler.explain(1, 0.0)
    fleet.report(2)
    assert fleet.decide() == [(2, "yields to", 9)]

    stubborn = Fleet(1, aging=0.0, preempt_gap=2.0)
    stubborn.submit(1, preemptible=False)
    stubborn.started()
    stubborn.report(1)
    stubborn.submit(9, priority=5.0)
    assert stubborn.decide() == []
    assert "not preemptible" in stubborn.scheduler.explain(1, 0.0)


def test_nobody_yields_within_the_shortest_run_time() -> None:
    fleet = full_fleet(1, min_runtime_s=10.0)
    fleet.submit(9, priority=5.0, at=1.0)
    assert fleet.decide(9.9) == []
    assert fleet.decide(10.0) == [(1, "yields to", 9)]


def test_nobody_yields_more_often_than_the_policy_allows() -> None:
    fleet = full_fleet(1, max_preemptions=1)
    fleet.submit(9, priority=5.0)
    assert fleet.decide() == [(1, "yields to", 9)]
    fleet.scheduler.requeue(1, 1.0)
    assert fleet.started(1.0) == [9]
    assert fleet.end(9, now=2.0) == [1]
    fleet.report(1, now=3.0)
    fleet.submit(10, priority=5.0, at=3.0)
    assert fleet.decide(3.0) == []
    assert "yielded 1 times" in fleet.scheduler.explain(1, 3.0)


def test_as_many_yield_as_a_wide_job_needs_all_on_one_device() -> None:
    fleet = full_fleet(2, 3)
    fleet.submit(9, slots=2, priority=5.0)
    decisions = fleet.decide()
    victims = [victim for victim, _, _ in decisions]
    assert len(victims) == 2
    assert len({fleet.scheduler.attempts[victim].device for victim in victims}) == 1
    fleet.scheduler.requeue(victims[0], 1.0)
    assert fleet.decide(1.0) == []  # the slot waits for the second
    fleet.scheduler.requeue(victims[1], 2.0)
    assert fleet.started(2.0) == [9]


def test_an_exclusive_urgent_job_clears_the_cheapest_device() -> None:
    fleet = full_fleet(2, 2)
    kept = [id for id in (1, 2, 3, 4) if fleet.scheduler.attempts[id].device.node == "n0"]  # type: ignore[union-attr]
    fleet.scheduler.rerank(kept[0], 1.0, 0.0)
    fleet.submit(9, exclusive=True, priority=5.0)
    assert {victim for victim, _, _ in fleet.decide()} == {1, 2, 3, 4} - set(kept)


def test_a_wide_victim_spares_the_narrow_ones() -> None:
    fleet = Fleet(4, aging=0.0, preempt_gap=1.0)
    fleet.submit(1)
    fleet.submit(2, slots=3, priority=0.5)
    fleet.started()
    fleet.report(1, 2)
    fleet.submit(9, slots=3, priority=5.0)
    assert fleet.decide() == [(2, "yields to", 9)]


def test_memory_may_ask_for_more_victims_than_slots_do() -> None:
    fleet = Fleet(3, memory_mb=900, aging=0.0, preempt_gap=1.0)
    fleet.submit(1, 2, 3, memory_mb=300)
    fleet.started()
    fleet.report(1, 2, 3)
    fleet.submit(9, memory_mb=600, priority=5.0)
    assert len(fleet.decide()) == 2


def test_two_urgent_jobs_make_two_yield_and_each_gets_a_slot() -> None:
    fleet = full_fleet(3)
    fleet.submit(8, 9, priority=5.0)
    assert {victim for victim, _, _ in fleet.decide()} == {1, 2}
    fleet.scheduler.requeue(2, 1.0)
    assert fleet.started(1.0) == [8]  # the better ranked first, whoever's victim came first
    fleet.scheduler.requeue(1, 2.0)
    assert fleet.started(2.0) == [9]


def test_the_given_slot_belongs_to_the_asker_even_if_a_better_one_comes() -> None:
    fleet = full_fleet(2)
    fleet.submit(9, priority=5.0)
    assert fleet.decide() == [(1, "yields to", 9)]
    fleet.submit(10, priority=6.0, preemptible=False)
    assert fleet.decide() == [(2, "yields to", 10)]
    fleet.submit(11, priority=7.0)  # nobody left to ask
    assert fleet.decide() == []
    fleet.scheduler.requeue(1, 1.0)
    assert fleet.started(1.0) == [10]  # of those who asked here, the better one
    fleet.scheduler.requeue(2, 1.0)
    assert fleet.started(1.0) == [9]


def test_an_asker_is_served_before_a_plain_hold_of_better_rank_on_its_device() -> None:
    """Else each would wait for the other for ever."""
    fleet = full_fleet(2, reported=False)
    fleet.report(1)
    fleet.submit(9, priority=5.0, memory_mb=200)
    assert fleet.decide() == [(1, "yields to", 9)]
    fleet.submit(8, exclusive=True, priority=6.0, memory_mb=200)
    fleet.scheduler.add_node("small", [DeviceSpec("g", 1, 1, 100)], 0.0)  # room, but for neither of them
    assert fleet.decide() == []
    assert fleet.scheduler.hold is not None and fleet.scheduler.hold.owner == 8
    fleet.scheduler.requeue(1, 1.0)
    assert fleet.decide(1.0) == [(9, "n0", (0,)), (1, "small", (0,))]


def test_no_plain_hold_takes_what_was_given_back_for_an_asker() -> None:
    fleet = full_fleet(2)
    fleet.submit(9, slots=2, priority=5.0)
    assert len(fleet.decide()) == 2
    fleet.submit(8, priority=6.0)  # nobody left to ask
    assert fleet.decide() == []
    fleet.scheduler.requeue(1, 1.0)
    assert fleet.started(1.0) == []
    fleet.scheduler.requeue(2, 2.0)
    assert fleet.started(2.0) == [9]


def test_a_job_behind_a_waiting_asker_may_still_use_the_held_share() -> None:
    fleet = full_fleet(2, 2, reported=False)
    on = {id: attempt.device.node for id, attempt in fleet.scheduler.attempts.items() if attempt.device}
    first, second = ([id for id in on if on[id] == node] for node in ("n0", "n1"))
    fleet.report(*second)
    fleet.submit(8, exclusive=True, priority=1.0)
    assert fleet.end(first[0]) == []  # held for job 8
    fleet.submit(9, slots=2, priority=5.0)
    assert {victim for victim, _, _ in fleet.decide()} == set(second)
    fleet.submit(10, priority=3.0)
    assert fleet.decide() == [(10, "n0", (0,))]


def test_nobody_yields_to_a_job_that_fits_in_what_is_held_for_a_later_one() -> None:
    fleet = Fleet(4, aging=0.0, preempt_gap=1.0, tail=False)
    fleet.submit(1)
    fleet.submit(2, slots=3, priority=2.0)
    assert fleet.started() == [2, 1]
    fleet.submit(3, slots=2, priority=0.5)
    fleet.report(1, 2)
    fleet.submit(4, memory_mb=100)
    fleet.scheduler.add_node("small", [DeviceSpec("g", 1, 1, 10)], 0.0)  # room, but for none of them
    assert fleet.decide() == []
    assert fleet.scheduler.hold is not None and fleet.scheduler.hold.owner == 3
    fleet.scheduler.requeue(2, 1.0)
    assert fleet.started(1.0) == [2]


def test_a_cancelled_asker_leaves_the_slot_to_everybody() -> None:
    fleet = full_fleet(1)
    fleet.submit(2)
    fleet.submit(9, priority=5.0)
    assert fleet.decide() == [(1, "yields to", 9)]
    assert fleet.scheduler.cancel_waiting(9, 0.0)
    fleet.scheduler.requeue(1, 1.0)
    assert fleet.started(1.0) == [1]


def test_an_asker_placed_elsewhere_gives_the_slot_back() -> None:
    fleet = full_fleet(1, 1)
    fleet.submit(3)
    fleet.submit(9, priority=5.0)
    [(victim, _, _)] = fleet.decide()
    other = 3 - victim
    assert fleet.end(other, now=1.0) == [9]
    fleet.scheduler.requeue(victim, 2.0)
    assert fleet.started(2.0) == [victim]  # by its rank
    assert fleet.scheduler.waiting_ids() == [3]


def test_a_better_job_takes_over_the_hold_and_asks_where_it_was() -> None:
    """On a single device the hold of a large bulk job must not keep an urgent one from asking."""
    fleet = full_fleet(2)
    fleet.report(1, 2)
    fleet.submit(8, exclusive=True, priority=1.0)
    fleet.submit(3)
    assert fleet.end(1, now=1.0) == []
    fleet.submit(9, slots=2, priority=5.0, at=2.0)
    assert fleet.decide(2.0) == [(2, "yields to", 9)]
    fleet.scheduler.requeue(2, 3.0)
    assert fleet.started(3.0) == [9]
    assert fleet.end(9, now=4.0) == [8]


# Nodes


def test_a_lost_node_s_jobs_run_nowhere_until_requeued_or_ended() -> None:
    fleet = Fleet(2, 1)
    fleet.submit(1, 2, 3, priority=0.0)
    fleet.started()
    lost = fleet.scheduler.remove_node("n0", 5.0)
    assert len(lost) == 2 and fleet.scheduler.running == 3
    assert "lost its node" in fleet.scheduler.explain(lost[0], 5.0)
    fleet.scheduler.check()
    fleet.scheduler.requeue(lost[0], 6.0)
    fleet.scheduler.ended(lost[1], 6.0)
    fleet.scheduler.add_node("n0", [DeviceSpec("g", 2)], 7.0)
    assert fleet.started(7.0) == [lost[0]]
    assert fleet.scheduler.request(lost[0]).submitted == 0.0  # keeps its age


def test_nothing_starts_on_a_draining_node_and_its_hold_moves() -> None:
    fleet = Fleet(2, 2, aging=0.0)
    fleet.submit(1, 2, 3, 4)
    fleet.started()
    fleet.submit(9, exclusive=True, priority=1.0)
    fleet.submit(5, 6, 7)
    some = next(iter(fleet.scheduler.attempts))
    fleet.end(some)
    assert fleet.scheduler.hold is not None
    held = fleet.scheduler.hold.device.node
    fleet.scheduler.drain_node(held, 1.0)
    assert fleet.started(1.0) == []
    there = [id for id, a in fleet.scheduler.attempts.items() if a.device.node == held]  # type: ignore[union-attr]
    assert fleet.end(*there, now=2.0) == []
    others = list(fleet.scheduler.attempts)
    assert fleet.end(*others, now=3.0) == [9]


def test_a_node_s_name_is_taken_until_it_is_removed() -> None:
    fleet = Fleet(1)
    with pytest.raises(BadInput, match="already there"):
        fleet.scheduler.add_node("n0", [DeviceSpec("g", 1)], 0.0)


def test_jobs_that_waited_before_any_node_start_when_one_comes() -> None:
    fleet = Fleet()
    fleet.submit(1, memory_mb=500)
    assert fleet.started() == []
    assert "no node has registered" in fleet.scheduler.explain(1, 0.0)
    fleet.scheduler.add_node("n", [DeviceSpec("g", 1, 1, 400)], 0.0)
    assert fleet.started() == []
    assert "500 MB" in fleet.scheduler.explain(1, 0.0)
    fleet.scheduler.add_node("m", [DeviceSpec("g", 1, 1, 600)], 0.0)
    assert fleet.started() == [1]


# Questions


def test_can_ever_fit_goes_by_what_is_declared_or_there() -> None:
    scheduler = Scheduler()
    wide, heavy = Request(1, 0.0, slots=5), Request(2, 0.0, memory_mb=900)
    assert scheduler.can_ever_fit(wide) == ""
    scheduler.declare([DeviceSpec("g", 4, 2, 800)])
    assert scheduler.can_ever_fit(wide) == "job 1 can never start: it needs 5 slots of one device and there are 4"
    assert "900 MB" in scheduler.can_ever_fit(heavy)
    assert "9 cores" in scheduler.can_ever_fit(Request(3, 0.0, cores=9))
    scheduler.add_node("n", [DeviceSpec("g", 5, 1, None)], 0.0)
    assert (scheduler.can_ever_fit(wide), scheduler.can_ever_fit(heavy)) == ("", "")


def test_explain_says_the_first_rule_that_said_no() -> None:
    fleet = Fleet(2, memory_mb=1000, aging=0.01)
    fleet.submit(1, memory_mb=800)
    fleet.started()
    fleet.submit(2, memory_mb=300)
    fleet.submit(3, slots=2, at=10.0)
    fleet.submit(4, slots=1, at=10.0, memory_mb=250)
    fleet.started(10.0)
    explain = fleet.scheduler.explain
    assert "has run for 10 s in slot 0 of device g of node n0" in explain(1, 10.0)
    assert "is held for it" in explain(2, 10.0)
    assert "all 2 slots are taken or held" in explain(3, 10.0)
    assert "effective priority of 0.00 it comes after job 2 with 0.10" in explain(4, 10.0)
    assert "not known" in explain(77, 10.0)
    fleet.scheduler.drain_node("n0", 10.0)
    assert "no node that takes new jobs" in explain(2, 10.0)


def test_the_three_longest_waits_are_kept_with_their_effective_priority() -> None:
    fleet = Fleet(1, aging=0.1)
    fleet.submit(1, 2, 3, 4)
    fleet.started()
    for id, now in ((1, 10.0), (2, 20.0), (3, 30.0)):
        fleet.end(id, now=now)
    waits = fleet.scheduler.top_waits
    assert [(wait.id, wait.wait_s) for wait in waits] == [(4, 30.0), (3, 20.0), (2, 10.0)]
    assert waits[0].effective_priority == pytest.approx(3.0)


def test_events_that_cannot_be_are_refused_with_the_story() -> None:
    fleet = Fleet(1)
    fleet.submit(1, 2)
    fleet.started()
    with pytest.raises(InvariantBroken, match="job 2 was to leave its slots, but it is waiting"):
        fleet.scheduler.ended(2, 0.0)
    with pytest.raises(InvariantBroken, match="job 1 was submitted, but a job with its id is running"):
        fleet.submit(1)
    with pytest.raises(KeyError, match="job 7"):
        fleet.scheduler.effective_priority(7, 0.0)
    fleet.scheduler.progress(7, None, 0.0)  # a late report is no news
    fleet.scheduler.check()


@pytest.mark.parametrize("damage", ["free", "lane", "backlog", "gone", "hold"])
def test_check_finds_damage(damage: str) -> None:
    fleet = Fleet(2, aging=0.0, tail=False)
    fleet.submit(1, 2, 3, expected_s=1.0)
    fleet.started()
    fleet.submit(9, exclusive=True, priority=1.0)
    fleet.end(1)
    scheduler = fleet.scheduler
    scheduler.check()
    if damage == "free":
        next(scheduler.fleet.devices()).free.append(0)
    elif damage == "lane":
        next(iter(scheduler.queue.lanes.values())).head = (99.0, 0.0, 3)
    elif damage == "backlog":
        scheduler.backlog.add(Request(77, 0.0))
    elif damage == "gone":
        scheduler._gone += 1
    elif damage == "hold":
        scheduler.hold = None
    with pytest.raises(InvariantBroken):
        scheduler.check()


@pytest.mark.parametrize(
    ("field", "value"),
    [("priority", float("nan")), ("slots", 0), ("memory_mb", -1), ("cores", 0), ("expected_s", float("inf"))],
)
def test_a_request_that_nobody_could_serve_is_refused_by_field(field: str, value: float) -> None:
    with pytest.raises(BadJob, match=field):
        Request(**({"id": 1, "submitted": 0.0} | {field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [("aging", -1.0), ("place", "pakc"), ("tail_fraction", 0.0), ("min_runtime_s", -1.0), ("max_preemptions", -1)],
)
def test_a_policy_that_makes_no_sense_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(BadInput, match=field):
        Policy(**{field: value})  # type: ignore[arg-type]


def test_a_device_without_slots_is_refused() -> None:
    with pytest.raises(BadInput, match="slots"):
        DeviceSpec("g", 0)


def test_preempt_names_both_jobs() -> None:
    fleet = full_fleet(1)
    fleet.submit(9, priority=5.0)
    assert fleet.scheduler.schedule(0.0) == [Preempt(victim=1, for_request=9)]


def test_a_rerank_to_no_number_is_refused_and_loses_nothing() -> None:
    scheduler = Scheduler()
    scheduler.submit(Request(1, 0.0), 0.0)
    with pytest.raises(BadJob, match="priority"):
        scheduler.rerank(1, math.nan, 1.0)
    scheduler.check()
    assert scheduler.state(1) == "waiting"
