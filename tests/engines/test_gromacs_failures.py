"""How the GROMACS engine judges runs that go wrong: by content, each kind told apart by evidence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from gmx_drive import CPU, Runs, at, mdruns, saved, signal_when, wrapper
from gmx_systems import Systems

from mdcampaign.engines import gromacs, stitch, xtc
from mdcampaign.engines.gmx_files import Build, read_tpr
from mdcampaign.engines.mdrun import Mdrun, command
from mdcampaign.engines.mdrun_log import MdrunLog
from mdcampaign.errors import BadJob
from mdcampaign.jobs import CONTINUE, Directive, MDJob, Slot

YIELD = Directive("yield")

GPU = Slot("node", "GPU-1", kind="gpu", threads=2, gpus=("GPU-1",))


@pytest.fixture(scope="module")
def systems(tmp_path_factory: pytest.TempPathFactory) -> Systems:
    return Systems(tmp_path_factory.mktemp("systems"))


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often, since these runs last a second."""
    monkeypatch.setattr(gromacs, "POLL_S", 0.05)
    monkeypatch.setattr(gromacs, "CHECKPOINT_POLL_S", 0.05)


@pytest.fixture
def water(systems: Systems, tmp_path: Path) -> Runs:
    return Runs(tmp_path / "job", systems.tpr("water"))


# ---------------------------------------------------------------- input


@pytest.mark.parametrize(
    "argument, mend",
    [
        ("-ntomp", "more cores"),
        ("-pinoffset", "cores are set from outside"),
        ("-gpu_id", "only one that mdrun sees"),
        ("-noappend", "attempt's directory"),
        ("-cpi", "last good checkpoint"),
        ("-maxh", "the job's `steps`"),
        ("-plumed", "HILLS"),
        ("-repord", "Did you mean '-reprod'?"),
    ],
)
def test_c5_mdrun_args_that_contradict_are_refused_at_submit(systems: Systems, argument: str, mend: str) -> None:
    engine = {"kind": "gromacs", "tpr": str(systems.tpr("water")), "mdrun_args": ["-reprod", argument, "1"]}
    with pytest.raises(BadJob) as refused:
        MDJob(name="job", steps=100, engine=engine)
    assert argument in str(refused.value) and mend in str(refused.value)


def test_mdrun_args_as_one_string_are_refused(systems: Systems) -> None:
    with pytest.raises(BadJob, match="give a list of arguments"):
        MDJob(name="job", steps=100, engine={"kind": "gromacs", "tpr": systems.tpr("water"), "mdrun_args": "-nb cpu"})


def test_option_that_mdrun_does_not_know_is_an_input_failure(water: Runs) -> None:
    water.mdrun_args = ("-zzz",)
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "input")
    assert "Unknown command-line option -zzz" in outcome.message


def test_missing_gmx_is_an_input_failure(water: Runs) -> None:
    water.gmx = "/nowhere/gmx"
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "input")
    assert "cannot run '/nowhere/gmx'" in outcome.message and "module" in outcome.message
    assert water.manifest.state == "failed"


@pytest.mark.parametrize("content", ["garbage", "truncated", "empty"])
def test_damaged_tpr_is_an_input_failure(water: Runs, tmp_path: Path, content: str) -> None:
    """mdrun may end in SIGSEGV on one; it is not started."""
    whole = water.tpr.read_bytes()
    water.tpr = tmp_path / "bad.tpr"
    water.tpr.write_bytes(
        {"garbage": bytes(range(256)) * 20, "truncated": whole[: len(whole) // 2], "empty": b""}[content]
    )
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "input")
    assert "bad.tpr cannot be read as a run input file" in outcome.message
    assert list((water.job_dir / "attempt-1").iterdir()) == []


def test_tpr_that_vanished_is_an_input_failure(water: Runs, tmp_path: Path) -> None:
    vanishing = tmp_path / "vanishing.tpr"
    vanishing.write_bytes(water.tpr.read_bytes())
    water.tpr = vanishing
    job = water.job()
    assert job.identity
    vanishing.unlink()
    with pytest.raises(StopIteration) as end:
        next(gromacs.GROMACSEngine().run(job, CPU, water.new_directory()))
    assert end.value.value.failure == "input" and "vanishing.tpr" in end.value.value.message


def test_gpu_slot_with_a_cpu_build_is_refused_in_words(water: Runs, tmp_path: Path) -> None:
    """Never silently on the CPU (X2)."""
    said = 'gmx --version | sed "s/^GPU support: .*/GPU support:        disabled/"'
    water.gmx = wrapper(tmp_path / "cpu-gmx", "exit 99")
    Path(water.gmx).write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {said}; else exec gmx "$@"; fi\n')
    water.slot = GPU
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "input")
    assert "without GPU support" in outcome.message and "submit to CPU slots" in outcome.message


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    "build, slot, there, absent",
    [
        (Build("2024"), CPU, "-ntmpi 1 -ntomp 1", ["-gpu_id", "-nb"]),
        (Build("2024", gpu="CUDA"), GPU, "-ntmpi 1 -ntomp 2 -cpt 5 -gpu_id 0 -nb gpu", ["-stepout"]),
        (Build("2024", gpu="CUDA"), CPU, "-nb cpu", ["-gpu_id"]),
        (Build("2024", mpi="MPI"), CPU, "-ntomp 1", ["-ntmpi"]),
    ],
    ids=["cpu", "gpu", "cpu slot, gpu build", "mpi build"],
)
def test_g1_c5_command_line_says_what_the_slot_owns(
    systems: Systems, tmp_path: Path, build: Build, slot: Slot, there: str, absent: list[str]
) -> None:
    """G1: the mask is in the environment, so the one visible device is 0."""
    tpr = systems.tpr("water")
    run = Mdrun(tmp_path, tpr=tpr, part=1, first_step=0, target_step=100)
    line = command(run, build, read_tpr("gmx", tpr), slot, "gmx", (), 1000, None)
    assert there in " ".join(line)
    assert "-pin off" in " ".join(line) and "-noappend" in line
    assert not set(absent) & set(line)


def test_job_chooses_where_it_is_free_to(systems: Systems, tmp_path: Path) -> None:
    tpr = systems.tpr("water")
    run = Mdrun(tmp_path, tpr=tpr, part=1, first_step=0, target_step=100)
    arguments = ("-nb", "cpu", "-cpt", "1")
    line = command(run, Build("2024", gpu="CUDA"), read_tpr("gmx", tpr), GPU, "gmx", arguments, 10, tmp_path / "a.cpt")
    assert [line.count(option) for option in ("-nb", "-cpt", "-stepout", "-v", "-cpi")] == [1, 1, 1, 1, 1]


# ---------------------------------------------------------------- how it ended


def test_f1_blow_up_is_unstable_and_names_the_first_bad_step(systems: Systems, tmp_path: Path) -> None:
    """mdrun ends in SIGSEGV."""
    runs = Runs(tmp_path / "job", systems.tpr("ala", "blow-up", dt=0.008))
    outcome = runs.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "unstable")
    assert "Step 1, time 0.008 (ps)  LINCS WARNING" in outcome.message
    assert runs.manifest.state == "failed" and runs.manifest.checkpoints == []


def test_f1_nan_from_the_start_is_unstable(systems: Systems, tmp_path: Path) -> None:
    outcome = Runs(tmp_path / "job", systems.tpr("ala", "nan", dt=0.02)).attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "unstable")
    assert "not finite at step 0" in outcome.message


def test_f5_exit_code_0_half_way_is_never_done(water: Runs, tmp_path: Path) -> None:
    water.gmx = wrapper(tmp_path / "short-gmx", 'exec gmx "$@" -nsteps 1000')
    outcome = water.attempt()
    assert outcome.kind == "interrupted"
    assert "ended without an error, but at step 1000 of 4000" in outcome.message
    water.gmx = "gmx"
    assert water.attempt().kind == "done"
    assert stitch.verify(water.job_dir) == (41, 41)


def test_f5_exit_code_0_without_progress_is_a_failure(water: Runs, tmp_path: Path) -> None:
    water.gmx = wrapper(tmp_path / "idle-gmx", "exit 0")
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "engine")
    assert "ended without an error, but at step 0 of 4000" in outcome.message


@pytest.mark.parametrize("lost", ["gro", "edr"])
def test_f5_missing_output_is_never_done_and_is_made_again(water: Runs, tmp_path: Path, lost: str) -> None:
    """W7: files of the earlier attempt are neither needed nor touched."""
    water.gmx = lossy(tmp_path, lost)
    outcome = water.attempt()
    assert outcome.kind == "interrupted" and 0 < outcome.step < 4000
    assert "ended without an error, but without " in outcome.message
    water.gmx = "gmx"
    assert water.attempt().kind == "done"
    assert stitch.verify(water.job_dir) == (41, 41)
    assert water.manifest.parts[-1].first_step == outcome.step


def test_w6_lost_trajectory_is_never_continued_as_if_it_were_there(water: Runs, tmp_path: Path) -> None:
    water.gmx = lossy(tmp_path, "xtc")
    assert water.attempt().kind == "interrupted"
    water.gmx = "gmx"
    outcome = water.attempt()
    assert (outcome.kind, outcome.failure) == ("failed", "engine")
    assert "no checkpoint can be used" in outcome.message and "md.part0001.xtc is missing" in outcome.message
    assert list((water.job_dir / "attempt-2").iterdir()) == []


def test_w6_trajectory_that_lost_its_end_goes_back_to_the_last_consistent_set(water: Runs, systems: Systems) -> None:
    water.tpr = systems.tpr("water", "fine", nstxout_compressed=5)
    water.attempt(lambda progress: YIELD if len(water.manifest.checkpoints) == 2 else CONTINUE)
    previous, newest = water.manifest.checkpoints
    path = water.job_dir / "attempt-1" / "md.part0001.xtc"
    kept = [frame for frame in xtc.frames(path) if frame.step <= previous.step]
    os.truncate(path, kept[-1].offset + kept[-1].size)

    outcome = water.attempt()
    assert newest.step >= previous.step + 5, "a frame lies between the two checkpoints"
    assert outcome.kind == "done" and f"fall-back to step {previous.step}" in outcome.message
    assert stitch.verify(water.job_dir) == (801, 801)


def lossy(directory: Path, suffix: str) -> str:
    """Return a gmx whose mdrun loses an output at its end."""
    return wrapper(directory / "lossy-gmx", f'gmx "$@"; code=$?; rm -f md.part000?.{suffix}; exit $code')


def test_crash_is_told_from_a_kill(water: Runs) -> None:
    outcome = water.attempt(signal_when(signal.SIGSEGV, saved))
    assert (outcome.kind, outcome.failure) == ("failed", "crashed")
    assert "signal SIGSEGV" in outcome.message


def test_w3_term_from_outside_is_an_interruption_with_a_checkpoint(water: Runs) -> None:
    """The end of an allocation TERMs the whole tree; the exit code is 1 as for a fatal error."""
    outcome = water.attempt(signal_when(signal.SIGTERM, lambda progress: progress.step > 0))
    assert outcome.kind == "interrupted" and "from outside" in outcome.message
    assert outcome.step == water.manifest.checkpoints[-1].step > 0
    assert not mdruns()


@pytest.mark.parametrize("output", ["edr", "xtc"])
def test_d2_full_disk_is_an_interruption(water: Runs, tmp_path: Path, output: str) -> None:
    water.gmx = wrapper(tmp_path / "full-gmx", f'ln -s /dev/full md.part0001.{output}; exec gmx "$@"')
    outcome = water.attempt()
    assert outcome.kind == "interrupted" and outcome.message.startswith("disk full")
    water.gmx = "gmx"
    assert water.attempt().kind == "done"


def test_yield_before_mdrun_can_save_costs_the_attempt_only(water: Runs, tmp_path: Path) -> None:
    water.gmx = wrapper(tmp_path / "slow-gmx", "exec sleep 60")
    outcome = water.attempt(at(0, YIELD))
    assert (outcome.kind, outcome.step) == ("interrupted", 0)


BOX = """
-------------------------------------------------------
Program:     gmx mdrun, version 2024.2
Source file: src/gromacs/gpu_utils/device_stream_manager.cpp (line 70)

{error}

For more information and tips for troubleshooting, please check the GROMACS
website at http://www.gromacs.org/Documentation/Errors
-------------------------------------------------------
"""


@pytest.mark.parametrize(
    "error, kind",
    [
        ("Fatal error:\nAsynchronous H2D copy failed. CUDA error #700 (cudaErrorIllegalAddress): an illegal", "device"),
        ("Fatal error:\nCUDA error #2 (cudaErrorMemoryAllocation): out of memory.", "memory"),
        ("Inconsistency in user input:\nNonbonded ... binary has been built without GPU support.", "input"),
        ("Fatal error:\nThere is no domain decomposition for 8 ranks that is compatible", "input"),
        ("Fatal error:\nStep 40: The total potential energy is nan, which is not finite.", "unstable"),
        ("Fatal error:\nToo many LINCS warnings (1000)", "unstable"),
        ("File input/output error:\nCannot write trajectory; maybe you are out of disk space?", "disk"),
        ("Fatal error:\nCheckpoint file corrupted/truncated, or maybe you are out of disk space?", "checkpoint"),
        ("Fatal error:\nStart of file magic number mismatch, checkpoint file has 12, should be 171817", "checkpoint"),
        ("Fatal error:\nSome output files listed in the checkpoint file md.cpt are not present", "checkpoint"),
        ("Fatal error:\nSomething that nobody has seen before", None),
    ],
)
def test_evidence_is_read_from_the_words_of_mdrun(tmp_path: Path, error: str, kind: str | None) -> None:
    (tmp_path / "screen").write_text(f"starting mdrun 'water'\n{BOX.format(error=error)}")
    log = MdrunLog(tmp_path / "log", tmp_path / "screen")
    log.read_all()
    assert log.strongest() == kind
    assert log.quote() == " ".join(error.split())


def test_xtc_error_after_warnings_is_a_blow_up_and_not_a_full_disk(tmp_path: Path) -> None:
    """mdrun cannot tell the two apart and says so."""
    words = "XTC error. This indicates you are out of disk space, or a simulation with\nmajor instabilities\n"
    for warnings, kind in (("", "disk"), ("Step 9, time 0.01 (ps)  LINCS WARNING\n", "unstable")):
        (tmp_path / "screen").write_text(warnings + words)
        log = MdrunLog(tmp_path / "log", tmp_path / "screen")
        log.read_all()
        assert log.strongest() == kind


def test_log_is_read_as_it_grows_also_in_the_middle_of_a_line(tmp_path: Path) -> None:
    text = (
        "           Step           Time\n            100        0.20000\n\n   Energies (kJ/mol)\n"
        "      Potential    Temperature Pressure (bar)\n   -6.37475e+03    3.00143e+02    2.32292e+03\n\n"
        "           Step           Time\n            200        0.40000\n\n   Energies (kJ/mol)\n"
        "      Potential    Temperature Pressure (bar)\n   -6.00000e+03           -nan    2.00000e+03\n\n"
        "\t<====  A V E R A G E S  ====>\n\n   Energies (kJ/mol)\n      Potential    Temperature Pressure (bar)\n"
        "   -9.00000e+09    9.00000e+09    9.00000e+09\n\nReceived the TERM signal, stopping within 40 steps\n"
        "Performance:      644.587        0.037\nFinished mdrun on rank 0\n"
    )
    path = tmp_path / "log"
    log = MdrunLog(path, tmp_path / "screen")
    assert not log.read() and log.step == -1
    for size in range(0, len(text), 7):
        path.write_text(text[:size])
        log.read()
        assert log.nan_step is None or size > text.index("nan")
    path.write_text(text)
    log.read_all()
    assert (log.step, log.nan_step, log.signalled, log.finished) == (200, 200, True, True)
    assert log.energies["Potential"] == -6000 and log.energies["Pressure (bar)"] == 2000
    assert log.performance == pytest.approx(644.587)
