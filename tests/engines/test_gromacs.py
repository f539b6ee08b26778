"""The GROMACS engine on real systems: done, yield, kill, resume, fall back, extend, stop."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gmx_drive import CPU, Runs, at, mdrun_pid, mdruns, saved, signal_when
from gmx_systems import Systems

from mdcampaign.engines import gromacs, stitch
from mdcampaign.engines.gromacs import GROMACSEngine
from mdcampaign.errors import Superseded
from mdcampaign.jobs import CONTINUE, Directive, Progress

YIELD, STOP = Directive("yield"), Directive("stop")


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Systems:
    return Systems(tmp_path_factory.mktemp("systems"))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often, since these runs last a second."""
    monkeypatch.setattr(gromacs, "POLL_S", 0.05)
    monkeypatch.setattr(gromacs, "CHECKPOINT_POLL_S", 0.05)


@pytest.fixture(scope="module")
def uninterrupted(systems: Systems, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Runs]:
    """Return a finished run of a system to a length, each made once."""
    made: dict[tuple[str, int], Runs] = {}

    def run(system: str, steps: int) -> Runs:
        if (system, steps) not in made:
            runs = Runs(tmp_path_factory.mktemp("whole"), systems.tpr(system), steps)
            assert runs.attempt().kind == "done"
            made[system, steps] = runs
        return made[system, steps]

    return run


@pytest.fixture
def water(systems: Systems, tmp_path: Path) -> Runs:
    return Runs(tmp_path / "job", systems.tpr("water"))


def assert_identical(runs: Runs, whole: Runs) -> None:
    """Structure and stitched trajectory are those of the uninterrupted run, byte for byte, every frame once."""
    every = runs.manifest.parts[-1].frame_steps
    assert [frame.step for frame in stitch.frames(runs.job_dir)] == list(range(0, runs.steps + 1, every))
    assert runs.structure() == whole.structure()
    assert runs.trajectory() == whole.trajectory()


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_probe_tells_the_build() -> None:
    found = GROMACSEngine().probe()
    assert not found.problem
    assert found.version.startswith("20")
    assert "CPU" in found.platforms
    assert found.facts["precision"] in ("mixed", "double")


def test_probe_without_gmx_says_so_and_never_raises() -> None:
    found = GROMACSEngine("no-such-gmx").probe()
    assert "cannot run 'no-such-gmx'" in found.problem
    assert not found.version


def test_run_to_done(water: Runs) -> None:
    outcome = water.attempt()
    assert (outcome.kind, outcome.step, outcome.target_step) == ("done", 4000, 4000)
    assert outcome.ns == pytest.approx(0.008)
    assert outcome.frames == 41 and stitch.verify(water.job_dir) == (41, 41)
    assert outcome.rate_ns_per_day and outcome.observables["temperature_k"] == pytest.approx(300, abs=100)
    steps = [progress.step for progress in water.reports]
    assert steps == sorted(steps) and 0 < steps[-1] <= 4000
    assert water.reports[-1].time_ps == pytest.approx(steps[-1] * 0.002)
    manifest = water.manifest
    assert manifest.state == "done" and manifest.seeds == {"ld-seed": 2024} and manifest.events == []
    assert manifest.checkpoints[-1].step == 4000
    assert set(manifest.parts[0].files) == {"trajectory", "energies", "log", "structure"}
    assert manifest.facts["runs"][0]["command"][:3] == ["gmx", "-nobackup", "mdrun"]


def test_finished_job_is_not_run_again(water: Runs) -> None:
    """mdrun would write the last frame a second time."""
    water.attempt()
    before = digests(water.job_dir / "attempt-1")
    outcome = water.attempt()
    assert outcome.kind == "done" and "reached before" in outcome.message
    assert list((water.job_dir / "attempt-2").iterdir()) == []
    assert digests(water.job_dir / "attempt-1") == before


@pytest.mark.parametrize("system, steps", [("water", 6000), ("ala", 8000)])
def test_w8_w9_yield_kill_and_close_then_resume_is_byte_identical(
    system: str, steps: int, systems: Systems, uninterrupted: Callable[[str, int], Runs], tmp_path: Path
) -> None:
    runs = Runs(tmp_path / "job", systems.tpr(system), steps)
    yielded = runs.attempt(at(100, YIELD))
    assert yielded.kind == "interrupted" and "yielded" in yielded.message
    assert 0 < yielded.step < steps and runs.manifest.checkpoints[-1].step == yielded.step
    assert len(list(stitch.frames(runs.job_dir))) == yielded.frames == yielded.step // 100 + 1

    first_part = digests(runs.job_dir / "attempt-1")
    killed = runs.attempt(signal_when(signal.SIGKILL, lambda progress: progress.saved_step > yielded.step))
    assert killed.kind == "interrupted" and "from outside" in killed.message
    assert yielded.step < killed.step < steps

    runs.closed_when(lambda progress: progress.step > killed.step)
    assert not mdruns()
    closed_at = runs.manifest.accepted_step
    assert killed.step <= closed_at < steps

    done = runs.attempt()
    assert (done.kind, done.step) == ("done", steps)
    assert runs.manifest.parts[-1].first_step == closed_at
    assert digests(runs.job_dir / "attempt-1") == first_part
    assert_identical(runs, uninterrupted(system, steps))


def test_w8_truncated_newest_checkpoint_falls_back_visibly(
    water: Runs, uninterrupted: Callable[[str, int], Runs]
) -> None:
    water.attempt(lambda progress: YIELD if len(water.manifest.checkpoints) == 2 else CONTINUE)
    previous, newest = water.manifest.checkpoints
    path = water.job_dir / newest.files["checkpoint"].path
    os.truncate(path, path.stat().st_size // 2)

    outcome = water.attempt()
    assert outcome.kind == "done"
    assert f"checkpoint fall-back to step {previous.step}" in outcome.message
    assert "instead of" in water.manifest.events[0]
    assert [part.accepted_step for part in water.manifest.parts] == [previous.step, 4000]
    assert_identical(water, uninterrupted("water", 4000))


def test_w12_two_bad_checkpoints_fail_in_words_and_nothing_starts_from_zero(water: Runs) -> None:
    water.attempt(lambda progress: YIELD if len(water.manifest.checkpoints) == 2 else CONTINUE)
    for checkpoint in water.manifest.checkpoints:
        (water.job_dir / checkpoint.files["checkpoint"].path).write_bytes(b"x")
    before = water.manifest.accepted_step

    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "engine")
    assert "no checkpoint can be used" in outcome.message and "1 bytes instead of" in outcome.message
    assert water.manifest.accepted_step == outcome.step == before
    assert list((water.job_dir / "attempt-2").iterdir()) == []


def test_checkpoint_of_another_temperature_is_refused(water: Runs, systems: Systems) -> None:
    """mdrun itself goes on under a 400 K tpr with exit code 0."""
    water.attempt(at(100, YIELD))
    water.tpr = systems.tpr("water", "hot", ref_t=400)
    taken_over = replace(water.manifest, identity=water.job().identity)
    taken_over.save(water.job_dir)

    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "input")
    assert "ref_t_k of the checkpoint" in outcome.message and "'300', not '400'" in outcome.message
    assert list((water.job_dir / "attempt-2").iterdir()) == []


def test_longer_target_continues(water: Runs, uninterrupted: Callable[[str, int], Runs]) -> None:
    assert water.attempt().kind == "done"
    water.steps = 6000
    outcome = water.attempt()
    assert (outcome.kind, outcome.step) == ("done", 6000)
    assert [(part.first_step, part.accepted_step) for part in water.manifest.parts] == [(0, 4000), (4000, 6000)]
    assert_identical(water, uninterrupted("water", 6000))


def test_extend_while_running_goes_on_in_the_same_attempt(water: Runs) -> None:
    outcome = water.attempt(at(100, Directive("extend", target_step=5000)))
    assert (outcome.kind, outcome.step, outcome.target_step) == ("done", 5000, 5000)
    assert [(part.attempt, part.accepted_step) for part in water.manifest.parts] == [(1, 4000), (1, 5000)]
    assert stitch.verify(water.job_dir) == (51, 51)


def test_stop_keeps_what_there_is(water: Runs) -> None:
    outcome = water.attempt(at(100, STOP))
    assert outcome.kind == "stopped" and 0 < outcome.step < 4000
    assert water.manifest.state == "stopped"
    assert stitch.verify(water.job_dir) == (outcome.frames, outcome.frames)


def test_mdrun_that_does_not_stop_is_killed_after_its_grace_time(water: Runs) -> None:
    """The last periodic checkpoint counts."""
    water.grace_s = 0.3

    def hang_then_yield(progress: Progress) -> Directive:
        if not saved(progress):
            return CONTINUE
        os.kill(mdrun_pid(), signal.SIGSTOP)
        return YIELD

    outcome = water.attempt(hang_then_yield)
    assert outcome.kind == "interrupted" and "killed after its grace time" in outcome.message
    assert outcome.step == water.manifest.checkpoints[-1].step > 0
    assert not mdruns()


def test_sparse_log_is_helped_by_the_screen(systems: Systems, tmp_path: Path) -> None:
    """With nstlog=0 the log names no step between the first and the last."""
    runs = Runs(tmp_path / "job", systems.tpr("water", "quiet", nstlog=0, nstenergy=0, nstxout_compressed=0))
    outcome = runs.attempt()
    assert outcome.kind == "done" and outcome.frames == 0
    assert any(0 < progress.step < 4000 for progress in runs.reports)


def test_minimisation_ends_by_convergence(systems: Systems, tmp_path: Path) -> None:
    runs = Runs(tmp_path / "job", systems.minimisation("water", "loose", emtol=1000), steps=200, mdrun_args=())
    outcome = runs.attempt()
    assert (outcome.kind, outcome.ns, outcome.frames) == ("done", 0.0, 0)
    assert "converged to Fmax < 1000" in outcome.message
    assert "structure" in runs.manifest.parts[-1].files


def test_minimisation_is_atomic_and_begins_again_after_a_yield(systems: Systems, tmp_path: Path) -> None:
    tpr = systems.minimisation("ala", "endless", emtol=1e-3)
    runs = Runs(tmp_path / "job", tpr, steps=100_000, mdrun_args=())
    outcome = runs.attempt(at(1, YIELD))
    assert (outcome.kind, outcome.step) == ("interrupted", 0)
    runs.steps = 100
    again = replace(runs.manifest, target_step=100)
    again.save(runs.job_dir)
    assert runs.attempt().kind == "done"
    assert [(part.attempt, part.first_step) for part in runs.manifest.parts] == [(2, 0)]


def test_two_attempts_never_write_into_one_directory(water: Runs) -> None:
    """Two mdruns on one -deffnm both run, silently."""
    water.attempt(at(100, YIELD))
    before = digests(water.job_dir / "attempt-1")
    outcome = water.attempt(workdir=water.job_dir / "attempt-1")
    assert (outcome.kind, outcome.failure) == ("failed", "engine")
    assert "directory of its own" in outcome.message
    assert digests(water.job_dir / "attempt-1") == before


def test_superseded_attempt_ends_and_writes_no_more(water: Runs) -> None:
    """A lost node that lives on finds a later attempt."""

    def supersede(progress: Progress) -> Directive:
        if saved(progress):
            (water.job_dir / "attempt-2").mkdir(exist_ok=True)
            (water.job_dir / "manifest.json").write_text("of attempt 2")
        return CONTINUE

    with pytest.raises(Superseded):
        water.attempt(supersede)
    assert not mdruns()
    assert (water.job_dir / "manifest.json").read_text() == "of attempt 2"


def test_replica_of_one_tpr_is_told_to_be_the_same_simulation(water: Runs) -> None:
    job = water.job().model_copy(update={"replica": 3, "steps": 200})
    running = GROMACSEngine().run(job, CPU, water.new_directory())
    with pytest.raises(StopIteration) as end:
        while True:
            next(running)
    assert "replica=3" in end.value.value.message and "make one tpr per replica" in end.value.value.message
