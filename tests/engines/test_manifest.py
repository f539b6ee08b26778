"""The manifest: what it does not name does not exist, and only the last attempt may write it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mdcampaign.engines.manifest import FILE, Checkpoint, Manifest, Part, Stamp, last_attempt
from mdcampaign.errors import CheckpointError, NameTaken, Superseded
from mdcampaign.jobs import MDJob


def make_job(**changes: Any) -> MDJob:
    return MDJob(**{"name": "j", "steps": 100, "engine": {"kind": "synthetic"}, **changes})


def claim(job_dir: Path, number: int) -> Path:
    workdir = job_dir / f"attempt-{number}"
    workdir.mkdir(parents=True)
    return workdir


def checkpoint(step: int, **facts: Any) -> Checkpoint:
    return Checkpoint(1, step, {}, facts)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    manifest = Manifest.open(make_job(), claim(tmp_path, 1))
    path = tmp_path / "attempt-1" / "state"
    path.write_text("state")
    manifest.parts.append(Part(1, 0, 0, 10, {"trajectory": "attempt-1/t.dcd"}))
    manifest.advance(Checkpoint(1, 50, {"state": Stamp.of(tmp_path, path)}, {"temperature_k": 300.0}))
    manifest.seeds["velocities"] = 7
    manifest.save(tmp_path)

    assert Manifest.load(tmp_path) == manifest
    assert manifest.accepted_step == 50


def test_a_new_directory_has_no_manifest(tmp_path: Path) -> None:
    assert Manifest.load(tmp_path) is None
    assert Manifest.open(make_job(), claim(tmp_path, 1)).state == "new"


def test_a_moved_campaign_stays_whole(tmp_path: Path) -> None:
    workdir = claim(tmp_path / "here", 1)
    (workdir / "state").write_text("state")
    manifest = Manifest.open(make_job(), workdir)
    manifest.parts.append(Part(1, 0, 0, 10))
    manifest.advance(Checkpoint(1, 50, {"state": Stamp.of(tmp_path / "here", workdir / "state")}))
    manifest.save(tmp_path / "here")

    shutil.move(tmp_path / "here", tmp_path / "there")

    loaded = Manifest.load(tmp_path / "there")
    assert loaded
    found = loaded.checkpoints[-1].verify(tmp_path / "there", {})
    assert found["state"].read_text() == "state"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 1, "parts": [{}], "checkpoints": []}'])
def test_a_damaged_manifest_is_told_with_a_mend(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)

    with pytest.raises(CheckpointError, match=r"is damaged .* put back a copy, or remove"):
        Manifest.load(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": 99}))

    with pytest.raises(CheckpointError, match="has format 99, this version reads 1"):
        Manifest.load(tmp_path)


def test_a_name_belongs_to_one_content(tmp_path: Path) -> None:
    Manifest.open(make_job(), claim(tmp_path, 1)).save(tmp_path)

    with pytest.raises(NameTaken, match=r"another job named 'j'.*Give the job another name or group"):
        Manifest.open(make_job(seed=1), claim(tmp_path, 2))


def test_a_longer_target_is_the_same_job_and_a_shorter_one_changes_nothing(tmp_path: Path) -> None:
    Manifest.open(make_job(), claim(tmp_path, 1)).save(tmp_path)

    assert Manifest.open(make_job(steps=300), claim(tmp_path, 2)).target_step == 300
    assert Manifest.open(make_job(steps=50), tmp_path / "attempt-2").target_step == 100


def test_a_superseded_attempt_writes_no_more(tmp_path: Path) -> None:
    """W18: a node thought lost goes on; the attempt that took over owns the manifest."""
    old = Manifest.open(make_job(), claim(tmp_path, 1))
    old.save(tmp_path)
    new = Manifest.open(make_job(), claim(tmp_path, 2))
    new.events.append("mine")
    new.save(tmp_path)

    with pytest.raises(Superseded, match=r"attempt 2 .* has begun; attempt 1 writes no more"):
        old.save(tmp_path)

    assert Manifest.load(tmp_path) == new
    assert last_attempt(tmp_path) == 2


def test_advance_keeps_the_newest_checkpoint_and_the_one_before(tmp_path: Path) -> None:
    manifest = Manifest.open(make_job(), claim(tmp_path, 1))
    manifest.parts.append(Part(1, 0, 0, 10))
    for step in (0, 20, 40, 40):
        manifest.advance(checkpoint(step))

    assert [c.step for c in manifest.checkpoints] == [20, 40]
    assert manifest.accepted_step == 40


def test_rewind_cuts_parts_and_checkpoints_and_drops_parts_without_frames(tmp_path: Path) -> None:
    manifest = Manifest.open(make_job(), claim(tmp_path, 1))
    manifest.parts = [Part(1, 0, 30, 10), Part(2, 30, 30, 10), Part(3, 30, 60, 10), Part(4, 60, 90, 10)]
    manifest.checkpoints = [checkpoint(30), checkpoint(60), checkpoint(90)]

    manifest.rewind(50)

    assert [(p.attempt, p.accepted_step) for p in manifest.parts] == [(1, 30), (3, 50)]
    assert [c.step for c in manifest.checkpoints] == [30]


def test_rewind_to_the_start_keeps_the_frame_of_step_0(tmp_path: Path) -> None:
    manifest = Manifest.open(make_job(), claim(tmp_path, 1))
    manifest.parts = [Part(1, 0, 30, 10)]

    manifest.rewind(0)

    assert [(p.attempt, p.accepted_step) for p in manifest.parts] == [(1, 0)]


def test_a_checkpoint_with_another_fact_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"temperature_k of the checkpoint at step 5 is 300.0, not 310.0"):
        checkpoint(5, temperature_k=300.0).compare({"temperature_k": 310.0})


def test_a_file_that_changed_is_not_the_one_that_was_accepted(tmp_path: Path) -> None:
    """W12, W8: missing, cut short, changed at the same size."""
    path = tmp_path / "state"
    path.write_bytes(b"state")
    stamp = Stamp.of(tmp_path, path)
    assert stamp.verify(tmp_path) == path

    path.write_bytes(b"s")
    with pytest.raises(CheckpointError, match="has 1 bytes instead of 5"):
        stamp.verify(tmp_path)
    path.write_bytes(b"stale")
    with pytest.raises(CheckpointError, match="has changed since it was accepted"):
        stamp.verify(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        stamp.verify(tmp_path)
