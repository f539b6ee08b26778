"""What each engine must be told: one pydantic model an engine, checked in the user's script.

No engine is imported here, so that a login node without OpenMM or GROMACS can submit. A job says what to
simulate with one of these::

    MDJob(name="ala-1", steps=500_000, engine=OpenMM(pdb="ala.pdb", forcefield=("amber14-all.xml",)))

Units stand in the names: `_ps` picoseconds, `_nm` nanometres, `_k` kelvin, `_bar` bar, `_s` seconds, `_mb` MiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from mdcampaign.engines import mdrun_options


def _absolute(value: Any) -> Any:
    """Make a path absolute at once: the job runs elsewhere, in a directory of its own."""
    if not isinstance(value, str | Path):
        return value
    try:
        return Path(value).expanduser().absolute()
    except RuntimeError as exc:  # ~ of a user that there is not
        raise ValueError(str(exc)) from None


COLUMNS = ("step", "time_ps", "potential_kj_mol", "kinetic_kj_mol", "temperature_k")
"""Names of what OpenMM jobs write of energies; torsions stand beside them."""

InputFile = Annotated[Path, BeforeValidator(_absolute)]
"""A file that is read by the engine; must exist when the job is made, and its content is part of the identity."""


class EngineInputs(BaseModel):
    """Base of the inputs of every engine: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    where: ClassVar[frozenset[str]] = frozenset()
    """Fields that say where or with which program to run, not what: no part of the job's identity."""

    def files(self) -> dict[str, Path]:
        """Return the input files by field name; they must exist, and their content is the job's identity."""
        return {n: v for n in type(self).model_fields if isinstance(v := getattr(self, n), Path)}


class OpenMM(EngineInputs):
    """Langevin dynamics with OpenMM, from a PDB and force fields or from System and State XML."""

    where: ClassVar[frozenset[str]] = frozenset({"platform"})
    kind: Literal["openmm"] = "openmm"
    pdb: InputFile | None = Field(None, description="PDB file: topology and starting positions")
    forcefield: tuple[str, ...] = Field((), description="OpenMM force field XML names, as ForceField takes them")
    system_xml: InputFile | None = Field(None, description="serialised System, instead of forcefield")
    state_xml: InputFile | None = Field(None, description="serialised State: positions, velocities, box")
    nonbonded: Literal["NoCutoff", "CutoffNonPeriodic", "CutoffPeriodic", "Ewald", "PME"] = "NoCutoff"
    cutoff_nm: PositiveFloat = 0.9
    constraints: Literal["None", "HBonds", "AllBonds", "HAngles"] = "HBonds"
    hydrogen_mass_amu: PositiveFloat | None = Field(None, description="repartition hydrogen masses to this")
    temperature_k: PositiveFloat = 300.0
    friction_per_ps: PositiveFloat = 1.0
    dt_ps: PositiveFloat = 0.002
    pressure_bar: PositiveFloat | None = Field(None, description="Monte Carlo barostat; none without it")
    minimise: bool = Field(True, description="minimise the energy before the first step")
    frame_steps: PositiveInt = Field(1000, description="steps between two frames of the trajectory")
    trajectory: Literal["dcd", "xtc"] = "dcd"
    platform: Literal["CUDA", "HIP", "OpenCL", "CPU", "Reference"] | None = Field(
        None, description="OpenMM platform; by default the fastest that works on the slot's device"
    )
    precision: Literal["single", "mixed", "double"] = Field("mixed", description="on GPU platforms")
    torsions: dict[str, tuple[int, int, int, int]] = Field(
        default_factory=dict, description="observables by name: torsion angle in degrees of four atom indices"
    )

    @field_validator("torsions")
    @classmethod
    def _right_torsions(cls, torsions: dict[str, tuple[int, int, int, int]]) -> dict[str, tuple[int, int, int, int]]:
        for name, atoms in torsions.items():
            if not name.isidentifier() or name in COLUMNS:
                raise ValueError(f"{name!r} cannot name a column: give a word like psi, none of {', '.join(COLUMNS)}")
            if min(atoms) < 0 or len(set(atoms)) < 4:
                raise ValueError(f"torsion {name!r}: {atoms} are not four different atoms, counted from 0")
        return torsions

    @model_validator(mode="after")
    def _one_source(self) -> OpenMM:
        if self.system_xml is None and (self.pdb is None or not self.forcefield):
            raise ValueError("give pdb and forcefield, or system_xml and state_xml")
        if self.system_xml is not None and self.state_xml is None and self.pdb is None:
            raise ValueError("system_xml needs state_xml or pdb for the starting positions")
        if self.system_xml is not None and self.forcefield:
            raise ValueError("give forcefield or system_xml, not both")
        return self


class GROMACS(EngineInputs):
    """`gmx mdrun` from a run input file."""

    where: ClassVar[frozenset[str]] = frozenset({"gmx"})
    kind: Literal["gromacs"] = "gromacs"
    tpr: InputFile = Field(description="run input file from `gmx grompp`")
    gmx: str = Field("gmx", description="the program: a name on PATH or a path")
    mdrun_args: tuple[str, ...] = Field((), description="further arguments of `gmx mdrun`, one string each")

    @field_validator("mdrun_args", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"give a list of arguments, {value.split()}, not one string")
        return value

    @field_validator("mdrun_args")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if problem := mdrun_options.problem(value):
            raise ValueError(problem)
        return value


class Synthetic(EngineInputs):
    """No MD: takes a chosen time and memory, reports iterations, and fails on request. For trials and tests."""

    kind: Literal["synthetic"] = "synthetic"
    step_s: PositiveFloat = Field(0.01, description="seconds a step takes")
    burn: bool = Field(False, description="keep the core busy instead of sleeping")
    allocate_mb: int = Field(0, ge=0, description="memory to hold while running")
    fail: Literal["crashed", "exit", "input", "unstable", "memory", "device", "no progress", "engine"] | None = None
    fail_step: PositiveInt = Field(1, description="the step at which it fails")
    fail_attempts: int = Field(1_000_000, ge=0, description="fail in this many attempts, then run well")


AnyEngine = Annotated[OpenMM | GROMACS | Synthetic, Field(discriminator="kind")]
