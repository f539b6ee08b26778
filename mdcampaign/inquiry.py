"""Questions and requests to a campaign from another terminal or another node of the file system."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mdcampaign import control, layout
from mdcampaign.display import left_s, running_table
from mdcampaign.errors import CampaignError, nearest
from mdcampaign.index import CampaignIndex
from mdcampaign.lock import holder
from mdcampaign.state import JobState

RUNNING_ROWS = 40


@dataclass(frozen=True)
class Status:
    """Where a campaign stands. `states` counts jobs by state; `running` has the first of those that run."""

    directory: Path
    run_by: str | None
    states: dict[str, int]
    running: list[JobState]
    failed: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        running = [asdict(job) | {"left_s": left_s(job)} for job in self.running]
        return asdict(self) | {"directory": str(self.directory), "jobs": sum(self.states.values()), "running": running}


def status(directory: Path) -> Status:
    """Return where a campaign stands; works while it runs and afterwards.

    Raises:
        CampaignError: this is no campaign directory.
    """
    owner = holder(directory / layout.LOCK)
    with CampaignIndex(directory) as index:
        index.refresh()
        running = [index.job(job.job) for job in index.jobs("running", limit=RUNNING_ROWS)]
        failed = {job.job: job.message for job in index.jobs("failed")}
        counts = index.counts()
    run_by = None if owner is None else str(owner)
    return Status(directory, run_by, counts, [job for job in running if job is not None], failed)


def show_status(told: Status, console: Console) -> None:
    """Print what `status` returned."""
    states = ", ".join(f"{count} {state}" for state, count in told.states.items()) or "no jobs yet"
    console.print(f"{told.directory}: {sum(told.states.values())} jobs: {states}", highlight=False)
    console.print(f"run by {told.run_by}" if told.run_by else "not running", highlight=False)
    if told.running:
        console.print(running_table(told.running))
    for job, why in list(told.failed.items())[:10]:
        console.print(f"failed: {job}: {why}", highlight=False, markup=False)


def find_job(directory: Path, name: str) -> JobState:
    """Return a job by "GROUP/NAME", or by NAME where only one group has it.

    Raises:
        CampaignError: there is none, or several; names the nearest spelling.
    """
    with CampaignIndex(directory) as index:
        index.refresh()
        if (job := index.job(name)) is not None:
            return job
        names = [job.job for job in index.jobs()]
        found = [full for full in names if full.partition("/")[2] == name]
        if len(found) == 1 and (job := index.job(found[0])) is not None:
            return job
    if found:
        raise CampaignError(f"several jobs are named {name}: {', '.join(found)}; give one of these")
    raise CampaignError(f"no job is named {name} in {directory}. {nearest(name, names)}".rstrip())


def explain(directory: Path, name: str) -> str:
    """Say why a job is not running, or how it ended: asked of the campaign where it runs, of its log elsewhere.

    Raises:
        CampaignError: there is no such job, or the campaign does not answer.
    """
    job = find_job(directory, name)
    if job.ended:
        story = f"{job.job} is {job.state} at step {job.step} of {job.target_step}"
        return f"{story}: {job.message}" if job.message else story
    if holder(directory / layout.LOCK) is None:
        return (
            f"{job.job} has {job.step} of {job.target_step} steps; the campaign is not running: run it again to go on"
        )
    return f"{job.job}: {control.request(directory, 'explain', job=job.job).message}"


def ask(directory: Path, verb: str, name: str | None, **payload: Any) -> control.Answer:
    """Send a verb to a running campaign, for one job or for all of it, and return its answer.

    Raises:
        CampaignError: there is no such job, or the campaign is not running or does not answer.
    """
    if name is not None:
        payload["job"] = find_job(directory, name).job
    return control.request(directory, verb, **payload)
