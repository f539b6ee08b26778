"""The words that cross borders: MDJob, Slot, Progress, Directive, Outcome.

`MDJob` stands at the outer border, where users write, and so is a pydantic model with strict checks. The others
travel between our own processes and are plain frozen dataclasses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)
from pydantic_core import ErrorDetails

from mdcampaign.engines.inputs import AnyEngine
from mdcampaign.errors import BadInput, BadJob, FailureKind, nearest

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Names become directories: letters, digits, dot, underscore and hyphen, at most 100 of them."""


class MDJob(BaseModel):
    """One simulation to a target length.

    Its identity is its content: what the engine reads, the replica and the seed; not its name, priority, target
    length or any path. So a job with a longer target continues the same simulation.

    Raises:
        BadJob: an unknown key, an ill-typed or impossible value, or an input file that cannot be read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(pattern=NAME, description="unique in its group; names the job's directory")
    group: str = Field("default", pattern=NAME, description="a readable name for jobs that belong together")
    engine: AnyEngine = Field(description="what to simulate: OpenMM(...), GROMACS(...) or Synthetic(...)")
    steps: PositiveInt = Field(description="target length in steps")
    iteration_steps: PositiveInt = Field(1000, description="steps between two reports, each a chance to change course")
    replica: NonNegativeInt = Field(0, description="tells copies of one simulation apart; seeds differ by it")
    seed: NonNegativeInt = Field(0, description="changes every random seed of the job")
    priority: FiniteFloat = Field(0.0, description="larger is more urgent")
    slots: PositiveInt = Field(1, description="slots of one device")
    exclusive: bool = Field(False, description="the whole device, and nobody beside it")
    memory_mb: PositiveInt | None = Field(None, description="device memory that the job needs, MiB")
    cores: PositiveInt | None = Field(None, description="CPU cores, where the slot's own share is too few")
    expected_s: PositiveFloat | None = Field(None, description="expected run time; measured rates replace it")
    requeue: bool = Field(True, description="go back to the queue, uncharged, when interrupted")

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as exc:
            raise refused(exc, type(self), BadJob) from None
        for name, path in self.engine.files().items():
            if not is_file(path):
                raise BadJob(f"engine.{name}", str(path), "no such file", "Give the path of an existing file.")

    @cached_property
    def identity(self) -> str:
        """SHA-256, in hex, of the job's content: engine inputs by content, replica and seed."""
        files = self.engine.files()
        inputs = self.engine.model_dump(mode="json", exclude=set(files) | self.engine.where)
        content = {
            "inputs": inputs,
            "files": {name: file_sha256(path) for name, path in files.items()},
            "replica": self.replica,
            "seed": self.seed,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def random_seed(self, purpose: str) -> int:
        """Return a seed in 1 .. 2**31 - 1 derived from the identity, one for each purpose ("velocities", ...)."""
        digest = hashlib.sha256(f"{self.identity}/{purpose}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % (2**31 - 1) + 1

    def resource_specification(self) -> dict[str, Any]:
        """Return what Parsl is told, as `parsl_resource_specification`."""
        spec: dict[str, Any] = {
            "name": f"{self.group}/{self.name}",
            "identity": self.identity,
            "target_step": self.steps,
            "priority": self.priority,
            "slots": self.slots,
            "exclusive": self.exclusive,
            "requeue": self.requeue,
        }
        optional = {"memory_mb": self.memory_mb, "cores": self.cores, "expected_s": self.expected_s}
        return spec | {key: value for key, value in optional.items() if value is not None}


def refused(exc: ValidationError, model: type[BaseModel], error: type[BadInput]) -> BadInput:
    """Turn pydantic's first complaint into one of ours that names the field, the value and the mend."""
    first = complaint(exc)
    where = ".".join(str(part) for part in first["loc"]) or model.__name__
    problem, mend = str(first["msg"]), ""
    if first["type"] == "extra_forbidden":
        allowed = _fields_at(model, first["loc"][:-1])
        problem = "unknown key"
        mend = f"{nearest(first['loc'][-1], allowed)}Known keys: {', '.join(sorted(allowed))}."
    elif first["type"] == "missing":
        problem, mend = "required key is missing", f"Add {first['loc'][-1]!r}."
    elif first["type"] == "string_pattern_mismatch":
        mend = "Use letters, digits, '.', '_' and '-' (at most 100), beginning with a letter or digit."
    return error(where, first.get("input"), problem, mend)


def complaint(exc: ValidationError) -> ErrorDetails:
    """Return the complaint to tell first: an unknown key explains the one that is missing."""
    return min(exc.errors(), key=lambda error: error["type"] != "extra_forbidden")


def _fields_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the (possibly nested, possibly discriminated) model at `loc`."""
    for part in loc:
        info = model.model_fields.get(str(part))
        options = [info.annotation, *get_args(info.annotation)] if info else [model]
        nested = [t for t in options if isinstance(t, type) and issubclass(t, BaseModel)]
        if not info:  # the tag of a union: pydantic puts its value into the location
            continue
        tags = [t for t in nested if "kind" in t.model_fields and t.model_fields["kind"].default in loc]
        model = (tags or nested or [model])[0]
    return list(model.model_fields)


def is_file(path: Path) -> bool:
    """Tell whether there is such a file; a path that no file system would take is none."""
    try:
        return path.is_file()
    except OSError:
        return False


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex; remembered while size and time of change stay."""
    status = path.stat()
    return _file_sha256(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4096)
def _file_sha256(path: Path, size: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class Slot:
    """One share of a device with its cores and memory budget; the same object at every refill.

    `index` lists the slots of the device that the job holds (more than one for `slots=n` or `exclusive`). `gpus`
    are the UUIDs that the process may see; empty where the device is the CPU cores of the node.
    """

    node: str
    device: str
    index: tuple[int, ...] = (0,)
    kind: Literal["gpu", "mig", "cpu"] = "cpu"
    cores: tuple[int, ...] = ()
    threads: int = 1
    memory_mb: int | None = None
    gpus: tuple[str, ...] = ()
    exclusive: bool = False


@dataclass(frozen=True)
class Progress:
    """What a job reports at the end of an iteration.

    `step`, `target_step` and `saved_step` (the last verified checkpoint) are counted from the start of the job, not
    of the attempt. `rate_ns_per_day` is the rate of this attempt; None for work that is not MD.
    """

    step: int
    target_step: int
    saved_step: int = 0
    time_ps: float | None = None
    rate_ns_per_day: float | None = None
    remaining_s: float | None = None
    observables: dict[str, float] = field(default_factory=dict)


DirectiveKind = Literal["continue", "yield", "stop", "extend"]


@dataclass(frozen=True)
class Directive:
    """The answer to a progress report.

    "yield": save a checkpoint and give the slot back; "stop": finish early and keep the result; "extend": go on to
    `target_step`. `attempt` is the attempt that it is for; an engine never sees one for another attempt.
    """

    kind: DirectiveKind = "continue"
    id: int = 0
    attempt: int = 0
    target_step: int | None = None


CONTINUE = Directive()

OutcomeKind = Literal["done", "stopped", "interrupted", "failed", "cancelled"]


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended. `ns` and `frames` count what is accepted of the whole job so far, all attempts."""

    kind: OutcomeKind
    step: int = 0
    target_step: int = 0
    message: str = ""
    failure: FailureKind | None = None
    ns: float = 0.0
    frames: int = 0
    attempt: int = 0
    directory: str = ""
    rate_ns_per_day: float | None = None
    observables: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain JSON values."""
        return asdict(self)
