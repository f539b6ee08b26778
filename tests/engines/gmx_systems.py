"""Small real GROMACS systems, built in seconds from what the Debian package holds: no download.

water: 134 SPC/E molecules, about 4,000 steps a second on one core
ala:   alanine dipeptide in SPC/E water, 1,612 atoms, constraints by LINCS
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

MDP = {
    "integrator": "md",
    "dt": 0.002,
    "nsteps": 4000,
    "nstlog": 100,
    "nstenergy": 100,
    "nstcalcenergy": 100,
    "nstxout-compressed": 100,
    "cutoff-scheme": "Verlet",
    "coulombtype": "PME",
    "rcoulomb": 0.7,
    "rvdw": 0.7,
    "tcoupl": "v-rescale",
    "tc-grps": "System",
    "tau-t": 0.5,
    "ref-t": 300,
    "ld-seed": 2024,
    "gen-vel": "yes",
    "gen-temp": 300,
    "gen-seed": 7,
    "constraints": "h-bonds",
}
EM = {
    "integrator": "steep",
    "nsteps": 200,
    "cutoff-scheme": "Verlet",
    "coulombtype": "PME",
    "rcoulomb": 0.7,
    "rvdw": 0.7,
}

WATER = """
#include "amber99sb-ildn.ff/forcefield.itp"
#include "amber99sb-ildn.ff/spce.itp"
[ system ]
water
[ molecules ]
"""

ALANINE = """\
ATOM      1  CH3 ACE     1       2.000   2.090   0.000
ATOM      2  C   ACE     1       3.427   2.641   0.000
ATOM      3  O   ACE     1       4.391   1.877   0.000
ATOM      4  N   ALA     2       3.555   3.970   0.000
ATOM      5  CA  ALA     2       4.853   4.614   0.000
ATOM      6  CB  ALA     2       5.661   4.221  -1.232
ATOM      7  C   ALA     2       4.713   6.129   0.000
ATOM      8  O   ALA     2       3.601   6.653   0.000
ATOM      9  N   NME     3       5.846   6.835   0.000
ATOM     10  CH3 NME     3       5.846   8.284   0.000
TER
END
"""


class Systems:
    """Run input files in one directory, each built when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        if not shutil.which("gmx"):
            raise RuntimeError("these tests need `gmx` on the PATH: apt-get install gromacs gromacs-data")
        self.directory = directory
        (directory / "water.top").write_text(WATER)
        (directory / "ala.pdb").write_text(ALANINE)

    def tpr(self, system: str, name: str = "md", **mdp: str | float) -> Path:
        """Return the tpr of a system ("water", "ala"), `mdp` changing options ("_" for "-"); `name` names the file."""
        path = self.directory / f"{system}-{name}.tpr"
        if not path.is_file():
            self._relaxed(system)
            self._grompp(system, path, f"{system}-em.gro", MDP | {k.replace("_", "-"): v for k, v in mdp.items()})
        return path

    def minimisation(self, system: str, name: str = "em", **mdp: str | float) -> Path:
        """Return a tpr that minimises a system by steepest descent."""
        path = self.directory / f"{system}-{name}.tpr"
        self._relaxed(system)
        if not path.is_file():
            self._grompp(system, path, f"{system}.gro", EM | mdp)
        return path

    def _relaxed(self, system: str) -> None:
        if (self.directory / f"{system}-em.gro").is_file():
            return
        if system == "water":
            self._gmx("solvate", "-cs", "spc216.gro", "-box", "1.6", "1.6", "1.6", "-o", "water.gro", "-p", "water.top")
        else:
            names = ("-o", "ala-p.gro", "-p", "ala.top", "-i", "ala-posre.itp")
            self._gmx("pdb2gmx", "-f", "ala.pdb", *names, "-ff", "amber99sb-ildn", "-water", "spce", "-ignh")
            self._gmx("editconf", "-f", "ala-p.gro", "-o", "ala-b.gro", "-d", "1.0", "-bt", "dodecahedron")
            self._gmx("solvate", "-cp", "ala-b.gro", "-cs", "spc216.gro", "-o", "ala.gro", "-p", "ala.top")
        self._grompp(system, self.directory / f"{system}-em.tpr", f"{system}.gro", EM)
        self._gmx("mdrun", "-deffnm", f"{system}-em", "-ntmpi", "1", "-ntomp", "1", "-pin", "off")

    def _grompp(self, system: str, tpr: Path, structure: str, mdp: dict[str, str | float]) -> None:
        (self.directory / "options.mdp").write_text("".join(f"{key} = {value}\n" for key, value in mdp.items()))
        files = ("-f", "options.mdp", "-c", structure, "-p", f"{system}.top", "-o", tpr.name, "-po", "out.mdp")
        self._gmx("grompp", *files, "-maxwarn", "5")

    def _gmx(self, *arguments: str) -> None:
        done = subprocess.run(
            ["gmx", "-quiet", "-nobackup", *arguments],
            cwd=self.directory,
            env={**os.environ, "GMX_MAXBACKUP": "-1", "GMX_SUPPRESS_DUMP": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(f"gmx {' '.join(arguments)}: {done.stderr[-2000:]}")
