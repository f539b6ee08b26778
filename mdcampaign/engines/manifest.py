"""The manifest of a job: which parts and checkpoints are accepted.

One JSON file in the job's directory, replaced as a whole and last of all: what it does not name does not exist.
Paths in it are relative to the job's directory, so that a campaign can be moved.

An attempt claims its number by making its directory, and only then opens the manifest. Whoever finds a directory with
a higher number than its own is superseded and writes no more: a lost node that is still alive harms nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from mdcampaign.atomic import sync_directory
from mdcampaign.errors import CheckpointError, NameTaken, Superseded
from mdcampaign.jobs import MDJob, Outcome, file_sha256

FORMAT = 1
FILE = "manifest.json"
ATTEMPT = "attempt-"


def attempt_number(workdir: Path) -> int:
    """Return N of a directory attempt-N, 0 for any other directory."""
    prefix, _, number = workdir.name.partition(ATTEMPT)
    return int(number) if not prefix and number.isdecimal() else 0


def last_attempt(job_dir: Path) -> int:
    """Return the highest number of the attempt directories of a job; 0 where there is none."""
    return max((attempt_number(path) for path in job_dir.glob(f"{ATTEMPT}*")), default=0)


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

    def compare(self, facts: dict[str, Any]) -> None:
        """Raise CheckpointError naming the first fact that differs."""
        for key, wanted in facts.items():
            if (found := self.facts.get(key)) != wanted:
                raise CheckpointError(f"{key} of the checkpoint at step {self.step} is {found!r}, not {wanted!r}")

    def verify(self, job_dir: Path, facts: dict[str, Any]) -> dict[str, Path]:
        """Return the verified files by role, or raise CheckpointError naming the first thing that differs."""
        self.compare(facts)
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
    outcome: dict[str, Any] = field(default_factory=dict)
    """How the last attempt ended (`Outcome.as_dict()`); what a job that is done answers when it is run again."""
    writer: int = field(default=0, compare=False)
    """The attempt that may save this manifest as long as no later one has begun; 0: no check. Not stored."""

    @property
    def accepted_step(self) -> int:
        """The last step that is accepted; 0 for a job that has not begun."""
        return self.parts[-1].accepted_step if self.parts else 0

    @classmethod
    def load(cls, job_dir: Path) -> Manifest | None:
        """Return the manifest of a job directory, or None where there is none yet.

        Raises:
            CheckpointError: the file is damaged or of another format.
        """
        path = job_dir / FILE
        try:
            data = json.loads(path.read_text())
            if (version := data.pop("format", None)) != FORMAT:
                raise CheckpointError(f"{path} has format {version}, this version reads {FORMAT}")
            data["parts"] = [Part(**part) for part in data["parts"]]
            data["checkpoints"] = [
                Checkpoint(**{**c, "files": {role: Stamp(**s) for role, s in c["files"].items()}})
                for c in data["checkpoints"]
            ]
            return cls(**data)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            mend = f"put back a copy, or remove {job_dir} to begin again"
            raise CheckpointError(f"{path} is damaged ({exc}); {mend}") from None

    @classmethod
    def open(cls, job: MDJob, workdir: Path) -> Manifest:
        """Return the manifest of a job, as it is or new, for the attempt whose directory `workdir` is.

        Its target is the larger of the job's and of what an "extend" set before.

        Raises:
            NameTaken: the directory holds a job with other content.
        """
        job_dir = workdir.parent
        manifest = cls.load(job_dir) or cls(job.name, job.identity, job.engine.kind, job.steps)
        manifest.check_identity(job, job_dir)
        manifest.writer = attempt_number(workdir)
        manifest.target_step = max(manifest.target_step, job.steps)
        return manifest

    def check_identity(self, job: MDJob, job_dir: Path) -> None:
        """Raise NameTaken unless this is the manifest of `job`."""
        if self.identity != job.identity:
            raise NameTaken(
                f"{job_dir} holds another job named {job.name!r} (identity {self.identity[:12]}, not "
                f"{job.identity[:12]}): inputs, replica or seed differ. Give the job another name or group."
            )

    def rewind(self, step: int) -> None:
        """Accept nothing after `step`, the checkpoint that the next part starts from.

        Cuts parts and checkpoints, and drops parts that accept no frame; the first stays, for the frame of step 0.
        """
        cut = [replace(part, accepted_step=min(part.accepted_step, step)) for part in self.parts]
        self.parts = [part for n, part in enumerate(cut) if n == 0 or part.accepted_step > part.first_step]
        self.checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.step <= step]

    def advance(self, checkpoint: Checkpoint) -> None:
        """Accept the last part up to where `checkpoint` was taken; remember it and the one before it."""
        self.parts[-1] = replace(self.parts[-1], accepted_step=checkpoint.step)
        earlier = [kept for kept in self.checkpoints if kept.step < checkpoint.step]
        self.checkpoints = [*earlier[-1:], checkpoint]

    def end(self, outcome: Outcome, job_dir: Path) -> Outcome:
        """Record in one save how the attempt ended, and return the outcome."""
        if outcome.kind != "cancelled":
            self.state = outcome.kind
        self.outcome = outcome.as_dict()
        self.save(job_dir)
        return outcome

    def save(self, job_dir: Path) -> None:
        """Replace the manifest as a whole: written aside, synced, renamed, the directory synced.

        Raises:
            Superseded: a later attempt than `writer` has begun; nothing was written.
        """
        if self.writer and (last := last_attempt(job_dir)) > self.writer:
            raise Superseded(f"attempt {last} of {job_dir} has begun; attempt {self.writer} writes no more")
        data = {"format": FORMAT, **asdict(self)}
        del data["writer"]
        own = job_dir / f"{ATTEMPT}{self.writer}" if self.writer else job_dir
        aside = own / f".{FILE}.new"
        with aside.open("w") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(job_dir / FILE)
        sync_directory(job_dir)
