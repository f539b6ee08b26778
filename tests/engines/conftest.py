"""Real, tiny systems for the engines: alanine dipeptide, 22 atoms in implicit solvent, and a box of water."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attempts import Campaign

PDB = Path(__file__).parents[2] / "configs" / "alanine.pdb"
FORCEFIELD = ("amber14-all.xml", "implicit/gbn2.xml")
TORSIONS = {"phi": (4, 6, 8, 14), "psi": (6, 8, 14, 16)}

MakeJob = Callable[..., dict[str, Any]]


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    """An empty campaign directory with a slot of one thread."""
    return Campaign(tmp_path)


@pytest.fixture(scope="session")
def alanine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """System and State XML of alanine dipeptide: minimised, with velocities; jobs from it start at once."""
    import openmm as mm
    from openmm import app

    pdb = app.PDBFile(str(PDB))
    system = app.ForceField(*FORCEFIELD).createSystem(pdb.topology, constraints=app.HBonds)
    context = mm.Context(system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("Reference"))
    context.setPositions(pdb.positions)
    context.applyConstraints(1e-6)
    context.setVelocitiesToTemperature(300, 1)
    return _written(tmp_path_factory.mktemp("alanine"), system, context)


@pytest.fixture(scope="session")
def water(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """System and State XML of a box of water of 1.6 nm with PME."""
    import openmm as mm
    from openmm import app, unit

    field = app.ForceField("amber14/tip3p.xml")
    box = app.Modeller(app.Topology(), [] * unit.nanometer)
    box.addSolvent(field, boxSize=mm.Vec3(1.6, 1.6, 1.6) * unit.nanometer)
    cutoff = 0.7 * unit.nanometer
    system = field.createSystem(box.topology, nonbondedMethod=app.PME, nonbondedCutoff=cutoff, constraints=app.HBonds)
    context = mm.Context(system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("CPU"), {"Threads": "1"})
    context.setPositions(box.positions)
    mm.LocalEnergyMinimizer.minimize(context, maxIterations=50)
    context.setVelocitiesToTemperature(300, 1)
    return _written(tmp_path_factory.mktemp("water"), system, context)


def _written(directory: Path, system: Any, context: Any) -> dict[str, str]:
    import openmm as mm

    state = context.getState(positions=True, velocities=True)
    files = {"system_xml": directory / "system.xml", "state_xml": directory / "state.xml"}
    files["system_xml"].write_text(mm.XmlSerializer.serialize(system))
    files["state_xml"].write_text(mm.XmlSerializer.serialize(state))
    return {name: str(path) for name, path in files.items()}


@pytest.fixture
def openmm_job(alanine: dict[str, str]) -> MakeJob:
    """Return a function that makes an OpenMM job; keywords of the engine and of the job may be mixed."""
    of_job = ("name", "group", "steps", "iteration_steps", "replica", "seed")

    def make(**changes: Any) -> dict[str, Any]:
        engine: dict[str, Any] = {
            "kind": "openmm",
            **alanine,
            "minimise": False,
            "frame_steps": 10,
            "platform": "Reference",
            "torsions": TORSIONS,
        }
        job: dict[str, Any] = {"name": "job", "steps": 100, "iteration_steps": 20, "engine": engine}
        for key, value in changes.items():
            (job if key in of_job else engine)[key] = value
        return job

    return make
