"""From a job's inputs to an OpenMM System, and to a Context on the slot's device.

Imports OpenMM; `mdcampaign.engines.openmm` imports this only when a job runs.
"""

from __future__ import annotations

import hashlib
import platform as machine
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import openmm as mm
from openmm import app, unit

from mdcampaign.engines.inputs import OpenMM
from mdcampaign.errors import FAILURES, FailureKind, InputFailed
from mdcampaign.jobs import MDJob, Slot

INTEGRATOR = "LangevinMiddleIntegrator"
RESERVED = frozenset(
    ("step", "time_ps", "potential_kj_mol", "kinetic_kj_mol", "temperature_k", "volume_nm3", "density_kg_m3")
)
"""Columns of the energies; a torsion needs another name."""


@dataclass
class Model:
    """What is simulated: the System, a topology for the file formats, and the state to start from."""

    system: mm.System
    topology: app.Topology
    positions: Any
    velocities: Any = None
    box: Any = None

    @property
    def n_particles(self) -> int:
        """The number of particles, virtual sites included."""
        return int(self.system.getNumParticles())

    @cached_property
    def sha256(self) -> str:
        """SHA-256, in hex, of the serialised System."""
        return hashlib.sha256(mm.XmlSerializer.serialize(self.system).encode()).hexdigest()

    @cached_property
    def mass_amu(self) -> float:
        """The mass of all particles."""
        return sum(float(self.system.getParticleMass(n)._value) for n in range(self.n_particles))

    @cached_property
    def degrees_of_freedom(self) -> int:
        """Of the kinetic energy: three a particle with mass, less constraints and a removed centre-of-mass motion."""
        massive = [self.system.getParticleMass(n)._value > 0 for n in range(self.n_particles)]
        constrained = [self.system.getConstraintParameters(n)[:2] for n in range(self.system.getNumConstraints())]
        still = any(isinstance(force, mm.CMMotionRemover) for force in self.system.getForces())
        return int(3 * sum(massive) - sum(massive[i] or massive[j] for i, j in constrained) - 3 * still)


def load(job: MDJob) -> Model:
    """Read a job's inputs.

    Raises:
        InputFailed: a file is missing or is not what it should be, or options do not fit each other.
    """
    inputs = job.engine
    assert isinstance(inputs, OpenMM)
    model = _from_forcefield(inputs) if inputs.system_xml is None else _from_xml(inputs, inputs.system_xml)
    if inputs.state_xml:
        _start_from(model, inputs.state_xml)
    if (n := len(model.positions)) != model.n_particles:
        raise InputFailed(f"the System has {model.n_particles} particles, the starting positions are {n}")
    for name, atoms in inputs.torsions.items():
        if not all(0 <= atom < model.n_particles for atom in atoms):
            raise InputFailed(f"engine.torsions.{name}: atoms are 0 to {model.n_particles - 1} (got {atoms})")
        if not re.fullmatch(r"[^\W\d][\w.-]*", name) or name in RESERVED:
            raise InputFailed(f"engine.torsions: {name!r} cannot name a column. Use a word such as 'phi'.")
    if inputs.pressure_bar is not None:
        _add_barostat(model.system, inputs, job.random_seed("barostat"))
    return model


def _from_forcefield(inputs: OpenMM) -> Model:
    pdb = _read("engine.pdb", app.PDBFile, str(inputs.pdb))
    field = _read("engine.forcefield", app.ForceField, *inputs.forcefield)
    system = _read(
        "engine.pdb with engine.forcefield",
        field.createSystem,
        pdb.topology,
        nonbondedMethod=getattr(app, inputs.nonbonded),
        nonbondedCutoff=inputs.cutoff_nm * unit.nanometer,
        constraints=None if inputs.constraints == "None" else getattr(app, inputs.constraints),
        hydrogenMass=inputs.hydrogen_mass_amu and inputs.hydrogen_mass_amu * unit.amu,
    )
    return Model(system, pdb.topology, pdb.positions)


def _from_xml(inputs: OpenMM, path: Path) -> Model:
    system = _deserialise("engine.system_xml", path, mm.System)
    if inputs.pdb:
        pdb = _read("engine.pdb", app.PDBFile, str(inputs.pdb))
        return Model(system, pdb.topology, pdb.positions)
    return Model(system, _bare_topology(system), [])


def _start_from(model: Model, path: Path) -> None:
    state = _deserialise("engine.state_xml", path, mm.State)
    model.positions = _read("engine.state_xml", state.getPositions)
    model.box = state.getPeriodicBoxVectors() if model.system.usesPeriodicBoundaryConditions() else None
    try:
        model.velocities = state.getVelocities()
    except mm.OpenMMException:  # saved without them
        model.velocities = None


def _deserialise(field: str, path: Path, wanted: type) -> Any:
    thing = _read(field, mm.XmlSerializer.deserialize, _read(field, path.read_text))
    if not isinstance(thing, wanted):
        raise InputFailed(f"{field}: {path} holds a {type(thing).__name__}, not a {wanted.__name__}")
    return thing


def _read(field: str, reader: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a reader of OpenMM's. They raise whatever they meet in a bad file: all of it means bad input."""
    try:
        return reader(*args, **kwargs)
    except Exception as exc:
        text = next((str(a) for a in args if isinstance(a, str) and len(a) < 500), "")
        raise InputFailed(f"{field}: {text + ': ' if text else ''}{exc or type(exc).__name__}") from exc


def _bare_topology(system: mm.System) -> app.Topology:
    """Return a topology that knows no more than the number of atoms and the box, for the writers of frames."""
    topology = app.Topology()
    residue = topology.addResidue("", topology.addChain())
    for _ in range(system.getNumParticles()):
        topology.addAtom("", None, residue)
    if system.usesPeriodicBoundaryConditions():
        topology.setPeriodicBoxVectors(system.getDefaultPeriodicBoxVectors())
    return topology


def _add_barostat(system: mm.System, inputs: OpenMM, seed: int) -> None:
    if not system.usesPeriodicBoundaryConditions():
        raise InputFailed(
            f"engine.pressure_bar: a system without a periodic box has no pressure (got {inputs.pressure_bar}). "
            "Leave it out, or choose nonbonded='PME'."
        )
    if any("Barostat" in force.getName() for force in system.getForces()):
        raise InputFailed("engine.pressure_bar: engine.system_xml has a barostat already. Leave pressure_bar out.")
    barostat = mm.MonteCarloBarostat(inputs.pressure_bar * unit.bar, inputs.temperature_k * unit.kelvin)
    barostat.setRandomNumberSeed(seed)
    system.addForce(barostat)


def make_context(model: Model, inputs: OpenMM, slot: Slot, seed: int) -> mm.Context:
    """Return a Context on the first platform that works on the slot's device.

    Raises:
        InputFailed: the platform that the job names is not there.
        DeviceFailed: a GPU slot on which no GPU platform works; there is no silent fall to the CPU.
        OutOfMemory: one would, had it more memory.
    """
    said = []
    for name, properties in _candidates(inputs, slot):
        integrator = mm.LangevinMiddleIntegrator(inputs.temperature_k, inputs.friction_per_ps, inputs.dt_ps)
        integrator.setRandomNumberSeed(seed)
        try:
            chosen = mm.Platform.getPlatformByName(name)
        except mm.OpenMMException as exc:
            said.append(f"{name}: {exc}")
            continue
        try:
            context = mm.Context(model.system, integrator, chosen, properties)
        except mm.OpenMMException as exc:
            if inputs.platform or slot.kind == "cpu":
                raise
            said.append(f"{name}: {exc}")
            continue
        if inputs.platform or not is_cpu_in_disguise(chosen, context):
            return context
        said.append(f"{name}: only PoCL, which computes on the CPU; platform='OpenCL' would take it")
    if inputs.platform:
        raise InputFailed(
            f"engine.platform: OpenMM has no such platform here (got {inputs.platform!r}). "
            f"It has {', '.join(platforms())}. {'; '.join(mm.Platform.getPluginLoadFailures())}"
        )
    text = f"no GPU platform of OpenMM works on {slot.device}: {'; '.join(said)}"
    raise FAILURES[failure_kind(text, otherwise="device")](text)


def is_cpu_in_disguise(chosen: mm.Platform, context: mm.Context) -> bool:
    """Tell whether an OpenCL Context computes on the CPU after all."""
    name = "OpenCLPlatformName"
    return name in chosen.getPropertyNames() and chosen.getPropertyValue(context, name) == "Portable Computing Language"


def _candidates(inputs: OpenMM, slot: Slot) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield platforms with their properties, best first. The slot's mask leaves one GPU, which is number 0."""
    by_kind = ("CPU",) if slot.kind == "cpu" else ("CUDA", "HIP", "OpenCL")
    for name in (inputs.platform,) if inputs.platform else by_kind:
        if name == "CPU":
            yield name, {"Threads": str(slot.threads)}
        elif name == "Reference":
            yield name, {}
        else:
            yield name, {"DeviceIndex": "0", "Precision": inputs.precision}


def platforms() -> tuple[str, ...]:
    """Return the names of the platforms that OpenMM has loaded."""
    return tuple(mm.Platform.getPlatform(n).getName() for n in range(mm.Platform.getNumPlatforms()))


_SIGNS: tuple[tuple[FailureKind, str], ...] = (
    ("unstable", r"\bnan\b|\binfinite\b"),
    ("memory", r"out[_ ]of[_ ]memory|allocation_failure|clcreatebuffer \((-61|-4)\)"),
    ("device", r"cuda_error|hiperror|illegal[_ ]address|no compatible|deviceindex"),
)


def failure_kind(text: str, otherwise: FailureKind = "engine") -> FailureKind:
    """Return the kind of failure that a message of OpenMM, CUDA, HIP or OpenCL tells of."""
    return next((kind for kind, sign in _SIGNS if re.search(sign, text, re.IGNORECASE)), otherwise)


def facts(model: Model, inputs: OpenMM) -> dict[str, Any]:
    """Return what must agree before any saved state may go on in this Context."""
    return {
        "particles": model.n_particles,
        "integrator": INTEGRATOR,
        "temperature_k": inputs.temperature_k,
        "friction_per_ps": inputs.friction_per_ps,
        "dt_ps": inputs.dt_ps,
        "system_sha256": model.sha256,
    }


def exact_facts(context: mm.Context) -> dict[str, Any]:
    """Return what must agree, too, before a binary checkpoint may be loaded.

    The number of threads is among them: the CPU platform keeps one random stream a thread, and loads a checkpoint
    with fewer without a word.
    """
    chosen = context.getPlatform()
    names = chosen.getPropertyNames()
    wanted = {"precision": "Precision", "device": "DeviceName", "threads": "Threads"}
    found = {key: chosen.getPropertyValue(context, name) for key, name in wanted.items() if name in names}
    return {
        "openmm": mm.Platform.getOpenMMVersion(),
        "platform": chosen.getName(),
        "device": machine.machine(),
        **found,
    }


def prepare(model: Model, inputs: OpenMM, slot: Slot, context: mm.Context, seed: int) -> None:
    """Bring a fresh Context to step 0: minimised, and with velocities, unless the State gave them."""
    if model.box is not None:
        context.setPeriodicBoxVectors(*model.box)
    context.setPositions(model.positions)
    context.computeVirtualSites()
    if inputs.minimise:
        _minimise(model, context, slot.threads)
    if inputs.minimise or model.velocities is None:
        context.applyConstraints(context.getIntegrator().getConstraintTolerance())
        context.setVelocitiesToTemperature(inputs.temperature_k, seed)
    else:
        context.setVelocities(model.velocities)
    context.setTime(0)
    context.setStepCount(0)


def _minimise(model: Model, context: mm.Context, threads: int) -> None:
    """Minimise the energy; on the CPU where the Context is on OpenCL, since the minimiser crashes on PoCL."""
    if context.getPlatform().getName() != "OpenCL":
        mm.LocalEnergyMinimizer.minimize(context)
        return
    properties = {"Threads": str(threads), "DeterministicForces": "true"}
    aside = mm.Context(model.system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("CPU"), properties)
    aside.setPeriodicBoxVectors(*context.getState().getPeriodicBoxVectors())
    aside.setPositions(model.positions)
    aside.computeVirtualSites()
    mm.LocalEnergyMinimizer.minimize(aside)
    context.setPositions(aside.getState(positions=True).getPositions())
