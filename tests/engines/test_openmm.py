"""OpenMM as an engine: what it writes, how it ends, what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openmm as mm
import pytest
from attempts import STOP, YIELD, Campaign
from conftest import FORCEFIELD, PDB, TORSIONS, MakeJob
from openmm import app, unit

from mdcampaign.engines import dcd, openmm_run, openmm_system, stitch
from mdcampaign.engines.drive import engine_of
from mdcampaign.engines.inputs import OpenMM
from mdcampaign.engines.manifest import Manifest
from mdcampaign.engines.openmm_output import torsion
from mdcampaign.errors import DeviceFailed, EngineFailed, InputFailed, Unstable
from mdcampaign.jobs import Directive, MDJob, Slot


def manifest_of(campaign: Campaign, job: dict[str, Any]) -> Manifest:
    manifest = Manifest.load(campaign.job_dir(job))
    assert manifest
    return manifest


def test_probe_tells_version_and_platforms() -> None:
    found = engine_of("openmm").probe()

    assert found.version == mm.Platform.getOpenMMVersion()
    assert {"Reference", "CPU"} <= set(found.platforms)
    assert found.problem == ""


def test_without_openmm_probe_and_run_say_how_to_get_it(
    campaign: Campaign, openmm_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openmm", None)
    for name in [n for n in sys.modules if n.startswith("mdcampaign.engines.openmm_")]:
        monkeypatch.delitem(sys.modules, name)

    assert "pip install 'mdcampaign[openmm]'" in engine_of("openmm").probe().problem
    with pytest.raises(EngineFailed, match=r"pip install 'mdcampaign\[openmm\]'"):
        campaign.run(openmm_job())


def test_a_job_from_pdb_and_force_field(campaign: Campaign) -> None:
    """The structure that the quickstart uses; minimised on the way."""
    engine = {"kind": "openmm", "pdb": str(PDB), "forcefield": FORCEFIELD, "frame_steps": 50, "torsions": TORSIONS}
    job = {"name": "ala", "steps": 200, "iteration_steps": 100, "engine": engine}

    outcome = campaign.run(job)

    assert (outcome.kind, outcome.step, outcome.frames, outcome.ns) == ("done", 200, 5, pytest.approx(0.0004))
    assert outcome.rate_ns_per_day and outcome.rate_ns_per_day > 0
    manifest = manifest_of(campaign, job)
    assert manifest.facts["1"]["platform"] == "CPU" and manifest.facts["1"]["threads"] == "1"
    assert manifest.seeds == {p: MDJob(**job).random_seed(p) for p in ("velocities", "integrator", "barostat")}
    energies = stitch.read_csv(campaign.job_dir(job))
    assert energies["potential_kj_mol"][0] < -100
    assert set(TORSIONS) <= set(energies)


def test_reports_stand_on_the_jobs_own_grid(campaign: Campaign, openmm_job: MakeJob) -> None:
    outcome = campaign.run(openmm_job(steps=70, iteration_steps=30, frame_steps=20))

    assert [p.step for p in campaign.reports] == [30, 60, 70]
    assert {p.target_step for p in campaign.reports} == {70}
    last = campaign.reports[-1]
    assert last.saved_step == 70 and last.time_ps == pytest.approx(0.14) and last.remaining_s == 0
    assert {"potential_kj_mol", "temperature_k", "phi", "psi"} <= set(last.observables)
    assert outcome.frames == 4
    assert outcome.observables == last.observables


@pytest.mark.parametrize("kind", ["dcd", "xtc"])
def test_frames_are_the_positions_at_their_steps(campaign: Campaign, openmm_job: MakeJob, kind: str) -> None:
    """Compared with the same simulation made by hand."""
    job = openmm_job(steps=40, trajectory=kind)
    campaign.run(job)

    parsed = MDJob(**job)
    model = openmm_system.load(parsed)
    context = openmm_system.make_context(model, parsed.engine, campaign.slot, parsed.random_seed("integrator"))
    context.setPositions(model.positions)
    context.setVelocities(model.velocities)
    expected = []
    for _ in range(5):
        expected.append(context.getState(positions=True).getPositions(asNumpy=True)._value)
        context.getIntegrator().step(10)

    found = read_positions(campaign.job_dir(job), kind)
    assert found == pytest.approx(np.array(expected), abs=6e-4 if kind == "xtc" else 1e-6)
    assert stitch.verify(campaign.job_dir(job)) == (5, 5)


def read_positions(job_dir: Path, kind: str) -> np.ndarray:
    """Return the stitched positions (frames, atoms, 3) in nm."""
    out = job_dir / f"stitched.{kind}"
    n = stitch.write(job_dir, out)
    if kind == "xtc":
        from openmm.app.internal.xtc_utils import read_xtc

        return np.moveaxis(read_xtc(str(out).encode())[0], -1, 0)
    index = dcd.index(out, 10)
    assert index.n_frames == n
    data = np.frombuffer(out.read_bytes()[index.offset :], dtype="<f4").reshape(n, 3, -1)
    return np.moveaxis(data[:, :, 1:-1], 1, 2) / 10


def test_energies_and_torsions_agree_with_openmm(campaign: Campaign, openmm_job: MakeJob) -> None:
    """The temperature by StateDataReporter, a torsion by CustomTorsionForce."""
    job = openmm_job(steps=20)
    campaign.run(job)
    found = stitch.read_csv(campaign.job_dir(job))

    parsed = MDJob(**job)
    model = openmm_system.load(parsed)
    angle = mm.CustomTorsionForce("theta")
    angle.addTorsion(*TORSIONS["psi"])
    angle.setForceGroup(31)
    model.system.addForce(angle)
    integrator = mm.LangevinMiddleIntegrator(300, 1, 0.002)
    integrator.setIntegrationForceGroups(set(range(31)))
    context = mm.Context(model.system, integrator, mm.Platform.getPlatformByName("Reference"))
    context.setPositions(model.positions)
    context.setVelocities(model.velocities)
    state = context.getState(energy=True, groups=set(range(31)))

    assert found["potential_kj_mol"][0] == pytest.approx(state.getPotentialEnergy()._value)
    assert found["kinetic_kj_mol"][0] == pytest.approx(state.getKineticEnergy()._value)
    theta = np.degrees(context.getState(energy=True, groups={31}).getPotentialEnergy()._value)
    assert found["psi"][0] == pytest.approx((theta + 180) % 360 - 180)
    assert found["temperature_k"][0] == pytest.approx(temperature(model, context))


def temperature(model: Any, context: mm.Context) -> float:
    """Return the temperature as OpenMM's StateDataReporter counts it."""
    reporter = app.StateDataReporter("/dev/null", 1, temperature=True)

    class Simulation:
        system, integrator = model.system, context.getIntegrator()

    reporter._initializeConstants(Simulation)
    state = context.getState(energy=True)
    return float(
        (2 * state.getKineticEnergy() / (reporter._dof * unit.MOLAR_GAS_CONSTANT_R)).value_in_unit(unit.kelvin)
    )


def test_a_torsion_has_iupacs_sign() -> None:
    points = np.array([[1.0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 1]])

    assert torsion(points) == pytest.approx(90)
    assert torsion(points * [1, -1, 1]) == pytest.approx(-90)


def test_replicas_differ_and_repeat_themselves(tmp_path: Path, openmm_job: MakeJob) -> None:
    energies = []
    for n, replica in enumerate((0, 1, 0)):
        campaign = Campaign(tmp_path / str(n))
        outcome = campaign.run(openmm_job(steps=20, replica=replica))
        energies.append(outcome.observables["potential_kj_mol"])

    assert energies[0] == energies[2] != energies[1]


def test_stop_keeps_the_result(campaign: Campaign, openmm_job: MakeJob) -> None:
    job = openmm_job()
    outcome = campaign.run(job, lambda p: STOP if p.step == 60 else None)

    assert (outcome.kind, outcome.step, outcome.frames) == ("stopped", 60, 7)
    assert stitch.frames(campaign.job_dir(job))[-1].step == 60
    assert manifest_of(campaign, job).accepted_step == 60


def test_extend_by_directive_and_by_a_longer_job(campaign: Campaign, openmm_job: MakeJob, tmp_path: Path) -> None:
    """One simulation, whichever way its target grows."""
    job = openmm_job(steps=50)
    campaign.run(job, lambda p: Directive("extend", target_step=90) if p.step == 50 else None)
    outcome = campaign.run(openmm_job(steps=130))

    assert (outcome.kind, outcome.step, outcome.frames) == ("done", 130, 14)
    whole = Campaign(tmp_path / "whole")
    whole.run(openmm_job(steps=130))
    for role, ending in (("trajectory", "dcd"), ("energies", "csv")):
        for name, each in (("a", campaign), ("b", whole)):
            stitch.write(each.job_dir(job), tmp_path / f"{name}.{ending}", role)
        assert (tmp_path / f"a.{ending}").read_bytes() == (tmp_path / f"b.{ending}").read_bytes()


def test_an_extend_that_does_not_is_told(campaign: Campaign, openmm_job: MakeJob) -> None:
    outcome = campaign.run(openmm_job(), lambda p: Directive("extend", target_step=40) if p.step == 20 else None)

    assert (outcome.kind, outcome.step) == ("done", 100)
    assert outcome.message == "extend to step 40 changes nothing: the target is 100"


def test_an_extension_survives_a_kill(campaign: Campaign, openmm_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new target is in the manifest before the next step."""
    monkeypatch.setattr(openmm_run.Run, "_is_due", lambda self: False)
    job = openmm_job()
    seen = []

    def answer(progress: Any) -> Directive | None:
        seen.append(manifest_of(campaign, job).target_step)
        return Directive("extend", target_step=120) if progress.step == 40 else None

    campaign.run(job, answer)
    assert seen == [100, 100, 120, 120, 120, 120]


def test_saving_waits_where_it_is_dear(
    campaign: Campaign, openmm_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step to which a killed job would go back is told in each report."""
    monkeypatch.setattr(openmm_run, "CHECKPOINT_SHARE", 1e-9)
    campaign.run(openmm_job())
    assert [p.saved_step for p in campaign.reports] == [0, 0, 0, 0, 100]

    monkeypatch.setattr(openmm_run, "CHECKPOINT_SHARE", float("inf"))
    campaign.run(openmm_job(name="cheap"))
    assert [p.saved_step for p in campaign.reports] == [20, 40, 60, 80, 100]


def test_two_saved_states_are_kept(campaign: Campaign, openmm_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: nothing of ours beside them and the outputs."""
    monkeypatch.setattr(openmm_run, "CHECKPOINT_SHARE", float("inf"))
    job = openmm_job()
    campaign.run(job)

    names = {path.name for path in (campaign.job_dir(job) / "attempt-1").iterdir()}
    saved = {"checkpoint-80.chk", "checkpoint-100.chk", "state-80.xml", "state-100.xml"}
    assert names == saved | {"trajectory.dcd", "energies.csv"}


@pytest.mark.parametrize("platform", ["Reference", "CPU"])
def test_nan_is_unstable_and_keeps_the_last_good_state(
    campaign: Campaign, openmm_job: MakeJob, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1. Reference says nothing of NaN, CPU raises."""
    monkeypatch.setattr(openmm_run, "CHECKPOINT_SHARE", float("inf"))
    job = openmm_job(platform=platform, dt_ps=0.05, iteration_steps=10, frame_steps=5)

    with pytest.raises(Unstable, match=r"(NaN|beyond 100000 nm).* step \d+"):
        campaign.run(job)

    manifest = manifest_of(campaign, job)
    assert manifest.state == "failed"
    assert campaign.context and campaign.context.outcome
    assert campaign.context.outcome.failure == "unstable"
    assert manifest.checkpoints[-1].verify(campaign.job_dir(job), {})
    assert stitch.verify(campaign.job_dir(job))[0] == manifest.accepted_step // 5 + 1
    assert str(campaign.context.outcome.message) in manifest.events[-1]


GARBAGE = "this is no input\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pdb": GARBAGE, "forcefield": FORCEFIELD}, r"engine\.pdb"),
        ({"pdb": PDB, "forcefield": ("amber99.xml.gz",)}, r"engine\.forcefield: amber99\.xml\.gz"),
        (
            {"pdb": PDB, "forcefield": ("amber14/tip3p.xml",)},
            r"engine\.pdb with engine\.forcefield: .*No template found",
        ),
        ({"system_xml": GARBAGE, "pdb": PDB}, r"engine\.system_xml"),
        ({"system_xml": "state_xml", "pdb": PDB}, r"engine\.system_xml: .* holds a State, not a System"),
        ({"system_xml": "system_xml", "state_xml": GARBAGE}, r"engine\.state_xml"),
        ({"pdb": PDB, "forcefield": FORCEFIELD, "pressure_bar": 1.0}, r"engine\.pressure_bar: .* Leave it out"),
        ({"pdb": PDB, "forcefield": FORCEFIELD, "torsions": {"x": (0, 1, 2, 22)}}, r"engine\.torsions\.x: atoms are 0"),
        ({"pdb": PDB, "forcefield": FORCEFIELD, "torsions": {"step": (0, 1, 2, 3)}}, r"'step' cannot name a column"),
        (
            {"pdb": PDB, "forcefield": FORCEFIELD, "platform": "HIP"},
            r"engine\.platform: .*'HIP'.* It has Reference, CPU",
        ),
    ],
)
def test_bad_input_fails_in_words(
    campaign: Campaign, alanine: dict[str, str], tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    """F2, X2: never retried, never run on something else."""
    engine = {"kind": "openmm", "platform": "Reference", **fields}
    for key, value in engine.items():
        if value == GARBAGE:
            (tmp_path / key).write_text(GARBAGE)
            engine[key] = str(tmp_path / key)
        elif isinstance(value, str) and value in alanine:
            engine[key] = alanine[value]

    with pytest.raises(InputFailed, match=message):
        campaign.run({"name": "bad", "steps": 10, "engine": engine})

    assert campaign.context and campaign.context.outcome and campaign.context.outcome.failure == "input"


def test_system_and_state_of_different_size(campaign: Campaign, alanine: dict[str, str], water: dict[str, str]) -> None:
    engine = {"kind": "openmm", "system_xml": alanine["system_xml"], "state_xml": water["state_xml"]}

    with pytest.raises(InputFailed, match="the System has 22 particles, the starting positions are"):
        campaign.run({"name": "bad", "steps": 10, "engine": engine})


def test_a_gpu_slot_never_falls_to_the_cpu(campaign: Campaign, openmm_job: MakeJob) -> None:
    """X2: here no platform of OpenMM finds a GPU."""
    campaign.slot = Slot("node", "GPU-0", kind="gpu", gpus=("GPU-0",))
    job = openmm_job(platform=None)

    with pytest.raises(DeviceFailed, match=r"no GPU platform of OpenMM works on GPU-0: CUDA: .*; HIP: .*; OpenCL: "):
        campaign.run(job)


@pytest.mark.parametrize(("name", "is_cpu"), [("Portable Computing Language", True), ("NVIDIA CUDA", False)])
def test_pocl_is_no_gpu(name: str, is_cpu: bool) -> None:
    """X2: where it is installed, OpenMM offers it as an OpenCL device."""

    class OpenCL:
        def getPropertyNames(self) -> tuple[str, ...]:
            return ("DeviceIndex", "OpenCLPlatformName")

        def getPropertyValue(self, context: object, key: str) -> str:
            return {"OpenCLPlatformName": name}[key]

    assert openmm_system.is_cpu_in_disguise(OpenCL(), object()) is is_cpu
    assert not openmm_system.is_cpu_in_disguise(mm.Platform.getPlatformByName("Reference"), object())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cpu", [("CPU", {"Threads": "3"})]),
        ("gpu", [(n, {"DeviceIndex": "0", "Precision": "mixed"}) for n in ("CUDA", "HIP", "OpenCL")]),
        ("mig", [(n, {"DeviceIndex": "0", "Precision": "mixed"}) for n in ("CUDA", "HIP", "OpenCL")]),
    ],
)
def test_platforms_by_slot(kind: Any, expected: list[tuple[str, dict[str, str]]]) -> None:
    """G1: the mask leaves one GPU, and it is number 0."""
    inputs = OpenMM(pdb=PDB, forcefield=FORCEFIELD)
    where = Slot("node", "device", kind=kind, threads=3)

    assert list(openmm_system._candidates(inputs, where)) == expected
    named = inputs.model_copy(update={"platform": "CUDA"})
    assert list(openmm_system._candidates(named, where)) == [("CUDA", {"DeviceIndex": "0", "Precision": "mixed"})]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Particle coordinate is NaN.  For more information, see", "unstable"),
        ("Energy or force at minimum is infinite or NaN", "unstable"),
        ("Error creating array posq: CUDA_ERROR_OUT_OF_MEMORY (2)", "memory"),
        ("Error creating array forces: clCreateBuffer (-61)", "memory"),
        ("Error downloading array interactionCount: CUDA_ERROR_ILLEGAL_ADDRESS (700)", "device"),
        ("There is no registered Platform called 'nano'", "engine"),
        ("The periodic box size has decreased to less than twice the nonbonded cutoff (nanometers)", "engine"),
    ],
)
def test_messages_tell_the_kind_of_failure(text: str, kind: str) -> None:
    assert openmm_system.failure_kind(text) == kind


def test_a_box_under_pressure(campaign: Campaign, water: dict[str, str]) -> None:
    """PME, barostat, volume and density; a resume goes on with the same frames and steps."""
    engine = {
        "kind": "openmm", **water, "minimise": False, "pressure_bar": 1.0, "frame_steps": 20, "platform": "CPU",
        "trajectory": "xtc",
    }  # fmt: skip
    job = {"name": "water", "steps": 200, "iteration_steps": 50, "engine": engine}
    campaign.run(job, lambda p: YIELD if p.step == 100 else None)
    outcome = campaign.run(job)

    assert (outcome.kind, outcome.frames, outcome.message) == ("done", 11, "")
    rows = stitch.read_csv(campaign.job_dir(job))
    assert rows["step"] == list(range(0, 201, 20))
    assert len(set(rows["volume_nm3"])) > 1
    assert all(800 < density < 1200 for density in rows["density_kg_m3"])
    assert all(200 < kelvin < 400 for kelvin in rows["temperature_k"])


def test_dynamics_without_velocities_draws_them(campaign: Campaign, alanine: dict[str, str], tmp_path: Path) -> None:
    state = mm.XmlSerializer.deserialize(Path(alanine["state_xml"]).read_text())
    system = mm.XmlSerializer.deserialize(Path(alanine["system_xml"]).read_text())
    context = mm.Context(system, mm.VerletIntegrator(0.001), mm.Platform.getPlatformByName("Reference"))
    context.setPositions(state.getPositions())
    (tmp_path / "s.xml").write_text(mm.XmlSerializer.serialize(context.getState(positions=True)))
    engine = {**alanine, "kind": "openmm", "state_xml": str(tmp_path / "s.xml"), "minimise": False, "frame_steps": 5}
    campaign.run({"name": "j", "steps": 5, "engine": engine})

    assert stitch.read_csv(campaign.job_dir({"name": "j"}))["temperature_k"][0] > 100


def test_the_system_is_the_same_in_every_process(campaign: Campaign) -> None:
    """Its hash decides whether a checkpoint may be used."""
    import subprocess

    code = (
        "from mdcampaign.engines.openmm_system import load; from mdcampaign.jobs import MDJob;"
        f"engine = dict(kind='openmm', pdb={str(PDB)!r}, forcefield={FORCEFIELD!r});"
        "print(load(MDJob(name='j', steps=1, engine=engine)).sha256)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, timeout=120
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_a_directory_written_by_an_attempt_is_never_written_again(campaign: Campaign, openmm_job: MakeJob) -> None:
    """W9: the first segment unchanged."""
    job = openmm_job()
    campaign.run(job, lambda p: YIELD if p.step == 40 else None)
    first = campaign.job_dir(job) / "attempt-1"
    before = {path.name: path.read_bytes() for path in first.iterdir()}

    campaign.run(job)

    assert {path.name: path.read_bytes() for path in first.iterdir()} == before
