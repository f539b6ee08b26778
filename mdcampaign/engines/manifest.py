"""The manifest of a job: which parts and checkpoints are accepted.

One JSON file in the job's directory, replaced as a whole and last of all: what it does not name does not exist.
Paths in it are relative to the job's directory, so that a campaign can be moved.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mdcampaign.errors import CheckpointError
from mdcampaign.jobs import file_sha256

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True)
class Stamp:
    """Size and checksum of a file when it was accepted."""

    path: str
    bytes: int
    sha256: str

    @classmethod
    def of(cls, job_dir: Path, path: Path) -> Stamp:
        """Return the stamp of a file as it is now."""
        return cls(str(path.relative_to(job_dir)), path.stat().st_size, file_sha256(path))

    def verify(self, job_dir: Path) -> Path:
        """Return the file's path, or raise CheckpointError when it is not the file that was accepted."""
        path = job_dir / self.path
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if (size := path.stat().st_size) != self.bytes:
            raise CheckpointError(f"{path} has {size} bytes instead of {self.bytes}")
        if file_sha256(path) != self.sha256:
            raise CheckpointError(f"{path} has changed since it was accepted")
        return path


@dataclass(frozen=True)
class Part:
    """What one attempt added to the trajectory.

    `files` are paths by role ("trajectory", "energies", ...). Frames count from after `first_step` (the checkpoint
    that the attempt started from; its frame belongs to the part before, and step 0 has one of its own only in the
    first part) up to `accepted_step`, on the grid of `frame_steps`. The files may hold more; it is not accepted.
    """

    attempt: int
    first_step: int
    accepted_step: int
    frame_steps: int
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A state that a later attempt may start from, and the facts that must agree before it does.

    `files` are stamps by role ("checkpoint", "state", ...); `facts` are what engines do not compare themselves:
    hash of System or tpr, integrator, temperature, time step, precision, platform, device model, engine version.
    """

    attempt: int
    step: int
    files: dict[str, Stamp]
    facts: dict[str, Any] = field(default_factory=dict)

    def verify(self, job_dir: Path, facts: dict[str, Any]) -> dict[str, Path]:
        """Return the verified files by role, or raise CheckpointError naming the first thing that differs."""
        for key, wanted in facts.items():
            if (found := self.facts.get(key)) != wanted:
                raise CheckpointError(f"{key} of the checkpoint at step {self.step} is {found!r}, not {wanted!r}")
        return {role: stamp.verify(job_dir) for role, stamp in self.files.items()}


@dataclass
class Manifest:
    """The accepted state of one job. `checkpoints` has the newest last and keeps at least one to fall back on."""

    name: str
    identity: str
    engine: str
    target_step: int
    state: Literal["new", "running", "interrupted", "done", "stopped", "failed"] = "new"
    parts: list[Part] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    """One line for each thing that the user must know, such as a fall-back to an older checkpoint."""

    @property
    def accepted_step(self) -> int:
        """The last step that is accepted; 0 for a job that has not begun."""
        return self.parts[-1].accepted_step if self.parts else 0

    @classmethod
    def load(cls, job_dir: Path) -> Manifest | None:
        """Return the manifest of a job directory, or None where there is none yet."""
        try:
            data = json.loads((job_dir / FILE).read_text())
        except FileNotFoundError:
            return None
        if (version := data.pop("format", None)) != FORMAT:
            raise CheckpointError(f"{job_dir / FILE} has format {version}, this version reads {FORMAT}")
        data["parts"] = [Part(**part) for part in data["parts"]]
        data["checkpoints"] = [
            Checkpoint(**{**c, "files": {role: Stamp(**s) for role, s in c["files"].items()}})
            for c in data["checkpoints"]
        ]
        return cls(**data)

    def save(self, job_dir: Path) -> None:
        """Replace the manifest as a whole: written aside, synced, renamed, the directory synced."""
        aside = job_dir / f".{FILE}.new"
        with aside.open("w") as file:
            json.dump({"format": FORMAT, **asdict(self)}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(job_dir / FILE)
        directory = os.open(job_dir, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
