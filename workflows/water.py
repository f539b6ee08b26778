"""A small GROMACS ensemble: a box of SPC water, made with what comes with GROMACS itself.

One run input file per replica, each with velocities and noise of its own, made once and kept: `gmx grompp` writes
another file each time, and a job's identity is the content of its file.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from mdcampaign.engines.inputs import GROMACS
from mdcampaign.jobs import MDJob

STEPS = 3000

TOPOLOGY = """\
#include "oplsaa.ff/forcefield.itp"
#include "oplsaa.ff/spc.itp"
[ system ]
SPC water
[ molecules ]
"""

BOX_NM = "1.86206"
"""The box of spc216.gro, which comes with GROMACS: filled with itself it stays as equilibrated as it is."""

PARAMETERS = """\
integrator = md
dt = 0.002
nsteps = {steps}
nstlog = 100
nstenergy = 100
nstcalcenergy = 100
nstxout-compressed = 100
coulombtype = PME
rcoulomb = 0.9
rvdw = 0.9
tcoupl = v-rescale
tc-grps = System
tau-t = 0.5
ref-t = 300
ld-seed = {seed}
gen-vel = yes
gen-temp = 300
gen-seed = {seed}
"""


def water_jobs(directory: Path, replicas: int, seed: int) -> list[MDJob]:
    """Return jobs of 6 ps each for `replicas` copies of a 216-molecule box; files are made in `directory`.

    Raises:
        subprocess.CalledProcessError: grompp refuses; its words are in `stderr`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    return [
        MDJob(
            name=f"w{n}",
            group="water",
            engine=GROMACS(tpr=run_input(directory, n, seed + n)),
            steps=STEPS,
            iteration_steps=500,
            priority=1,
        )
        for n in range(replicas)
    ]


def run_input(directory: Path, n: int, seed: int, steps: int = STEPS) -> Path:
    """Return the run input file of a replica, made if it is not there."""
    tpr = directory / f"w{n}.tpr"
    if not tpr.exists():
        (directory / "water.top").write_text(TOPOLOGY)
        (directory / f"w{n}.mdp").write_text(PARAMETERS.format(steps=steps, seed=seed))
        box = ["-box", BOX_NM, BOX_NM, BOX_NM]
        gmx(directory, "solvate", "-cs", "spc216.gro", *box, "-o", "water.gro", "-p", "water.top")
        files = ["-f", f"w{n}.mdp", "-p", "water.top", "-c", "water.gro", "-o", f".w{n}.tpr", "-po", f"w{n}.out.mdp"]
        gmx(directory, "grompp", *files)
        (directory / f".w{n}.tpr").rename(tpr)
    return tpr


def gmx(directory: Path, *arguments: str) -> None:
    """Run a GROMACS command in `directory`."""
    command = ["gmx", "-quiet", "-nobackup", *arguments]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=60)
