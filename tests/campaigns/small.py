"""Thinkers that tests run through campaign files."""

from __future__ import annotations

import os
from pathlib import Path

from colmena.thinker import agent

from mdcampaign.engines.inputs import OpenMM, Synthetic
from mdcampaign.jobs import MDJob, Progress
from mdcampaign.steering.handlers import on_progress
from mdcampaign.steering.thinker import CampaignThinker


class Small(CampaignThinker):
    """A few synthetic jobs."""

    def __init__(self, queues, *, jobs: int = 6, steps: int = 20, step_s: float = 0.01, fail: str | None = None):
        super().__init__(queues)
        self.engine = Synthetic(step_s=step_s)
        self.count, self.steps, self.failing = jobs, steps, fail

    @agent(startup=True)
    def begin(self) -> None:
        for n in range(self.count):
            self.submit(MDJob(name=f"j{n}", group="small", engine=self.engine, steps=self.steps, iteration_steps=2))
        if self.failing:
            engine = Synthetic(fail=self.failing)
            self.submit(MDJob(name="bad", group="small", engine=engine, steps=5, iteration_steps=1))

    def findings(self) -> dict:
        return {"pid": os.getpid()}


class Peptide(CampaignThinker):
    """Two short runs of alanine dipeptide."""

    def __init__(self, queues, *, steps: int = 4000, frame_steps: int = 100):
        super().__init__(queues)
        self.steps, self.frame_steps = steps, frame_steps

    @agent(startup=True)
    def begin(self) -> None:
        pdb = Path(__file__).resolve().parents[2] / "configs" / "alanine.pdb"
        engine = OpenMM(
            pdb=pdb,
            forcefield=("amber14-all.xml", "implicit/gbn2.xml"),
            frame_steps=self.frame_steps,
            platform="CPU",
        )
        self.submit(
            [
                MDJob(name=f"r{n}", group="ala", engine=engine, steps=self.steps, replica=n, iteration_steps=100)
                for n in range(2)
            ]
        )


class Crashing(Small):
    """A handler that raises at the third report (K1)."""

    reports_seen = 0

    @on_progress
    def look(self, job: str, progress: Progress, info) -> None:
        self.reports_seen += 1
        if self.reports_seen == 3:
            raise RuntimeError("the handler is broken")
