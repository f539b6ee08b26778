"""Attempts of a job for tests: in this process with scripted directives, or in a child that can be killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mdcampaign import layout, slot
from mdcampaign.engines.drive import run_md
from mdcampaign.jobs import Directive, Outcome, Progress, Slot

GUARD_S = 120
"""A guard against hanging, never a speed."""
YIELD, STOP = Directive("yield"), Directive("stop")

Answer = Callable[[Progress], Directive | None]


class Script:
    """A channel that keeps what is reported and answers each report by a function of it."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.reports: list[Progress] = []
        self._answer = answer

    def send_progress(self, progress: Progress) -> None:
        self.reports.append(progress)

    def take_directive(self) -> Directive | None:
        return self._answer(self.reports[-1]) if self._answer else None


class Campaign:
    """A campaign directory, and attempts of jobs in it; the number of the next attempt counts up by job."""

    def __init__(self, directory: Path, threads: int = 1) -> None:
        self.directory = directory
        self.slot = Slot("node", "cpu", threads=threads)
        self.numbers: dict[str, int] = {}
        self.reports: list[Progress] = []
        self.context: slot.SlotContext | None = None

    def job_dir(self, job: dict[str, Any]) -> Path:
        """Return the directory of a job."""
        return layout.job_directory(self.directory, job.get("group", "default"), job["name"])

    def number(self, job: dict[str, Any]) -> int:
        """Return the number of a new attempt."""
        self.numbers[job["name"]] = self.numbers.get(job["name"], 0) + 1
        return self.numbers[job["name"]]

    def run(self, job: dict[str, Any], answer: Answer | None = None, attempt: int | None = None) -> Outcome:
        """Run one attempt in this process and return its outcome; `reports` has what it reported."""
        script = Script(answer)
        self.reports = script.reports
        name = f"{job.get('group', 'default')}/{job['name']}"
        number = attempt or self.number(job)
        self.context = slot.SlotContext(self.slot, attempt=number, name=name, workdir=Path.cwd(), channel=script)
        slot.enter(self.context)
        try:
            return Outcome(**run_md(job, str(self.directory)))
        finally:
            slot.enter(None)

    def child(self, job: dict[str, Any], **options: Any) -> Child:
        """Start one attempt in a process of its own."""
        return Child(self, job, options)


class Child:
    """One attempt in a process that is forked from a server with OpenMM loaded, but no Context made."""

    def __init__(self, campaign: Campaign, job: dict[str, Any], options: dict[str, Any]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["attempts", "mdcampaign.engines.openmm_run"])
        self._reports, theirs = context.Pipe(duplex=False)
        number = campaign.number(job)
        arguments = (job, str(campaign.directory), number, campaign.slot, theirs, options)
        self.process = context.Process(target=_in_child, args=arguments)
        self.process.start()
        theirs.close()

    def next_report(self) -> Progress | None:
        """Wait for the next report; None when the child has ended."""
        if not self._reports.poll(GUARD_S):
            raise AssertionError(f"no report within {GUARD_S} s")
        try:
            progress: Progress = self._reports.recv()
            return progress
        except EOFError:
            return None

    def kill(self) -> int:
        """Kill it by SIGKILL and return its exit code."""
        self.process.kill()
        return self.end()

    def end(self) -> int:
        """Wait for its end and return its exit code (minus the signal)."""
        self.process.join(GUARD_S)
        code = self.process.exitcode
        assert code is not None, f"still running after {GUARD_S} s"
        self._reports.close()
        return code


class _Pipe:
    def __init__(self, reports: Connection) -> None:
        self._reports = reports

    def send_progress(self, progress: Progress) -> None:
        self._reports.send(progress)

    def take_directive(self) -> None:
        return None


def _in_child(
    job: dict[str, Any], campaign_dir: str, number: int, where: Slot, reports: Connection, options: dict[str, Any]
) -> None:
    save_always(options.get("save_always", False))
    if kill_at := options.get("kill_at"):
        die_at_file_operation(kill_at)
    context = slot.SlotContext(where, attempt=number, name=job["name"], workdir=Path.cwd(), channel=_Pipe(reports))
    slot.enter(context)
    run_md(job, campaign_dir)


def save_always(yes: bool) -> None:
    """Make OpenMM attempts of this process save at each iteration, however long that takes."""
    if yes:
        from mdcampaign.engines import openmm_run

        openmm_run.CHECKPOINT_SHARE = float("inf")


def die_at_file_operation(number: int) -> None:
    """Make this process kill itself just before its n-th operation that changes what is durable on disk."""
    left = number

    def fatal(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink", "mkdir"):
        setattr(os, name, fatal(getattr(os, name)))
