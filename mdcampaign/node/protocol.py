"""The wire between broker and agents: small, versioned, checked at each end.

A message is one JSON frame, and one binary frame after it where it has a payload (a task buffer, a result). Every
message is handled on its own: what `decode` refuses is logged and dropped, and nobody but its sender suffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mdcampaign.errors import ProtocolError

VERSION = 1


def is_probe(frames: Sequence[bytes]) -> bool:
    """Tell whether this is what Parsl's `probe_addresses` sends to find an address that answers; never unpickled."""
    return len(frames) == 1 and len(frames[0]) < 100 and b"connection_probe" in frames[0]


class Message(BaseModel):
    """Base of all messages. Types are strict: a number in quotes is not a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DeviceReport(BaseModel):
    """A device that an agent offers: its slots, each with its cores, and its memory in MiB if known."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    uuid: str
    kind: Literal["gpu", "mig", "cpu"]
    slot_cores: list[list[int]]
    memory_mb: int | None = None
    model: str = ""


# ---------------------------------------------------------------- agent to broker


class Register(Message):
    """An agent offers its node. `remaining_s` is the time left to the allocation, None where nothing ends it."""

    type: Literal["register"] = "register"
    protocol: int
    version: str
    parsl_version: str
    python_version: str
    uid: str
    block_id: str
    hostname: str
    pid: int
    os: str
    directory: str
    start_time: float
    cpu_count: int
    memory_mb: int
    packages: dict[str, str]
    devices: list[DeviceReport]
    remaining_s: float | None = None
    drain_s: float | None = None


class Heartbeat(Message):
    """The agent lives; `running` are the (task, attempt) pairs that it holds."""

    type: Literal["heartbeat"] = "heartbeat"
    running: list[tuple[int, int]] = Field(default=[], strict=False)


class Started(Message):
    """A runner has taken the task; `fork_s` is the time from placement to the runner being ready, 0 if warm."""

    type: Literal["started"] = "started"
    task: int
    attempt: int
    pid: int
    fork_s: float = 0.0


class Report(Message):
    """A progress report. `seq` counts the reports of the attempt, `skipped` those that a newer one replaced."""

    type: Literal["report"] = "report"
    task: int
    attempt: int
    seq: int
    skipped: int
    progress: dict[str, Any]


class Ended(Message):
    """An attempt left its slot: its processes are gone and the slot is free.

    `how`: "result" and "exception" carry Parsl's serialised result or RemoteExceptionWrapper as payload;
    "interrupted": it yielded; "lost": killed from outside; "crashed": it ended itself, by `signal` or `exit_code`;
    "cancelled": by our order. `outcome` is what the code in the slot said of itself (`Outcome.as_dict()`), if it did.
    `failed` tells a result that is a failure in disguise (Parsl wraps exceptions of apps as results).
    """

    type: Literal["ended"] = "ended"
    task: int
    attempt: int
    how: Literal["result", "exception", "interrupted", "lost", "crashed", "cancelled"]
    failed: bool = False
    signal: int | None = None
    exit_code: int | None = None
    message: str = ""
    outcome: dict[str, Any] | None = None


class Monitoring(Message):
    """A message of Parsl's monitoring, as payload."""

    type: Literal["monitoring"] = "monitoring"


class Leaving(Message):
    """The agent takes no more work and ends when what it holds has ended: signal, drain time or lost node."""

    type: Literal["leaving"] = "leaving"
    reason: str


# ---------------------------------------------------------------- broker to agent


class Registered(Message):
    """The registration was accepted."""

    type: Literal["registered"] = "registered"


class Refused(Message):
    """The registration was refused, in words; the agent prints them and ends."""

    type: Literal["refused"] = "refused"
    reason: str


class Place(Message):
    """Run this task now in these slots of this device; the payload is Parsl's task buffer.

    `context` is what HTEX calls the task's context (`task_executor`, `resource_spec`).
    """

    type: Literal["place"] = "place"
    task: int
    attempt: int
    name: str
    device: str
    index: list[int]
    exclusive: bool = False
    memory_mb: int | None = None
    context: dict[str, Any] = Field(default_factory=dict)


class Direct(Message):
    """A directive for a running attempt, kept in its mailbox until its next report."""

    type: Literal["direct"] = "direct"
    task: int
    attempt: int
    id: int
    kind: Literal["yield", "stop", "extend"]
    target_step: int | None = None


class Cancel(Message):
    """End the attempt and its whole process tree; answered by `Ended(how="cancelled")` when it is gone."""

    type: Literal["cancel"] = "cancel"
    task: int
    attempt: int


class Shutdown(Message):
    """End everything and exit."""

    type: Literal["shutdown"] = "shutdown"
    reason: str = ""


class Fenced(Message):
    """The broker does not know this agent (any more): end everything, report nothing, exit."""

    type: Literal["fenced"] = "fenced"


class Beat(Message):
    """The broker lives; the answer to a heartbeat."""

    type: Literal["beat"] = "beat"


FromAgent = Register | Heartbeat | Started | Report | Ended | Monitoring | Leaving
ToAgent = Registered | Refused | Place | Direct | Cancel | Shutdown | Fenced | Beat

_from_agent: TypeAdapter[FromAgent] = TypeAdapter(Annotated[FromAgent, Field(discriminator="type")])
_to_agent: TypeAdapter[ToAgent] = TypeAdapter(Annotated[ToAgent, Field(discriminator="type")])


def encode(message: Message, payload: bytes | None = None) -> list[bytes]:
    """Return the frames of a message."""
    header = message.model_dump_json().encode()
    return [header] if payload is None else [header, payload]


def decode_from_agent(frames: Sequence[bytes]) -> tuple[FromAgent, bytes | None]:
    """Return an agent's message and its payload, or raise ProtocolError."""
    return _decode(_from_agent, frames)


def decode_to_agent(frames: Sequence[bytes]) -> tuple[ToAgent, bytes | None]:
    """Return a broker's message and its payload, or raise ProtocolError."""
    return _decode(_to_agent, frames)


def _decode(adapter: TypeAdapter[Any], frames: Sequence[bytes]) -> tuple[Any, bytes | None]:
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"a message has one or two frames, not {len(frames)}")
    try:
        message = adapter.validate_json(frames[0])
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"{where}: {first['msg']}") from None
    return message, frames[1] if len(frames) == 2 else None
