"""OpenMM jobs interrupted in every way: what is on disk afterwards is the uninterrupted simulation, or is told."""

from __future__ import annotations

import json
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import openmm as mm
import pytest
from attempts import YIELD, Campaign
from conftest import MakeJob

from mdcampaign.engines import openmm_run, stitch
from mdcampaign.engines.manifest import FILE, Manifest, Stamp
from mdcampaign.errors import EngineFailed
from mdcampaign.jobs import MDJob, Outcome, Slot


def content(campaign: Campaign, job: dict[str, Any], work: Path) -> dict[str, bytes]:
    """Return the stitched trajectory and energies, and the final structure with velocities, as bytes."""
    job_dir = campaign.job_dir(job)
    found = {}
    for role, ending in (("trajectory", job["engine"].get("trajectory", "dcd")), ("energies", "csv")):
        stitch.write(job_dir, work / f"out.{ending}", role)
        found[role] = (work / f"out.{ending}").read_bytes()
    found["final"] = (job_dir / manifest_of(campaign, job).checkpoints[-1].files["state"].path).read_bytes()
    return found


def manifest_of(campaign: Campaign, job: dict[str, Any]) -> Manifest:
    manifest = Manifest.load(campaign.job_dir(job))
    assert manifest
    return manifest


@pytest.mark.parametrize(("platform", "kind"), [("Reference", "dcd"), ("CPU", "dcd"), ("CPU", "xtc")])
def test_kill_and_yield_at_random_change_nothing(
    campaign: Campaign, openmm_job: MakeJob, tmp_path: Path, platform: str, kind: str
) -> None:
    """W6, W8, W9, W13: four interruptions, kill -9 and yield, give the bytes of a run without any."""
    job = openmm_job(steps=450, iteration_steps=20, frame_steps=15, platform=platform, trajectory=kind)
    whole = Campaign(tmp_path / "whole")
    whole.run(job)
    moments = random.Random(f"{platform}{kind}")

    for way in ("kill", "yield", "kill", "kill"):
        last = manifest_of(campaign, job).accepted_step if campaign.numbers else 0
        until = last + 20 * moments.randint(2, 5)
        if way == "yield":
            assert campaign.run(job, lambda p, until=until: YIELD if p.step >= until else None).kind == "interrupted"
            continue
        child = campaign.child(job)
        while (report := child.next_report()) and report.step < until:
            pass
        assert report
        child.process.join(moments.random() * 0.03)  # into the middle of an iteration or of a save
        assert child.kill() == -signal.SIGKILL
        assert manifest_of(campaign, job).accepted_step >= report.saved_step
    outcome = campaign.run(job)

    assert (outcome.kind, outcome.step, outcome.frames, outcome.message) == ("done", 450, 31, "")
    assert len(manifest_of(campaign, job).parts) == 5
    assert content(campaign, job, tmp_path) == content(whole, job, tmp_path)


def test_kill_between_any_two_file_operations(openmm_job: MakeJob, tmp_path: Path) -> None:
    """W6, W13, R7: the process dies just before its n-th sync, rename, removal or new directory, for each n."""
    job = openmm_job(steps=8, iteration_steps=4, frame_steps=2)
    whole = Campaign(tmp_path / "whole")
    whole.run(job)
    expected = content(whole, job, tmp_path)
    number, codes, accepted = 0, [], []
    while not codes or codes[-1] != 0:
        number += 1
        campaign = Campaign(tmp_path / f"killed-{number}")
        codes.append(campaign.child(job, kill_at=number, save_always=True).end())
        manifest = Manifest.load(campaign.job_dir(job)) if campaign.job_dir(job).exists() else None
        accepted.append(manifest.accepted_step if manifest else -1)

        outcome = campaign.run(job)

        assert (outcome.kind, outcome.frames) == ("done", 5), f"killed at operation {number}"
        assert outcome.message in ("", "done before; not run again"), f"killed at operation {number}"
        assert content(campaign, job, tmp_path) == expected, f"killed at operation {number}"
        shutil.rmtree(campaign.directory)
    assert set(codes[:-1]) == {-signal.SIGKILL}
    assert accepted == sorted(accepted) and set(accepted) == {-1, 0, 4, 8}


def interrupted(campaign: Campaign, job: dict[str, Any], at: int = 60) -> Path:
    """Run a job to a yield at a step, with the checkpoint of an iteration before; return its directory."""
    assert campaign.run(job, lambda p: YIELD if p.step == at else None).step == at
    assert [c.step for c in manifest_of(campaign, job).checkpoints] == [at - 20, at]
    return campaign.job_dir(job)


@pytest.fixture(autouse=True)
def save_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save at each iteration in this process."""
    monkeypatch.setattr(openmm_run, "CHECKPOINT_SHARE", float("inf"))


def damage(path: Path, how: str) -> None:
    """Damage a file as disks and people do."""
    data = path.read_bytes()
    bad = {
        "one byte": data[:1],
        "empty": b"",
        "half": data[: len(data) // 2],
        "garbage": bytes(len(data)),
    }
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(bad[how])


WAYS = ["one byte", "empty", "half", "garbage", "missing"]


@pytest.mark.parametrize("how", WAYS)
def test_a_bad_checkpoint_falls_back_to_the_state_beside_it(campaign: Campaign, openmm_job: MakeJob, how: str) -> None:
    """W12. The State lacks the random stream: told, and with new noise that is recorded."""
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    damage(job_dir / "attempt-1" / "checkpoint-60.chk", how)

    outcome = campaign.run(job)

    assert (outcome.kind, outcome.frames) == ("done", 11)
    assert "step 60 continues from the portable State, with new noise: " in outcome.message
    assert "checkpoint-60.chk" in outcome.message
    assert campaign.reports[0].step == 80
    manifest = manifest_of(campaign, job)
    assert manifest.events == [f"attempt 2: {outcome.message}"]
    assert manifest.seeds["integrator@60"] == MDJob(**job).random_seed("integrator@60")


@pytest.mark.parametrize("how", WAYS)
def test_both_bad_falls_back_to_the_previous_checkpoint(
    campaign: Campaign, openmm_job: MakeJob, tmp_path: Path, how: str
) -> None:
    """W8: visibly, and bitwise the same simulation, since the previous one is whole."""
    job = openmm_job()
    whole = Campaign(tmp_path / "whole")
    whole.run(job)
    job_dir = interrupted(campaign, job)
    for name in ("checkpoint-60.chk", "state-60.xml"):
        damage(job_dir / "attempt-1" / name, how)

    outcome = campaign.run(job)

    assert outcome.kind == "done"
    assert outcome.message.startswith("checkpoint of step 60 refused: ")
    assert campaign.reports[0].step == 60
    assert [(p.first_step, p.accepted_step) for p in manifest_of(campaign, job).parts] == [(0, 40), (40, 100)]
    assert content(campaign, job, tmp_path) == content(whole, job, tmp_path)


def test_all_bad_is_a_failure_and_never_a_silent_new_start(campaign: Campaign, openmm_job: MakeJob) -> None:
    """W8."""
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    for path in [*job_dir.glob("attempt-1/*.chk"), *job_dir.glob("attempt-1/*.xml")]:
        damage(path, "half")

    with pytest.raises(EngineFailed, match=r"no checkpoint of .* can be used: .*step 60 .*step 40 .*Put back one"):
        campaign.run(job)

    manifest = manifest_of(campaign, job)
    assert (manifest.state, manifest.accepted_step) == ("failed", 60)
    assert len(manifest.events) == 3


def test_files_put_back_mend_it(campaign: Campaign, openmm_job: MakeJob, tmp_path: Path) -> None:
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    shutil.copytree(job_dir / "attempt-1", tmp_path / "copy")
    for path in job_dir.glob("attempt-1/*-[46]0.*"):
        damage(path, "half")
    with pytest.raises(EngineFailed):
        campaign.run(job)

    shutil.copytree(tmp_path / "copy", job_dir / "attempt-1", dirs_exist_ok=True)

    assert campaign.run(job).kind == "done"


@pytest.mark.parametrize("changes", [{"temperature_k": 400.0}, {"dt_ps": 0.001}, {"friction_per_ps": 5.0}])
def test_a_checkpoint_of_another_simulation_is_refused(
    campaign: Campaign, openmm_job: MakeJob, changes: dict[str, Any]
) -> None:
    """OpenMM would load it without a word: facts are compared, and the previous one is used."""
    job, other = openmm_job(), openmm_job(name="other", **changes)
    job_dir = interrupted(campaign, job)
    foreign = interrupted(campaign, other)
    put_in_place_of_the_newest(job_dir, foreign)

    outcome = campaign.run(job)

    (name,) = changes
    assert f"checkpoint of step 60 refused: {name} of the checkpoint at step 60 is {changes[name]}" in outcome.message
    assert campaign.reports[0].step == 60 and outcome.kind == "done"


def test_a_checkpoint_of_another_system_is_refused(
    campaign: Campaign, openmm_job: MakeJob, alanine: dict[str, str], tmp_path: Path
) -> None:
    """The same number of particles, other charges."""
    system = mm.XmlSerializer.deserialize(Path(alanine["system_xml"]).read_text())
    for force in system.getForces():
        if isinstance(force, mm.NonbondedForce):
            charge, sigma, epsilon = force.getParticleParameters(0)
            force.setParticleParameters(0, charge * 1.1, sigma, epsilon)
    (tmp_path / "other.xml").write_text(mm.XmlSerializer.serialize(system))
    job, other = openmm_job(), openmm_job(name="other", system_xml=str(tmp_path / "other.xml"))
    job_dir = interrupted(campaign, job)
    put_in_place_of_the_newest(job_dir, interrupted(campaign, other))

    outcome = campaign.run(job)

    assert "checkpoint of step 60 refused: system_sha256" in outcome.message
    assert outcome.kind == "done"


def put_in_place_of_the_newest(job_dir: Path, foreign: Path) -> None:
    """Put another job's newest checkpoint, files and record, in the place of this one's."""
    mine, theirs = Manifest.load(job_dir), Manifest.load(foreign)
    assert mine and theirs
    taken = theirs.checkpoints[-1]
    stamps = {}
    for role, stamp in taken.files.items():
        shutil.copy(foreign / stamp.path, job_dir / stamp.path)
        stamps[role] = Stamp.of(job_dir, job_dir / stamp.path)
    mine.checkpoints[-1] = replace(taken, files=stamps)
    mine.save(job_dir)


def test_a_foreign_file_with_a_true_checksum_is_found_by_its_step(campaign: Campaign, openmm_job: MakeJob) -> None:
    """A file of another moment, accepted by mistake."""
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    for kind in ("checkpoint-{}.chk", "state-{}.xml"):
        shutil.copy(job_dir / "attempt-1" / kind.format(40), job_dir / "attempt-1" / kind.format(60))
    text = (job_dir / FILE).read_text()
    manifest = json.loads(text)
    old, new = manifest["checkpoints"]
    for role, stamp in new["files"].items():
        stamp |= {key: old["files"][role][key] for key in ("bytes", "sha256")}
    (job_dir / FILE).write_text(json.dumps(manifest))

    outcome = campaign.run(job)

    assert "holds step 40, not 60" in outcome.message
    assert campaign.reports[0].step == 60 and outcome.kind == "done"


@pytest.mark.parametrize(("first", "then"), [(("CPU", 1), ("Reference", 1)), (("CPU", 1), ("CPU", 2))])
def test_another_device_goes_on_from_the_portable_state(
    campaign: Campaign, openmm_job: MakeJob, first: tuple[str, int], then: tuple[str, int]
) -> None:
    """Another platform; or more threads, where OpenMM would load random streams that are not there."""
    campaign.slot = Slot("node", "cpu", threads=first[1])
    interrupted(campaign, openmm_job(platform=first[0]))
    campaign.slot = Slot("node", "cpu", threads=then[1])

    outcome = campaign.run(openmm_job(platform=then[0]))

    assert (outcome.kind, outcome.frames) == ("done", 11)
    assert "portable State, with new noise: " in outcome.message
    assert manifest_of(campaign, openmm_job()).facts["2"]["platform"] == then[0]


def test_another_version_of_openmm_goes_on_from_the_portable_state(campaign: Campaign, openmm_job: MakeJob) -> None:
    """The hash of the System is not compared: another version may write the same System in other words."""
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    manifest = manifest_of(campaign, job)
    newest = manifest.checkpoints[-1]
    manifest.checkpoints[-1] = replace(newest, facts=newest.facts | {"openmm": "7.0", "system_sha256": "x"})
    manifest.save(job_dir)

    outcome = campaign.run(job)

    assert outcome.kind == "done"
    assert "openmm of the checkpoint at step 60 is '7.0'" in outcome.message
    assert campaign.reports[0].step == 80


def test_new_noise_after_each_loss_of_the_random_stream(campaign: Campaign, openmm_job: MakeJob) -> None:
    """The noise of step 0 must not come again, nor that of another resume."""
    job = openmm_job(steps=200)
    for at in (60, 100):
        job_dir = interrupted(campaign, job, at)
        for path in job_dir.glob(f"attempt-*/checkpoint-{at}.chk"):
            path.unlink()
    campaign.run(job)

    seeds = manifest_of(campaign, job).seeds
    assert len({seeds["integrator"], seeds["integrator@60"], seeds["integrator@100"]}) == 3


def test_a_missing_trajectory_is_not_done(campaign: Campaign, openmm_job: MakeJob) -> None:
    """F5: judged by content, not by having reached the end."""
    job = openmm_job()
    job_dir = interrupted(campaign, job)
    (job_dir / "attempt-1" / "trajectory.dcd").unlink()

    with pytest.raises(EngineFailed, match="trajectory has 4 of 11 frames"):
        campaign.run(job)

    assert manifest_of(campaign, job).state == "failed"


def test_killed_after_the_last_step_needs_no_further_one(campaign: Campaign, openmm_job: MakeJob) -> None:
    """W8: interrupted in the finishing window."""
    job = openmm_job()
    outcome = campaign.run(job)
    job_dir = campaign.job_dir(job)
    manifest = manifest_of(campaign, job)
    manifest.state, manifest.outcome = "running", {}
    manifest.save(job_dir)

    again = campaign.run(job)

    assert (again.kind, again.step, again.frames) == ("done", 100, 11)
    assert isinstance(outcome, Outcome) and again.observables == outcome.observables
    assert [p.step for p in campaign.reports] == [100]


def test_yields_without_progress_leave_no_trail(campaign: Campaign, openmm_job: MakeJob) -> None:
    """Parts that accept no frame are dropped, however often a job is moved."""
    job = openmm_job(iteration_steps=5, frame_steps=50)
    for _ in range(4):
        campaign.run(job, lambda p: YIELD)

    assert [(p.first_step, p.accepted_step) for p in manifest_of(campaign, job).parts] == [
        (0, 5), (5, 10), (10, 15), (15, 20)
    ]  # fmt: skip
    assert stitch.verify(campaign.job_dir(job)) == (1, 1)
    assert campaign.run(job).frames == 3
