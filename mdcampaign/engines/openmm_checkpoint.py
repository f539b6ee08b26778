"""Saved states of an OpenMM Context: a binary checkpoint and the portable State, side by side.

OpenMM loads a truncated checkpoint, one of another System or temperature, and one made with fewer threads without a
word. So checksums and facts are compared first, and the binary one, which alone continues the random stream, is loaded
only where version, platform, device model, precision and threads are those that wrote it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import openmm as mm

from mdcampaign import atomic
from mdcampaign.engines.manifest import Checkpoint, Manifest, Stamp, attempt_number
from mdcampaign.errors import CheckpointError, EngineFailed
from mdcampaign.jobs import MDJob


def save(context: mm.Context, workdir: Path, step: int, facts: dict[str, Any]) -> Checkpoint:
    """Write the Context's state at `step` into the attempt's directory; the manifest accepts it."""
    state = context.getState(positions=True, velocities=True, parameters=True, integratorParameters=True)
    files = {"checkpoint": workdir / f"checkpoint-{step}.chk", "state": workdir / f"state-{step}.xml"}
    atomic.replace(files["checkpoint"], context.createCheckpoint())
    atomic.replace(files["state"], mm.XmlSerializer.serialize(state).encode())
    stamps = {role: Stamp.of(workdir.parent, path) for role, path in files.items()}
    return Checkpoint(attempt_number(workdir), step, stamps, facts)


def forget(kept: list[Checkpoint], workdir: Path) -> None:
    """Remove the saved states of this attempt that the manifest names no longer."""
    names = {Path(stamp.path).name for checkpoint in kept for stamp in checkpoint.files.values()}
    for pattern in ("checkpoint-*.chk", "state-*.xml"):
        for path in workdir.glob(pattern):
            if path.name not in names:
                path.unlink()


class Restorer:
    """Brings a Context to the newest saved state that can be trusted.

    `facts` must agree before any state is used, `exact` before a binary checkpoint is. `notes` says, in order, what
    was refused and why.
    """

    def __init__(self, job: MDJob, job_dir: Path, facts: dict[str, Any], exact: dict[str, Any]) -> None:
        self._job = job
        self._job_dir = job_dir
        self._facts = facts
        self._exact = exact
        self.notes: list[str] = []

    def restore(self, context: mm.Context, manifest: Manifest) -> int:
        """Load the newest good state, cut the manifest back to it, and return its step.

        Raises:
            EngineFailed: none is good. The job is not begun again unasked.
        """
        for checkpoint in reversed(manifest.checkpoints):
            try:
                self._load(context, checkpoint, manifest)
            except CheckpointError as exc:
                self.notes.append(f"checkpoint of step {checkpoint.step} refused: {exc}")
                continue
            manifest.rewind(checkpoint.step)
            return checkpoint.step
        raise EngineFailed(
            f"no checkpoint of {self._job_dir} can be used: {'; '.join(self.notes) or 'the manifest names none'}. "
            f"Put back one of these files, or remove the directory to begin again from step 0."
        )

    def _load(self, context: mm.Context, checkpoint: Checkpoint, manifest: Manifest) -> None:
        facts = dict(self._facts)
        if checkpoint.facts.get("openmm") != self._exact["openmm"]:
            del facts["system_sha256"]  # another version may write the same System in other words
        checkpoint.compare(facts)
        try:
            checkpoint.compare(self._exact)
            self._load_binary(context, checkpoint)
        except CheckpointError as exc:
            try:
                self._load_state(context, checkpoint, manifest)
            except CheckpointError as other:
                raise CheckpointError(f"{exc}; {other}") from None
            self.notes.append(f"step {checkpoint.step} continues from the portable State, with new noise: {exc}")

    def _load_binary(self, context: mm.Context, checkpoint: Checkpoint) -> None:
        path = self._verified(checkpoint, "checkpoint")
        try:
            context.loadCheckpoint(path.read_bytes())
        except mm.OpenMMException as exc:
            raise CheckpointError(f"OpenMM cannot load {path}: {exc}") from None
        _check_loaded(context, path, checkpoint.step)

    def _load_state(self, context: mm.Context, checkpoint: Checkpoint, manifest: Manifest) -> None:
        """Load the State. It lacks the random stream: a new one, or the noise of step 0 would come a second time."""
        path = self._verified(checkpoint, "state")
        try:
            state = mm.XmlSerializer.deserialize(path.read_text())
        except (mm.OpenMMException, ValueError) as exc:
            raise CheckpointError(f"OpenMM cannot read {path}: {exc}") from None
        for thing in (context.getIntegrator(), *context.getSystem().getForces()):
            if isinstance(thing, mm.LangevinMiddleIntegrator | mm.MonteCarloBarostat):
                purpose = f"{'integrator' if isinstance(thing, mm.Integrator) else 'barostat'}@{checkpoint.step}"
                manifest.seeds[purpose] = self._job.random_seed(purpose)
                thing.setRandomNumberSeed(manifest.seeds[purpose])
        context.reinitialize()
        context.setState(state)
        _check_loaded(context, path, checkpoint.step)

    def _verified(self, checkpoint: Checkpoint, role: str) -> Path:
        if role not in checkpoint.files:
            raise CheckpointError(f"the manifest names no {role} at step {checkpoint.step}")
        return checkpoint.files[role].verify(self._job_dir)


def _check_loaded(context: mm.Context, path: Path, step: int) -> None:
    """Raise CheckpointError unless the Context is now at `step` with a finite energy."""
    if (found := context.getStepCount()) != step:
        raise CheckpointError(f"{path} holds step {found}, not {step}")
    if not math.isfinite(context.getState(energy=True).getPotentialEnergy()._value):
        raise CheckpointError(f"{path} holds a state of infinite energy")
