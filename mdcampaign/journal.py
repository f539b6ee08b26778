"""What the executor keeps in the campaign directory: its log, its jobs' directories, and what earlier runs did."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from parsl.version import VERSION as PARSL_VERSION

from mdcampaign.errors import JobCancelled
from mdcampaign.jobs import Outcome
from mdcampaign.layout import Allocator
from mdcampaign.ledger import Event, LedgerWriter, event, flat
from mdcampaign.scheduling.policy import Policy
from mdcampaign.state import CampaignState, JobState


class Journal:
    """The one writer of a campaign's log, from the start of an executor to its shutdown.

    Raises:
        CampaignError: the directory cannot be written to.
        LedgerCorrupt: its log is damaged.
    """

    def __init__(self, directory: Path, policy: Policy) -> None:
        self._before = CampaignState.replay(directory)
        self._next_attempt = {job: state.next_attempt for job, state in self._before.jobs.items()}
        self._directories = Allocator(directory)
        self._ledger = LedgerWriter(directory)
        who = {"host": platform.node(), "pid": os.getpid()}
        what = {"version": version("mdcampaign"), "python": platform.python_version(), "parsl": PARSL_VERSION}
        self._ledger.append(event("campaign_started", **who, **what, policy=asdict(policy)))

    def outcome_before(self, name: str, spec: dict[str, Any]) -> Outcome | None:
        """Return the outcome of a job that an earlier run has ended, or None where it is still to be run.

        Raises:
            JobCancelled: it was cancelled then, and a cancelled job is never started again.
            NameTaken: a job of this name has other content.
        """
        group, _, job = name.partition("/")
        known = self._before.finished(group, job, spec["identity"], spec.get("target_step", 1))
        if known is None:
            return None
        if known.state == "cancelled":
            raise JobCancelled(f"{name} was cancelled in an earlier run; give it another name to run it")
        return outcome_of(known)

    def prepare(self, name: str, spec: dict[str, Any]) -> dict[str, Any]:
        """Make the directory of a job, and number its attempts on from those of earlier runs."""
        self._directories.make(*name.split("/", 1))
        return {"first_attempt": self._next_attempt.get(name, 1), **spec}

    def append(self, news: Event, then: Callable[[], None] | None = None) -> None:
        """Log an event; `then` is called when it is safe on disk."""
        if news["event"] == "placed":
            self._next_attempt[news["job"]] = news["attempt"] + 1
        self._ledger.append(flat(news), then=then)

    def close(self) -> None:
        """Log the end of the campaign and return when everything is on disk."""
        self._ledger.append(event("campaign_ended"))
        self._ledger.close()


def outcome_of(job: JobState) -> Outcome:
    """Return the outcome of a job that an earlier run has ended, as the log keeps it."""
    told = {field.name: job.outcome[field.name] for field in fields(Outcome) if field.name in job.outcome}
    kind: Literal["done", "stopped"] = "stopped" if job.state == "stopped" else "done"
    return Outcome(**{**told, "kind": kind, "message": f"{kind} before; not run again"})


def spec_facts(name: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Return what the log keeps of a resource specification."""
    group = {"group": name.partition("/")[0]} if "/" in name else {}
    return group | {key: value for key, value in spec.items() if key not in ("name", "first_attempt")}
