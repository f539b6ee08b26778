"""The summary of a campaign, from its log and manifests alone; during the run or long after it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mdcampaign.engines import stitch
from mdcampaign.engines.manifest import Manifest
from mdcampaign.errors import CampaignError
from mdcampaign.layout import EVENTS, job_directory
from mdcampaign.scheduling.simulator import ReplayJob, replay
from mdcampaign.segments import read_events
from mdcampaign.state import Attempt, CampaignState, JobState

INTERRUPTED = ("interrupted", "lost")


@dataclass(frozen=True)
class Wait:
    """How long a job waited in all, and its effective priority at the end of it."""

    job: str
    priority: float
    wait_s: float
    effective_priority: float


@dataclass(frozen=True)
class Resumed:
    """What an interrupted job kept. `lost_steps`: steps that an attempt began after the checkpoint it started from."""

    job: str
    attempts: int
    frames: int
    frames_expected: int
    lost_steps: int

    def __str__(self) -> str:
        gap = "no gap" if self.frames == self.frames_expected else "NOT WHOLE"
        frames = f"frames {self.frames} of {self.frames_expected}, {gap}" if self.frames_expected else "no frames"
        return f"{self.job}: {self.attempts} attempts, {frames}, {self.lost_steps} steps lost beyond the checkpoint"


@dataclass
class Summary:
    """A campaign in one page. Times in seconds, for the last run of the campaign; job counts for all its runs.

    `span_s` is from the first start in a slot to the last end; `fifo_wall_s`, `static_wall_s` and `lower_bound_s` are
    what the same jobs would have taken in the same slots, replayed with their measured durations: compare them with
    `span_s`.
    """

    directory: str
    jobs: int = 0
    done: int = 0
    stopped: int = 0
    failed: int = 0
    cancelled: int = 0
    unfinished: int = 0
    interrupted: int = 0
    slots: int = 0
    wall_s: float = 0.0
    span_s: float = 0.0
    ns: float = 0.0
    slot_idle_fraction: float | None = None
    fifo_wall_s: float | None = None
    static_wall_s: float | None = None
    lower_bound_s: float | None = None
    waits_by_priority: dict[str, dict[str, float]] = field(default_factory=dict)
    top_waits: list[Wait] = field(default_factory=list)
    groups: dict[str, dict[str, float]] = field(default_factory=dict)
    resumed: list[Resumed] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        return asdict(self)


def summarise(directory: Path) -> Summary:
    """Return the summary of a campaign; raises LedgerCorrupt, or CampaignError where there is none."""
    if not (directory / EVENTS).is_dir():
        raise CampaignError(f"{directory} is no campaign directory: it has no {EVENTS}/")
    run = LastRun(directory)
    jobs = run.jobs
    summary = Summary(directory=str(directory), jobs=len(jobs), slots=run.slots)
    for job in jobs:
        kind = job.state if job.ended else "unfinished"
        setattr(summary, kind, getattr(summary, kind) + 1)
        summary.interrupted += sum(attempt.how in INTERRUPTED for attempt in job.attempts)
        summary.ns += job.ns
        group = summary.groups.setdefault(job.group or "-", {"jobs": 0, "ns": 0.0, "slot_s": 0.0})
        group["jobs"] += 1
        group["ns"] += job.ns
        group["slot_s"] += sum(map(slot_s, job.attempts))
        if job.state == "failed":
            summary.failures[job.job] = job.message
    summary.wall_s = run.ended_s - run.started_s
    _waits(summary, jobs, run.aging)
    _slots(summary, run)
    summary.resumed = [told for job in jobs if (told := resumed(directory, job))]
    return summary


class LastRun:
    """What the log says of the newest run: its jobs, its slots and its times."""

    def __init__(self, directory: Path) -> None:
        state = CampaignState()
        self.started_s = self.ended_s = 0.0
        self.aging = 0.0
        self.slots = 0
        for event in read_events(directory):
            state.apply(event)
            self._take(event)
        self.jobs = sorted(state.jobs.values(), key=lambda job: (job.submitted_s, job.task or 0))

    def _take(self, event: dict[str, Any]) -> None:
        self.ended_s = event["t"]
        if event["event"] == "campaign_started":
            self.started_s, self.slots = event["t"], 0
            self.aging = (event.get("policy") or {}).get("aging", 0.0)
        elif event["event"] == "node_joined":
            self.slots += sum(len(device["slot_cores"]) for device in event["devices"])

    def stays(self) -> list[tuple[JobState, Attempt]]:
        """Return the attempts of this run that have ended, each with its job."""
        return [
            (job, attempt)
            for job in self.jobs
            for attempt in job.attempts
            if attempt.ended_s is not None and attempt.placed_s >= self.started_s
        ]


def slot_s(attempt: Attempt) -> float:
    """Return the slot seconds of an attempt."""
    return 0.0 if attempt.ended_s is None else (attempt.ended_s - attempt.placed_s) * max(1, len(attempt.index))


def _waits(summary: Summary, jobs: list[JobState], aging: float) -> None:
    by_priority: dict[float, list[float]] = {}
    for job in jobs:
        by_priority.setdefault(job.priority, []).append(job.wait_s)
    summary.waits_by_priority = {
        f"{priority:g}": {"jobs": len(waits), "mean_s": sum(waits) / len(waits), "max_s": max(waits)}
        for priority, waits in sorted(by_priority.items(), reverse=True)
    }
    longest = sorted(jobs, key=lambda job: -job.wait_s)[:3]
    summary.top_waits = [Wait(job.job, job.priority, job.wait_s, job.priority + aging * job.wait_s) for job in longest]


def _slots(summary: Summary, run: LastRun) -> None:
    """Count idle slot time, and replay the measured durations in the order that others would choose."""
    stays = run.stays()
    if not stays or not run.slots:
        return
    first = min(attempt.placed_s for _, attempt in stays)
    summary.span_s = max(attempt.ended_s or 0.0 for _, attempt in stays) - first
    busy_s = sum(slot_s(attempt) for _, attempt in stays)
    if summary.span_s > 0:
        summary.slot_idle_fraction = max(0.0, 1 - busy_s / (run.slots * summary.span_s))
    durations: dict[str, float] = {}
    for job, attempt in stays:
        durations[job.job] = durations.get(job.job, 0.0) + (attempt.ended_s or 0.0) - attempt.placed_s
    by_name = {job.job: job for job in run.jobs}
    replayed = replay(
        [
            ReplayJob(
                name=name,
                submitted_s=max(0.0, by_name[name].submitted_s - first),
                duration_s=duration_s,
                priority=by_name[name].priority,
                slots=by_name[name].slots,
            )
            for name, duration_s in durations.items()
        ],
        slots=run.slots,
    )
    summary.fifo_wall_s = replayed.fifo_wall_s
    summary.static_wall_s = replayed.static_wall_s
    summary.lower_bound_s = replayed.lower_bound_s


def resumed(directory: Path, job: JobState) -> Resumed | None:
    """Return what a job of more than one attempt kept, judged by its files; None for others."""
    if len(job.attempts) < 2 or job.state not in ("done", "stopped"):
        return None
    job_dir = job_directory(directory, *job.job.split("/", 1))
    try:
        manifest = Manifest.load(job_dir)
        expected, found = stitch.verify(job_dir)
    except CampaignError:
        return None
    parts = manifest.parts if manifest else []
    lost = sum(max(0, later.first_step - earlier.accepted_step) for earlier, later in pairwise(parts))
    return Resumed(job.job, len(job.attempts), found, expected, lost)


def show(summary: Summary, console: Console) -> None:
    """Print the summary as one page."""
    counts = [f"{summary.jobs} jobs"]
    for kind in ("done", "stopped", "failed", "cancelled", "unfinished"):
        if count := getattr(summary, kind):
            counts.append(f"{count} {kind}")
    console.print(f"\n[bold]{', '.join(counts)}[/]; interrupted {summary.interrupted} times; {summary.directory}")
    idle = "n/a" if summary.slot_idle_fraction is None else f"{100 * summary.slot_idle_fraction:.1f} %"
    console.print(
        f"{summary.wall_s:.1f} s in all, {summary.span_s:.1f} s from first start to last end; "
        f"{summary.slots} slots, idle {idle}"
    )
    console.print(_groups_table(summary))
    console.print(_waits_table(summary))
    if summary.fifo_wall_s is not None and summary.static_wall_s is not None:
        console.print(
            f"The same jobs in the same slots, [bold]replayed[/] with their measured durations: "
            f"FIFO refill {summary.fifo_wall_s:.1f} s, static batches {summary.static_wall_s:.1f} s; "
            f"no order can beat {summary.lower_bound_s:.1f} s. As run: {summary.span_s:.1f} s."
        )
    for told in summary.resumed:
        console.print(f"Interrupted {told}")
    for job, why in list(summary.failures.items())[:10]:
        console.print(f"[red]Failed[/] {job}: {why}", markup=True)
    for name, value in summary.findings.items():
        console.print(f"{name}: {value}", highlight=False)


def _groups_table(summary: Summary) -> Table:
    table = Table("group", "jobs", "ns", "ns/day a slot", title="What was simulated", title_justify="left")
    for name, group in summary.groups.items():
        rate = f"{group['ns'] / group['slot_s'] * 86400:.0f}" if group["slot_s"] and group["ns"] else "n/a"
        table.add_row(name, f"{group['jobs']:.0f}", f"{group['ns']:.3f}", rate)
    return table


def _waits_table(summary: Summary) -> Table:
    table = Table("priority", "jobs", "mean wait (s)", "longest (s)", title="Waits", title_justify="left")
    for priority, waits in summary.waits_by_priority.items():
        table.add_row(priority, f"{waits['jobs']:.0f}", f"{waits['mean_s']:.1f}", f"{waits['max_s']:.1f}")
    table.add_section()
    for wait in summary.top_waits:
        effective = f"effective {wait.effective_priority:.2f}"
        table.add_row(f"{wait.priority:g}", wait.job, effective, f"{wait.wait_s:.1f}")
    return table
