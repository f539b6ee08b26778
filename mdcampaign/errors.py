"""Every exception of mdcampaign.

::

    MDCampaignError
    ├── BadInput                  refused before anything runs; names the field, the value and the mend
    │   ├── BadJob                    an MDJob, or what a resource specification asks for
    │   ├── BadCampaignFile           campaign.yaml
    │   └── BadWorkload               a workload or policy given to the simulator
    ├── JobError                  how one job ended, when not well
    │   ├── JobFailed                 charged; `kind` says which of the kinds of failure
    │   │   ├── Crashed                   ended itself by a signal or exit that nobody of ours sent
    │   │   ├── InputFailed               missing or unreadable input, impossible options
    │   │   ├── Unstable                  NaN, constraint failure, blow-up
    │   │   ├── OutOfMemory               out of device memory while alone on the device
    │   │   ├── DeviceFailed              the device, not the job
    │   │   ├── NoProgress                step unchanged for the stall limit
    │   │   └── EngineFailed              anything else that the engine says is fatal
    │   ├── JobInterrupted            saved and given back, and not to be repeated without being asked
    │   └── JobCancelled              the user's wish; never started again
    ├── CampaignError             the campaign directory
    │   ├── CampaignLocked            another process owns it (host and pid in the message)
    │   ├── NameTaken                 a job of this name exists with other content
    │   ├── Superseded                a later attempt of the job has begun; this one must write no more
    │   └── LedgerCorrupt             the log is damaged before its last line
    ├── CheckpointError           a checkpoint that must not be used, and why
    ├── ProtocolError             a message that cannot be understood; ends nobody but its sender
    ├── BrokerLost                the broker ended or does not answer
    ├── TaskServerLost            the task server ended while the Thinker still needed it
    └── InvariantBroken           a bug in mdcampaign: the scheduler's books do not balance
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Literal

FailureKind = Literal["crashed", "input", "unstable", "memory", "device", "no progress", "engine"]


class MDCampaignError(Exception):
    """Base of everything that mdcampaign raises on purpose."""


class BadInput(MDCampaignError, ValueError):
    """A value that was refused: which field, which value, what is wrong and what would be right.

    The message reads "FIELD: PROBLEM (got VALUE). MEND".
    """

    def __init__(self, field: str, value: Any, problem: str, mend: str = "") -> None:
        super().__init__(field, value, problem, mend)
        self.field, self.value, self.problem, self.mend = field, value, problem, mend

    def __str__(self) -> str:
        text = f"{self.field}: {self.problem} (got {self.value!r})"
        return f"{text}. {self.mend}" if self.mend else text


class BadJob(BadInput):
    """An MDJob or a resource specification that asks for something impossible or unknown."""


class BadCampaignFile(BadInput):
    """A campaign file with an unknown key or an ill-typed value."""


class BadWorkload(BadInput):
    """A workload, fleet or policy that the simulator cannot run."""


class JobError(MDCampaignError):
    """How one job ended, when not well."""


class JobFailed(JobError):
    """A job failed and the attempt is charged."""

    kind: FailureKind = "engine"


class Crashed(JobFailed):
    """The process ended itself by a signal or an exit that nobody of ours sent."""

    kind = "crashed"


class InputFailed(JobFailed):
    """Missing or unreadable input or impossible options; never retried, the node is not blamed."""

    kind = "input"


class Unstable(JobFailed):
    """NaN, constraint failure or blow-up."""

    kind = "unstable"


class OutOfMemory(JobFailed):
    """Out of device memory while alone on the device."""

    kind = "memory"


class DeviceFailed(JobFailed):
    """The device failed, not the job."""

    kind = "device"


class NoProgress(JobFailed):
    """The step did not change for the stall limit, or attempts end without a saved step."""

    kind = "no progress"


class EngineFailed(JobFailed):
    """Anything else that the engine says is fatal; the last lines of its log are in the message."""

    kind = "engine"


class JobInterrupted(JobError):
    """The job was interrupted and its campaign ended, or it must not be repeated (`requeue=False`)."""


class JobCancelled(JobError):
    """The user cancelled the job; it is never started again."""


class CampaignError(MDCampaignError):
    """Something is wrong with the campaign directory."""


class CampaignLocked(CampaignError):
    """Another process owns the campaign directory."""


class NameTaken(CampaignError):
    """A job of this group and name exists in the campaign with other content."""


class Superseded(CampaignError):
    """A later attempt of the same job has begun; this one, thought lost, must write no more."""


class LedgerCorrupt(CampaignError):
    """The log is damaged somewhere before its last line."""


class CheckpointError(MDCampaignError):
    """A checkpoint that must not be used, and why."""


class ProtocolError(MDCampaignError):
    """A message that cannot be understood."""


class BrokerLost(MDCampaignError):
    """The broker ended or does not answer."""


class TaskServerLost(MDCampaignError):
    """The task server ended while the Thinker still needed it."""


class InvariantBroken(MDCampaignError, AssertionError):
    """The scheduler's books do not balance; a bug in mdcampaign."""


FAILURES: dict[FailureKind, type[JobFailed]] = {
    cls.kind: cls for cls in (Crashed, InputFailed, Unstable, OutOfMemory, DeviceFailed, NoProgress, EngineFailed)
}


def nearest(word: object, allowed: Iterable[str]) -> str:
    """Return "Did you mean 'x'? " for the closest spelling of `word` in `allowed`, or ""."""
    close = difflib.get_close_matches(str(word), list(allowed), n=1)
    return f"Did you mean {close[0]!r}? " if close else ""
