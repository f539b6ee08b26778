"""Workloads from words and files, and what is refused in them."""

from __future__ import annotations

import random

import pytest

from mdcampaign.errors import BadWorkload
from mdcampaign.scheduling.request import bucket_floor, bucket_top
from mdcampaign.scheduling.workload import Job, drawn, read_csv, tutorial


def test_a_csv_file_with_all_columns() -> None:
    lines = [
        "name,duration_s,priority,submitted_s,slots,exclusive,memory_mb,cores",
        "a,2.5,1,10,2,yes,500,4",
        "",
        "b,3,,,,,,",
    ]
    assert read_csv(lines) == [Job("a", 2.5, 1.0, 10.0, 2, True, 500, 4), Job("b", 3.0)]


def test_a_csv_file_with_lengths_alone_names_jobs_by_line() -> None:
    assert read_csv(["duration_s", "1", "2"]) == [Job("line-2", 1.0), Job("line-3", 2.0)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["duration_s,prioritty", "1,2"], "prioritty.*Did you mean 'priority'"),
        (["name", "a"], "duration_s is missing"),
        ([], "duration_s is missing"),
        (["duration_s"], "has no jobs"),
        (["duration_s", "1", "soon"], "duration_s in line 3: is not a number \\(got 'soon'\\)"),
        (["duration_s", "-1"], "duration_s in line 2"),
        (["duration_s,name", ",a"], "duration_s in line 2"),
        (["duration_s,slots", "1,0"], "slots in line 2"),
        (["duration_s,slots", "1,1.5"], "slots in line 2: is not a number"),
        (["duration_s,exclusive", "1,maybe"], "exclusive in line 2"),
        (["duration_s,priority", "1,nan"], "priority in line 2"),
        (["duration_s", "1,2"], "more values than"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_named(lines: list[str], message: str) -> None:
    with pytest.raises(BadWorkload, match=message):
        read_csv(lines)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "uniform",
        "uniform:1",
        "uniform:2,1",
        "uniform:0,1",
        "uniform:a,b",
        "constant:-1",
        "constant:inf",
        "normal:1,2",
    ],
)
def test_a_distribution_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadWorkload, match="durations"):
        drawn(random.Random(1), 3, text)


def test_a_spread_below_nothing_is_refused() -> None:
    with pytest.raises(BadWorkload, match="CV is not below"):
        drawn(random.Random(1), 3, "lognormal:10,-1")


def test_constant_lengths_and_the_urgent_two() -> None:
    jobs = tutorial(random.Random(1), 3, "constant:7")
    assert [(job.duration_s, job.priority) for job in jobs] == [(7.0, 5.0), (7.0, 5.0), (7.0, 0.0)]
    assert all(job.priority == 0.0 for job in drawn(random.Random(1), 3, "constant:7"))
    with pytest.raises(BadWorkload, match="jobs"):
        drawn(random.Random(1), 0, "constant:7")


def test_memory_buckets_cover_every_need_once_and_are_narrow() -> None:
    for memory_mb in [*range(5000), 79_999, 80_000, 141_000]:
        top = bucket_top(memory_mb)
        assert bucket_floor(top) <= memory_mb <= top
        assert top <= 1.125 * memory_mb + 1
        assert bucket_top(top) == top
        assert bucket_floor(top) == 0 or bucket_top(bucket_floor(top) - 1) < top
