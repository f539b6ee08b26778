"""What the end of a job's future says about the job."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from dataclasses import fields
from typing import Any

from mdcampaign.errors import FAILURES, EngineFailed, JobCancelled, JobFailed, JobInterrupted
from mdcampaign.jobs import Outcome, OutcomeKind

_FIELDS = {field.name for field in fields(Outcome)}


def interrupted(step: int, message: str) -> Outcome:
    """Return the outcome of a job that another campaign run will go on with."""
    return Outcome("interrupted", step=step, message=message)


def outcome_of(future: Future[Any], last_step: int = 0) -> tuple[Outcome, BaseException | None]:
    """Return the outcome of a job whose future is done, and the exception that tells why it did not go well.

    `last_step` is the last step that was reported, used where the future holds an exception only.
    """
    if future.cancelled():
        return _from_exception(CancelledError(), last_step)
    error = future.exception()
    if error is not None:
        return _from_exception(error, last_step)
    value = future.result()
    if not isinstance(value, dict) or "kind" not in value or not set(value) <= _FIELDS:
        return _from_exception(EngineFailed(f"the job returned {value!r} instead of an outcome"), last_step)
    outcome = Outcome(**value)
    return outcome, outcome_error(outcome)


def outcome_error(outcome: Outcome) -> Exception | None:
    """Return the exception that an outcome stands for; None for done and stopped."""
    if outcome.kind == "failed":
        return FAILURES[outcome.failure or "engine"](outcome.message)
    others = {"cancelled": JobCancelled, "interrupted": JobInterrupted}
    return others[outcome.kind](outcome.message) if outcome.kind in others else None


def _from_exception(error: BaseException, last_step: int) -> tuple[Outcome, BaseException]:
    kind: OutcomeKind = "failed"
    if isinstance(error, JobCancelled | CancelledError):
        kind = "cancelled"
    elif isinstance(error, JobInterrupted):
        kind = "interrupted"
    failure = (error.kind if isinstance(error, JobFailed) else "engine") if kind == "failed" else None
    return Outcome(kind, step=last_step, message=str(error) or repr(error), failure=failure), error
