"""First passages of alanine dipeptide: an ensemble that stops each replica when it has told what it can tell.

Each replica starts in the extended basin (C7eq and its neighbours) and is followed until it first reaches alpha-R.
There it is stopped, and the time that it did not need goes to replicas that have not crossed yet. The result is the
rate of crossing with its standard error, from crossings and censored times alike.

Run it with `mdcampaign run configs/quickstart.yaml`. Two cores need about two minutes. On the way an urgent job
arrives and makes a bulk job yield, and one runner is killed on purpose; the log shows that neither costs a frame.
"""

from __future__ import annotations

import math
import os
import platform
import random
import shutil
import signal
from pathlib import Path
from typing import Any

from colmena.thinker import agent
from water import water_jobs

from mdcampaign.engines import stitch
from mdcampaign.engines.inputs import OpenMM
from mdcampaign.jobs import MDJob, Outcome, Progress
from mdcampaign.steering.handlers import ReportInfo, on_progress, on_result
from mdcampaign.steering.thinker import CampaignThinker

DT_PS = 0.002
ITERATION_STEPS = 250
ALANINE = str(Path(__file__).resolve().parent.parent / "configs" / "alanine.pdb")
PHI, PSI = (4, 6, 8, 14), (6, 8, 14, 16)
"""Atoms of the two torsions in configs/alanine.pdb, counted from 0."""


def extended(phi: float, psi: float) -> bool:
    """Tell whether the torsions (degrees) lie in the extended basin: C7eq and what joins it without a barrier."""
    return phi < 0 and (psi > 60 or psi < -160)


def alpha_r(phi: float, psi: float) -> bool:
    """Tell whether the torsions (degrees) lie in the core of the right-handed helical basin."""
    return -120 < phi < -30 and -60 < psi < 0


def first_passage(times_ps: list[float], phi: list[float], psi: list[float]) -> tuple[float, bool]:
    """Return the time (ps) from the first extended frame to the first alpha-R frame after it, and whether it came.

    Without a crossing the time is that to the last frame: censored.
    """
    begin = next((t for t, a, b in zip(times_ps, phi, psi) if extended(a, b)), None)
    if begin is None:
        return 0.0, False
    for t, a, b in zip(times_ps, phi, psi):
        if t > begin and alpha_r(a, b):
            return t - begin, True
    return times_ps[-1] - begin, False


class Ensemble(CampaignThinker):
    """Follows replicas to their first passage.

    Args:
        pdb: structure of alanine dipeptide.
        replicas: number of replicas.
        shortest_ps, longest_ps: their target lengths lie between these, many short and few long.
        seed: of the lengths and of every simulation.
        kill_one_runner: kill one runner with SIGKILL, to show what that costs.
        water_replicas: GROMACS jobs in the same queue, where `gmx` is on the PATH.
    """

    def __init__(
        self,
        queues: Any,
        *,
        pdb: str = ALANINE,
        replicas: int = 24,
        shortest_ps: float = 15.0,
        longest_ps: float = 60.0,
        seed: int = 1,
        kill_one_runner: bool = False,
        water_replicas: int = 3,
    ) -> None:
        super().__init__(queues)
        self.pdb, self.seed = pdb, seed
        self.replicas, self.water_replicas = replicas, water_replicas
        self.lengths_ps = (shortest_ps, longest_ps)
        self.kill_pending = kill_one_runner
        self.urgent_pending = True
        self.freed_steps = 0
        self.crossing: set[str] = set()
        self.extended_to: dict[str, int] = {}
        self.passages: list[tuple[float, bool]] = []
        self.pids: dict[str, int] = {}
        self.observe(self.remember_pid)

    # ------------------------------------------------------------ what is submitted

    @agent(startup=True)
    def begin(self) -> None:
        """Submit the ensemble: unequal lengths, three priorities."""
        dice = random.Random(self.seed)
        shortest, longest = self.lengths_ps
        for n in range(self.replicas):
            length_ps = shortest * (longest / shortest) ** dice.random()
            self.submit(self.replica(n, length_ps, priority=n % 3))
        if shutil.which("gmx"):
            self.submit(water_jobs(self.campaign_dir / "inputs", self.water_replicas, self.seed))

    def replica(self, n: int, length_ps: float, priority: float, group: str = "ala") -> MDJob:
        """Return one replica, a copy of all others but for its seeds and its length."""
        frames = max(1, round(length_ps / DT_PS / ITERATION_STEPS))
        engine = OpenMM(
            pdb=self.pdb,
            forcefield=("amber14-all.xml", "implicit/gbn2.xml"),
            temperature_k=300,
            friction_per_ps=1,
            dt_ps=DT_PS,
            frame_steps=ITERATION_STEPS,
            torsions={"phi": PHI, "psi": PSI},
            platform="CPU",
        )
        return MDJob(
            name=f"r{n:02d}",
            group=group,
            engine=engine,
            steps=frames * ITERATION_STEPS,
            iteration_steps=ITERATION_STEPS,
            replica=n,
            seed=self.seed,
            priority=priority,
        )

    # ------------------------------------------------------------ steering

    @on_progress(group="ala")
    def follow(self, job: str, progress: Progress, info: ReportInfo) -> None:
        """Stop a replica that has crossed; give one that is about to end the time that others did not need."""
        phi, psi = progress.observables["phi"], progress.observables["psi"]
        if alpha_r(phi, psi) and job not in self.crossing:
            self.crossing.add(job)
            self.freed_steps += progress.target_step - progress.step
            self.stop(job)
        elif job not in self.crossing and progress.target_step - progress.step <= 4 * ITERATION_STEPS:
            self.lengthen(job, progress.target_step)
        self.disturb(job, progress)

    def lengthen(self, job: str, target_step: int) -> None:
        """Extend a replica that has not crossed, as far as the freed time goes and 20 ps at the most."""
        grant = min(self.freed_steps, round(20 / DT_PS)) // ITERATION_STEPS * ITERATION_STEPS
        if grant and self.extended_to.get(job, 0) <= target_step:
            self.freed_steps -= grant
            self.extended_to[job] = target_step + grant
            self.extend(job, target_step + grant)

    def disturb(self, job: str, progress: Progress) -> None:
        """Once a third of the replicas has ended: an urgent job, and a kill if that is asked for."""
        ended = sum(name.startswith("ala/") for name in self.outcomes)
        if self.urgent_pending and ended >= self.replicas // 3:
            self.urgent_pending = False
            print("An urgent job arrives: one bulk job will yield to it.", flush=True)
            self.submit(self.replica(self.replicas, 10.0, priority=100, group="urgent"))
        if self.kill_pending and ended >= self.replicas // 2 and progress.saved_step and job in self.pids:
            self.kill_pending = False
            print(f"Killing the runner of {job} (kill -9 {self.pids[job]}), on purpose.", flush=True)
            os.kill(self.pids[job], signal.SIGKILL)

    def remember_pid(self, event: dict[str, Any]) -> None:
        """Keep the process of each job that runs on this machine, for the kill on purpose."""
        if event["event"] == "placed":
            self.pids.pop(event["job"], None)
        elif event["event"] == "started" and event.get("node", platform.node()) == platform.node():
            self.pids[event["job"]] = event["pid"]
        elif event["event"] == "ended":
            self.pids.pop(event["job"], None)

    # ------------------------------------------------------------ the result

    @on_result(group="ala")
    def collect(self, job: str, outcome: Outcome, result: Any) -> None:
        """Take the passage from what was written, not from the reports, which may skip frames."""
        if outcome.kind in ("done", "stopped"):
            rows = stitch.read_csv(outcome.directory)
            self.passages.append(first_passage(rows["time_ps"], rows["phi"], rows["psi"]))

    def findings(self) -> dict[str, Any]:
        """Return the rate of crossing: crossings / time at risk, its standard error rate / sqrt(crossings).

        The maximum-likelihood estimate for exponential waiting times with censoring (Bartholomew, Technometrics 5,
        361 (1963)); right whatever the rule by which replicas were stopped or extended, as the rule saw only the past.
        """
        crossings = sum(crossed for _, crossed in self.passages)
        at_risk_ps = sum(time_ps for time_ps, _ in self.passages)
        found: dict[str, Any] = {
            "crossings": crossings,
            "censored": len(self.passages) - crossings,
            "at_risk_ps": round(at_risk_ps, 1),
        }
        if crossings and at_risk_ps:
            mean_ps = at_risk_ps / crossings
            found["rate_per_ns"] = round(1000 / mean_ps, 2)
            found["rate_error_per_ns"] = round(1000 / mean_ps / math.sqrt(crossings), 2)
            found["mean_first_passage_ps"] = round(mean_ps, 1)
            found["mean_first_passage_error_ps"] = round(mean_ps / math.sqrt(crossings), 1)
        return found
