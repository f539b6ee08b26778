"""What an OpenMM attempt writes while it runs: frames and energies, on one grid of steps."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from math import atan2, degrees, isfinite
from pathlib import Path
from typing import Any

import numpy as np
import openmm as mm
from numpy.typing import NDArray
from openmm import app, unit

from mdcampaign.engines import dcd
from mdcampaign.engines.inputs import OpenMM
from mdcampaign.engines.openmm_system import Model
from mdcampaign.errors import InputFailed, Unstable

GAS_CONSTANT = 8.31446261815324e-3
"""kJ/(mol K)"""
AMU_PER_NM3 = 1.66053906892
"""kg/m3"""
FAR_NM = 1e5
"""No particle gets so far but in a blow-up; trajectory formats hold little more."""


@dataclass(frozen=True)
class Sample:
    """What is measured at a step. Positions (n, 3) and box vectors (3, 3) in nm, molecules kept whole."""

    step: int
    time_ps: float
    positions: NDArray[Any]
    box: NDArray[Any] | None
    potential_kj_mol: float
    kinetic_kj_mol: float
    observables: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise Unstable where the simulation has blown up; the Reference platform says nothing of it."""
        if not (np.abs(self.positions) < FAR_NM).all():
            raise Unstable(f"particle coordinates are NaN or beyond {FAR_NM:.0f} nm at step {self.step}")
        if not (isfinite(self.potential_kj_mol) and isfinite(self.kinetic_kj_mol)):
            raise Unstable(f"the energy is NaN or infinite at step {self.step}")


def measure(context: mm.Context, model: Model, inputs: OpenMM, step: int) -> Sample:
    """Measure the state at `step`: energies, temperature, box, and the job's torsions in degrees."""
    periodic = model.system.usesPeriodicBoundaryConditions()
    state = context.getState(positions=True, energy=True, enforcePeriodicBox=periodic)
    positions = state.getPositions(asNumpy=True).value_in_unit(unit.nanometer)
    kinetic = state.getKineticEnergy().value_in_unit(unit.kilojoule_per_mole)
    potential = state.getPotentialEnergy().value_in_unit(unit.kilojoule_per_mole)
    seen = {
        "potential_kj_mol": potential,
        "kinetic_kj_mol": kinetic,
        "temperature_k": 2 * kinetic / (GAS_CONSTANT * max(model.degrees_of_freedom, 1)),
    }
    box = None
    if periodic:
        box = state.getPeriodicBoxVectors(asNumpy=True).value_in_unit(unit.nanometer)
        volume = float(abs(np.linalg.det(box)))
        seen |= {"volume_nm3": volume, "density_kg_m3": model.mass_amu / volume * AMU_PER_NM3}
    seen |= {name: torsion(positions[list(atoms)]) for name, atoms in inputs.torsions.items()}
    return Sample(step, round(step * inputs.dt_ps, 9), positions, box, potential, kinetic, seen)


def torsion(four: NDArray[Any]) -> float:
    """Return the torsion angle of four points (4, 3), in degrees, -180 to 180, IUPAC's sign."""
    first, axis, last = four[1] - four[0], four[2] - four[1], four[3] - four[2]
    normal, other = np.cross(first, axis), np.cross(axis, last)
    return degrees(atan2(np.linalg.norm(axis) * (first @ other), normal @ other))


class Output:
    """The files of one attempt. What was written is on the disk only after `sync`."""

    def __init__(self, workdir: Path, model: Model, inputs: OpenMM, first_frame: int) -> None:
        self._inputs = inputs
        self._paths = {"trajectory": workdir / f"trajectory.{inputs.trajectory}", "energies": workdir / "energies.csv"}
        self._frames: dcd.Writer | _XTCWriter
        if inputs.trajectory == "xtc":
            self._frames = _XTCWriter(self._paths["trajectory"], model.topology, inputs, first_frame)
        else:
            periodic = model.system.usesPeriodicBoundaryConditions()
            header = dcd.Header(model.n_particles, first_frame, inputs.frame_steps, inputs.dt_ps, periodic)
            self._frames = dcd.Writer(self._paths["trajectory"], header)
        self._energies = self._paths["energies"].open("x")
        self._columns: list[str] = []

    def files(self, job_dir: Path) -> dict[str, str]:
        """Return the paths by role, relative to the job's directory."""
        return {role: str(path.relative_to(job_dir)) for role, path in self._paths.items()}

    def write(self, sample: Sample) -> None:
        """Append a frame and a row."""
        self._frames.write(sample.positions, sample.box)
        if not self._columns:
            self._columns = list(sample.observables)
            self._energies.write(",".join(["step", "time_ps", *self._columns]) + "\n")
        values = (sample.step, sample.time_ps, *(float(sample.observables[name]) for name in self._columns))
        self._energies.write(",".join(map(repr, values)) + "\n")

    def sync(self) -> None:
        """Put on the disk what was written."""
        os.fsync(self._frames.flush())
        self._energies.flush()
        os.fsync(self._energies.fileno())

    def close(self) -> None:
        """Close the files."""
        self._frames.close()
        self._energies.close()


class _XTCWriter:
    """OpenMM's XTC writer, which opens the file for each frame, with a descriptor to sync it by."""

    def __init__(self, path: Path, topology: app.Topology, inputs: OpenMM, first_frame: int) -> None:
        if not hasattr(app, "XTCFile"):
            raise InputFailed("engine.trajectory: this OpenMM writes no XTC (got 'xtc'). Choose 'dcd'.")
        self._file = path.open("xb")
        self._writer = app.XTCFile(str(path), topology, inputs.dt_ps, first_frame, inputs.frame_steps)

    def write(self, positions_nm: NDArray[Any], box_nm: NDArray[Any] | None) -> None:
        vectors = None if box_nm is None else [mm.Vec3(*row) for row in box_nm]
        self._writer.writeModel(positions_nm, periodicBoxVectors=vectors)

    def flush(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()
