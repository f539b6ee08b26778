"""Where jobs lie: readable, never above a thousand entries, never moving (D1)."""

from __future__ import annotations

from pathlib import Path

from mdcampaign.campaign import job_directory
from mdcampaign.layout import BUCKETS, FLAT, Allocator, bucket


def entries(directory: Path) -> int:
    return sum(1 for _ in directory.iterdir())


def test_a_small_group_is_plain_to_read(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    made = Allocator(tmp_path).make("bulk", "ala-1")
    assert made == tmp_path / "jobs/bulk/ala-1"
    assert made.is_dir()
    assert job_directory(tmp_path, "bulk", "ala-1") == made


def test_a_job_that_was_never_made_has_the_plain_path(tmp_path: Path) -> None:
    assert job_directory(tmp_path, "bulk", "ala-1") == tmp_path / "jobs/bulk/ala-1"


def test_crowded_groups_are_spread_and_found_again_after_a_restart_d1(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    first = Allocator(tmp_path)
    names = [f"lig-{n}" for n in range(2500)]
    made = {name: first.make("screen", name) for name in names[:1200]}
    second = Allocator(tmp_path)  # the campaign is started again
    made |= {name: second.make("screen", name) for name in names}
    assert len(set(made.values())) == 2500
    assert all(job_directory(tmp_path, "screen", name) == path and path.is_dir() for name, path in made.items())
    assert made["lig-499"] == tmp_path / "jobs/screen/lig-499"
    assert made["lig-500"] == tmp_path / "jobs/screen" / bucket("lig-500") / "lig-500"
    assert FLAT < entries(tmp_path / "jobs/screen") <= FLAT + BUCKETS <= 1000


def test_many_groups_are_spread_too_d1(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    allocator = Allocator(tmp_path)
    made = [allocator.make(f"g{n}", "rep-1") for n in range(1500)]
    assert entries(tmp_path / "jobs") <= 1000
    assert [job_directory(tmp_path, f"g{n}", "rep-1") for n in range(1500)] == made
