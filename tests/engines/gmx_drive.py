"""What tests of the GROMACS engine share: a job, its attempts, and who answers the reports."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from mdcampaign.engines import stitch
from mdcampaign.engines.gromacs import GROMACSEngine
from mdcampaign.engines.inputs import GROMACS
from mdcampaign.engines.manifest import Manifest
from mdcampaign.jobs import CONTINUE, Directive, MDJob, Outcome, Progress, Slot

CPU = Slot("node", "cpu", cores=(0,), threads=1)
EXACT = ("-reprod", "-cpt", "0.003")
"""Bitwise arithmetic, and a checkpoint about every 0.2 s."""

Answer = Callable[[Progress], Directive]


@dataclass
class Runs:
    """One job in a directory of its own, run attempt by attempt as the driver would."""

    job_dir: Path
    tpr: Path
    steps: int = 4000
    gmx: str = "gmx"
    mdrun_args: tuple[str, ...] = EXACT
    slot: Slot = CPU
    iteration_steps: int = 200
    grace_s: float = 60.0
    reports: list[Progress] = field(default_factory=list)

    def job(self) -> MDJob:
        """Return the job with the present target length."""
        engine = GROMACS(tpr=self.tpr, gmx=self.gmx, mdrun_args=self.mdrun_args)
        return MDJob(name="job", steps=self.steps, iteration_steps=self.iteration_steps, engine=engine)

    def attempt(self, answer: Answer = lambda progress: CONTINUE, workdir: Path | None = None) -> Outcome:
        """Run the next attempt, answering each report; return its outcome."""
        workdir = workdir or self.new_directory()
        running = GROMACSEngine(grace_s=self.grace_s).run(self.job(), self.slot, workdir)
        self.reports = []
        try:
            progress = next(running)
            while True:
                self.reports.append(progress)
                progress = running.send(answer(progress))
        except StopIteration as end:
            return end.value

    def closed_when(self, condition: Callable[[Progress], bool]) -> None:
        """Run the next attempt and close the generator at the first report that fulfils the condition."""
        running = GROMACSEngine(grace_s=self.grace_s).run(self.job(), self.slot, self.new_directory())
        while not condition(next(running)):
            pass
        running.close()

    def new_directory(self) -> Path:
        """Make the directory of the next attempt."""
        workdir = self.job_dir / f"attempt-{len(list(self.job_dir.glob('attempt-*'))) + 1}"
        workdir.mkdir(parents=True)
        return workdir

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is on disk."""
        manifest = Manifest.load(self.job_dir)
        assert manifest
        return manifest

    def trajectory(self) -> bytes:
        """Return the stitched trajectory."""
        out = self.job_dir / "stitched.xtc"
        stitch.write(self.job_dir, out)
        return out.read_bytes()

    def structure(self) -> bytes:
        """Return the final structure."""
        return (self.job_dir / self.manifest.parts[-1].files["structure"]).read_bytes()


def at(step: int, directive: Directive) -> Answer:
    """Answer with a directive at the first report from a step on."""
    return lambda progress: directive if progress.step >= step else CONTINUE


def signal_when(number: signal.Signals, condition: Callable[[Progress], bool]) -> Answer:
    """Send a signal to mdrun at the first report that fulfils the condition, and let the engine find out."""
    sent: list[int] = []

    def answer(progress: Progress) -> Directive:
        if not sent and condition(progress):
            sent.append(mdrun_pid())
            os.kill(sent[0], number)
        return CONTINUE

    return answer


def saved(progress: Progress) -> bool:
    """Whether a checkpoint of this attempt has been accepted."""
    return progress.saved_step > 0


def mdrun_pid() -> int:
    """Return the process id of the one mdrun below this process."""
    (pid,) = [child.pid for child in psutil.Process().children() if "mdrun" in child.cmdline()]
    return pid


def mdruns() -> list[psutil.Process]:
    """Return the mdruns that live below this process."""
    return [child for child in psutil.Process().children(recursive=True) if "mdrun" in child.cmdline()]


def wrapper(path: Path, mdrun: str) -> str:
    """Write a program that is gmx, but runs a shell fragment in place of mdrun ("$@": the arguments of gmx)."""
    path.write_text(f'#!/bin/sh\ncase " $* " in *" mdrun "*) {mdrun} ;; *) exec gmx "$@" ;; esac\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
