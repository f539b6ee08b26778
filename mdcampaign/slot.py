"""What running code may ask: its slot, its directory, and what is wanted of it.

Any Python function that runs in a slot can take part in a campaign::

    from mdcampaign.slot import current

    def my_md(n_steps):
        here = current()
        for step in range(n_steps):
            ...
            directive = here.report(step=step, target_step=n_steps, energy=e)
            if directive.kind == "yield":
                save(here.checkpoint_path)
                return here.interrupted(step=step)
            if directive.kind == "stop":
                break

`report` never waits: it returns whatever directive lies in the mailbox. Outside a runner `current()` gives a
stand-in, so that the same function runs by hand.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from mdcampaign.jobs import CONTINUE, Directive, Outcome, Progress, Slot


class Channel(Protocol):
    """The two ends that a runner gives to the code in it; both return at once."""

    def send_progress(self, progress: Progress) -> None:
        """Send a report up, or drop it when the way is full: the newest report wins."""

    def take_directive(self) -> Directive | None:
        """Return the oldest directive that waits, or None."""


class SlotContext:
    """The slot that this process runs in, and the wire to whoever steers."""

    def __init__(self, slot: Slot, *, attempt: int, name: str, workdir: Path, channel: Channel | None = None) -> None:
        self.slot = slot
        self.attempt = attempt
        self.name = name
        self.workdir = workdir
        self.outcome: Outcome | None = None
        self.last: Progress | None = None
        self._channel = channel

    @property
    def checkpoint_path(self) -> Path:
        """Where code of one's own may keep its checkpoint; it outlives the attempt if `workdir` does."""
        return self.workdir / "checkpoint"

    def report(
        self,
        progress: Progress | None = None,
        /,
        *,
        step: int = 0,
        target_step: int = 0,
        saved_step: int = 0,
        **observables: float,
    ) -> Directive:
        """Report an iteration and return the directive that waits, or `CONTINUE`.

        Give a `Progress`, or its fields and any observables by name. Costs microseconds and never waits.
        """
        if progress is None:
            progress = Progress(step, target_step, saved_step, observables=observables)
        self.last = progress
        if self._channel is None:
            return CONTINUE
        self._channel.send_progress(progress)
        return self._channel.take_directive() or CONTINUE

    def end(self, outcome: Outcome) -> Outcome:
        """Record how this attempt ended; the runner reports it even where a wrapper swallows exceptions."""
        self.outcome = replace(outcome, attempt=self.attempt)
        return self.outcome

    def interrupted(self, *, step: int = 0, message: str = "yielded") -> Outcome:
        """Say that the work is saved and must be continued later; return the outcome to `return`."""
        target = self.last.target_step if self.last else 0
        return self.end(Outcome("interrupted", step=step, target_step=target, message=message))


_current: SlotContext | None = None


def current() -> SlotContext:
    """Return the context of this process; a stand-in with no wire where there is no runner."""
    global _current
    if _current is None:
        cores = tuple(sorted(os.sched_getaffinity(0)))
        slot = Slot(platform.node(), "cpu", cores=cores, threads=len(cores))
        _current = SlotContext(slot, attempt=1, name="by-hand", workdir=Path.cwd())
    return _current


def enter(context: SlotContext | None) -> None:
    """Make `context` the current one; for the runner."""
    global _current
    _current = context
