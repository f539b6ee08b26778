"""`run_md`: claims a directory, drives an engine, and says how it ended in every case."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from attempts import YIELD, Campaign

from mdcampaign.engines import drive
from mdcampaign.engines.base import Capabilities
from mdcampaign.engines.manifest import Manifest
from mdcampaign.errors import Crashed, EngineFailed, InputFailed, NameTaken
from mdcampaign.jobs import Directive, MDJob, Outcome, Progress, Slot


def make_job(steps: int = 30, **changes: Any) -> dict[str, Any]:
    engine = {"kind": "synthetic", "step_s": 1e-5}
    return {"name": "j", "group": "g", "steps": steps, "iteration_steps": 10, "engine": engine, **changes}


class Scripted:
    """An engine that reports once and then does as it was told."""

    then: Any = None

    def probe(self) -> Capabilities:
        return Capabilities("scripted")

    def run(self, job: MDJob, slot: Slot, workdir: Path) -> Generator[Progress, Directive, Outcome]:
        yield Progress(1, job.steps)
        then = Scripted.then
        if isinstance(then, BaseException):
            raise then
        outcome: Outcome = then(workdir) if callable(then) else then
        return outcome


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """Put the scripted engine in the place of the synthetic one."""
    monkeypatch.setattr(drive, "engine_of", lambda kind: Scripted())
    monkeypatch.setattr(Scripted, "then", None)
    return Scripted


def test_a_job_has_a_directory_and_each_attempt_one_of_its_own(campaign: Campaign) -> None:
    campaign.run(make_job(), lambda p: YIELD)
    outcome = campaign.run(make_job())

    job_dir = campaign.directory / "jobs" / "g" / "j"
    assert sorted(p.name for p in job_dir.iterdir()) == ["attempt-1", "attempt-2", "manifest.json"]
    assert outcome.directory == str(job_dir)
    assert campaign.context and campaign.context.workdir == job_dir / "attempt-2"


def test_two_attempts_never_share_a_directory(campaign: Campaign) -> None:
    """A campaign that is run again counts its attempts from 1 again."""
    campaign.run(make_job(), lambda p: YIELD, attempt=1)
    outcome = campaign.run(make_job(), attempt=1)

    assert outcome.attempt == 1
    manifest = Manifest.load(campaign.job_dir(make_job()))
    assert manifest and [part.attempt for part in manifest.parts] == [1, 2]
    assert manifest.events == ["attempt-2: attempt-1 or a later one exists, so this one got a new number"]


def test_the_attempt_works_in_its_directory(campaign: Campaign, scripted: type[Scripted]) -> None:
    before = Path.cwd()
    seen = []

    def look(workdir: Path) -> Outcome:
        seen.append((Path.cwd(), workdir))
        return Outcome("done")

    scripted.then = look
    campaign.run(make_job())

    assert seen[0][0] == seen[0][1]
    assert Path.cwd() == before


@pytest.mark.parametrize("end", ["done", "stopped"])
def test_a_job_that_ended_is_not_run_again(campaign: Campaign, end: str) -> None:
    """R1, R2."""
    answer = (lambda p: Directive("stop") if p.step == 20 else None) if end == "stopped" else None
    first = campaign.run(make_job(), answer)

    again = campaign.run(make_job())

    assert (again.kind, again.step, again.message) == (end, first.step, f"{end} before; not run again")
    assert campaign.reports == []
    assert not (campaign.job_dir(make_job()) / "attempt-2").exists()


def test_a_longer_target_continues_a_job_that_was_done(campaign: Campaign) -> None:
    campaign.run(make_job(30))
    outcome = campaign.run(make_job(50))

    assert (outcome.kind, outcome.step) == ("done", 50)
    assert [p.step for p in campaign.reports] == [40, 50]


def test_an_extended_job_goes_on_to_where_it_was_extended(campaign: Campaign) -> None:
    campaign.run(make_job(30), lambda p: Directive("extend", target_step=60) if p.step == 10 else YIELD)

    assert campaign.run(make_job(30)).step == 60


def test_a_name_with_other_content_is_refused(campaign: Campaign) -> None:
    campaign.run(make_job())

    with pytest.raises(NameTaken, match="another job named 'j'"):
        campaign.run(make_job(seed=5))

    assert campaign.context and campaign.context.outcome and campaign.context.outcome.failure == "input"
    assert not (campaign.job_dir(make_job()) / "attempt-2").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepps": 3}, r"stepps: unknown key .* Did you mean 'steps'"),
        ({"engine": {"kind": "gromacs", "tpr": "/nowhere/x.tpr"}}, r"engine.tpr: no such file"),
    ],
)
def test_bad_input_is_told(campaign: Campaign, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputFailed, match=message):
        campaign.run(make_job(**change))

    assert campaign.context and campaign.context.outcome and campaign.context.outcome.failure == "input"


def test_a_failed_outcome_becomes_its_exception(campaign: Campaign, scripted: type[Scripted]) -> None:
    scripted.then = Outcome("failed", step=7, failure="crashed", message="signal 11")

    with pytest.raises(Crashed, match="signal 11"):
        campaign.run(make_job())

    assert campaign.context and campaign.context.outcome and campaign.context.outcome.step == 7


def test_an_exception_that_escapes_is_a_failure_of_the_engine(campaign: Campaign, scripted: type[Scripted]) -> None:
    scripted.then = ZeroDivisionError("by nought")

    with pytest.raises(EngineFailed, match="ZeroDivisionError: by nought"):
        campaign.run(make_job())

    assert campaign.context and campaign.context.outcome and campaign.context.outcome.failure == "engine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_interrupts(campaign: Campaign, scripted: type[Scripted], code: int) -> None:
    """D2: not the job's fault; it resumes when there is room."""
    scripted.then = OSError(code, os.strerror(code))

    outcome = campaign.run(make_job())

    assert outcome.kind == "interrupted"
    assert outcome.message.startswith("disk full")


def test_a_superseded_attempt_changes_nothing(campaign: Campaign) -> None:
    """W18: the first attempt was thought lost; it meets the second's directory at its next save."""
    job = make_job(steps=60)
    inner = Campaign(campaign.directory)
    inner.numbers["j"] = 1
    outcomes = []

    def meanwhile(progress: Progress) -> Directive | None:
        if progress.step == 20:
            context = campaign.context
            outcomes.append(inner.run(job))
            drive_context(context)
        return None

    late = campaign.run(job, meanwhile)

    assert (late.kind, outcomes[0].kind) == ("interrupted", "done")
    assert "attempt 2" in late.message and "attempt 1 writes no more" in late.message
    manifest = Manifest.load(campaign.job_dir(job))
    assert manifest and manifest.state == "done"
    assert [(p.attempt, p.accepted_step) for p in manifest.parts] == [(1, 20), (2, 60)]


def drive_context(context: Any) -> None:
    """Go back to the outer attempt's context after an inner attempt."""
    from mdcampaign import slot

    slot.enter(context)
    os.chdir(context.workdir)


def test_openmm_is_not_imported_for_other_engines(tmp_path: Path) -> None:
    """A login node, and a slot that runs other jobs, needs no OpenMM."""
    code = (
        "import json, sys; from mdcampaign.engines.drive import run_md;"
        f"run_md(json.loads({json.dumps(json.dumps(make_job()))}), {str(tmp_path)!r});"
        "sys.exit('openmm' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_interrupt_leaves_the_engine_closed(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a job run by hand: the engine's generator is closed, so that what it started ends with it."""
    closed = []

    class Closing(Scripted):
        def run(self, job: MDJob, slot: Slot, workdir: Path) -> Generator[Progress, Directive, Outcome]:
            try:
                yield Progress(1, 2)
                return Outcome("done")
            finally:
                closed.append(True)

    def interrupt(progress: Progress) -> Directive | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drive, "engine_of", lambda kind: Closing())
    with pytest.raises(KeyboardInterrupt):
        campaign.run(make_job(), interrupt)

    assert closed == [True]
