"""How much of the progress of jobs is written (N6)."""

from __future__ import annotations

from mdcampaign.thinning import Thinned


def written(jobs: int, length_s: int, every_s: int = 1) -> int:
    """Reports written for so many jobs that run beside each other and report every few seconds."""
    thinned, count = Thinned(5.0), 0
    for now in range(0, length_s, every_s):
        count += sum(thinned.due(f"j{n}", b"", float(now)) for n in range(jobs))
        count += len(thinned.take_due(float(now)))
    return count + sum(len(thinned.forget(f"j{n}")) for n in range(jobs))


def test_one_short_job_is_written_every_shortest_interval() -> None:
    assert written(1, 50) == 11


def test_a_day_of_one_job_is_written_every_minute() -> None:
    assert 1400 < written(1, 86_400) < 1700


def test_ten_minutes_of_512_jobs_leave_few_reports_each_n6() -> None:
    assert written(512, 600, every_s=5) <= 512 * 7


def test_a_forgotten_job_starts_anew() -> None:
    thinned = Thinned(5.0)
    assert thinned.due("a", b"1", 0.0)
    assert not thinned.due("a", b"2", 1.0)
    assert thinned.forget("a") == [b"2"]
    assert thinned.forget("a") == []
    assert thinned.due("a", b"3", 2.0)


def test_what_waits_is_looked_at_a_few_times_an_interval() -> None:
    thinned = Thinned(5.0)
    assert thinned.next_look_s(0.0) is None
    thinned.due("a", b"1", 0.0)
    thinned.due("a", b"2", 1.0)
    assert thinned.take_due(1.0) == []
    assert thinned.next_look_s(1.0) == 0.25
    assert thinned.take_due(5.0) == [b"2"]
    assert thinned.next_look_s(5.0) is None
