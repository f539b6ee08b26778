"""The contract of an engine, and the loop that drives one in a slot."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from mdcampaign.jobs import Directive, MDJob, Outcome, Progress, Slot

Iterations = Generator[Progress, Directive, Outcome]
"""An engine at work: yields a report at each iteration boundary, is sent a directive, returns the outcome."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine on this machine can do; `problem` says in one line why it cannot run at all."""

    engine: str
    version: str = ""
    platforms: tuple[str, ...] = ()
    gpu: bool = False
    problem: str = ""
    facts: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Runs one kind of job in a slot, in a directory of its own; knows nothing of scheduling or Parsl.

    An engine judges its outcome by content: done means that the last step reached the target, the expected files
    are there and readable, and there is no NaN. It returns "interrupted" after a yield, "stopped" after a stop,
    and "failed" with a kind where it can tell; an exception that it lets through is a failure of kind "engine".
    """

    def probe(self) -> Capabilities:
        """Return what this machine has for the engine. Never raises."""

    def run(self, job: MDJob, slot: Slot, workdir: Path) -> Iterations:
        """Run the job in `workdir`, a fresh directory attempt-N below the job's directory.

        The manifest of the job, and earlier attempts, lie in `workdir.parent`; earlier attempts are only read.
        """
