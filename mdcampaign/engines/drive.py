"""`run_md`: what Parsl and Colmena run in a slot for an MDJob."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from mdcampaign import layout
from mdcampaign.engines import stitch
from mdcampaign.engines.base import Engine
from mdcampaign.engines.manifest import ATTEMPT, Manifest, last_attempt
from mdcampaign.errors import FAILURES, BadJob, EngineFailed, InputFailed, JobFailed, NameTaken, Superseded
from mdcampaign.jobs import MDJob, Outcome, OutcomeKind
from mdcampaign.slot import SlotContext, current

ENGINES = {
    "openmm": "mdcampaign.engines.openmm:OpenMMEngine",
    "gromacs": "mdcampaign.engines.gromacs:GROMACSEngine",
    "synthetic": "mdcampaign.engines.synthetic:SyntheticEngine",
}
"""Where the engine of each kind lives; imported when a job asks for it."""

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def engine_of(kind: str) -> Engine:
    """Return a new engine of this kind."""
    module, _, name = ENGINES[kind].partition(":")
    engine: Engine = getattr(importlib.import_module(module), name)()
    return engine


def run_md(job: dict[str, Any], campaign_dir: str) -> dict[str, Any]:
    """Run an MDJob in this process's slot, from its last saved step, and return its `Outcome` as a dict.

    Args:
        job: the fields of an MDJob (`job.model_dump(mode="json")`).
        campaign_dir: the campaign's directory; the job's own is `jobs/GROUP/NAME` in it.

    The outcome's `directory` is the job's directory: `stitch.frames` and `stitch.read_csv` take it. A job that was
    done or stopped before, and whose target has not grown since, is not run again.

    Raises:
        JobFailed: the subclass for the kind of failure.
        NameTaken: the directory holds a job of this name with other content.
    """
    here = current()
    try:
        outcome = _attempt(_checked(job), Path(campaign_dir).absolute(), here)
    except JobFailed as exc:
        outcome = Outcome("failed", message=str(exc), failure=exc.kind)
    except NameTaken as exc:
        here.end(Outcome("failed", message=str(exc), failure="input"))
        raise
    except Superseded as exc:
        outcome = Outcome("interrupted", message=str(exc))
    except Exception as exc:
        outcome = _escaped(exc)
        if outcome.failure:
            here.end(outcome)
            raise EngineFailed(outcome.message) from exc
    outcome = here.end(outcome)
    if outcome.failure:
        raise FAILURES[outcome.failure](outcome.message)
    return outcome.as_dict()


def _checked(job: dict[str, Any]) -> MDJob:
    try:
        return MDJob(**job)
    except BadJob as exc:
        raise InputFailed(str(exc)) from None


def _escaped(exc: Exception) -> Outcome:
    """Judge an exception that an engine let through."""
    if isinstance(exc, OSError) and exc.errno in DISK_FULL:
        return Outcome("interrupted", message=f"disk full: {exc}")
    return Outcome("failed", message=f"{type(exc).__name__}: {exc}", failure="engine")


def _attempt(job: MDJob, campaign_dir: Path, here: SlotContext) -> Outcome:
    job_dir = layout.job_directory(campaign_dir, job.group, job.name)
    job_dir.mkdir(parents=True, exist_ok=True)
    if (manifest := Manifest.load(job_dir)) is not None:
        manifest.check_identity(job, job_dir)
        if manifest.state in ("done", "stopped") and manifest.target_step >= job.steps:
            return _ended_before(job_dir, manifest)
    workdir = _claim(job, job_dir, here.attempt)
    here.workdir = workdir
    with _inside(workdir):
        outcome = replace(_drive(job, workdir, here), directory=str(job_dir))
    return outcome


def _ended_before(job_dir: Path, manifest: Manifest) -> Outcome:
    """Return the outcome of a job that needs no more work, as it was when it ended."""
    kind: OutcomeKind = "done" if manifest.state == "done" else "stopped"
    counted = {
        "step": manifest.accepted_step,
        "target_step": manifest.target_step,
        "frames": len(stitch.expected_steps(manifest)),
    }
    told = {"kind": kind, "directory": str(job_dir), "message": f"{kind} before; not run again"}
    return Outcome(**{**(manifest.outcome or counted), **told})


def _claim(job: MDJob, job_dir: Path, wanted: int) -> Path:
    """Make and return the directory of this attempt; its number is the highest, `wanted` where that is free."""
    number = max(wanted, last_attempt(job_dir) + 1)
    while True:
        workdir = job_dir / f"{ATTEMPT}{number}"
        try:
            workdir.mkdir()
            break
        except FileExistsError:
            number += 1
    if number != wanted:
        manifest = Manifest.open(job, workdir)
        manifest.events.append(f"{workdir.name}: {ATTEMPT}{wanted} or a later one exists, so this one got a new number")
        manifest.save(job_dir)
    return workdir


def _drive(job: MDJob, workdir: Path, here: SlotContext) -> Outcome:
    """Run the engine to its end: reports go up, directives come down."""
    with contextlib.closing(engine_of(job.engine.kind).run(job, here.slot, workdir)) as work:
        try:
            progress = next(work)
            while True:
                progress = work.send(here.report(progress))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """Work in `directory`, so that whatever a program drops lies in its attempt."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
