"""The resource specification of a task: which keys there are, what they may be, what they ask for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mdcampaign.errors import BadJob, nearest
from mdcampaign.jobs import NAME
from mdcampaign.scheduling.request import Request

JOB_NAME = f"{NAME.strip('^$')}/{NAME.strip('^$')}"


LARGEST = 1e15
"""Above it numbers are mistakes, and their sums are no longer exact."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < LARGEST


KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda v: isinstance(v, str) and 0 < len(v) <= 300, "a text of 1 to 300 characters"),
    "priority": (_number, "a finite number; larger is more urgent"),
    "slots": (_count, "a whole number of at least 1: slots of one device"),
    "exclusive": (lambda v: isinstance(v, bool), "True or False"),
    "memory_mb": (_count, "a whole number of at least 1: MiB of device memory"),
    "cores": (_count, "a whole number of at least 1: CPU cores"),
    "expected_s": (lambda v: _number(v) and v > 0, "a number of seconds above 0"),
    "requeue": (lambda v: isinstance(v, bool), "True or False"),
    "identity": (lambda v: isinstance(v, str) and v != "", "the identity of an MDJob"),
    "target_step": (_count, "a whole number of at least 1: the target length in steps"),
    "first_attempt": (_count, "a whole number of at least 1: the number of the next attempt"),
}


def check_resource_specification(spec: dict[str, Any]) -> None:
    """Check the keys and values of a `parsl_resource_specification`.

    Raises:
        BadJob: names the key, the value, what is allowed and the nearest right spelling.
    """
    if not isinstance(spec, dict):
        raise BadJob("parsl_resource_specification", spec, "is no dict", "Give keys and values.")
    if "identity" in spec and not re.fullmatch(JOB_NAME, str(spec.get("name"))):
        raise BadJob("name", spec.get("name"), "a job of a campaign is named GROUP/NAME", "Make it with MDJob.")
    for key, value in spec.items():
        if key not in KEYS:
            mend = f"{nearest(key, KEYS)}Known keys: {', '.join(sorted(KEYS))}."
            raise BadJob(str(key), value, "unknown key of a resource specification", mend)
        allowed, words = KEYS[key]
        if not allowed(value):
            raise BadJob(key, value, "impossible value", f"Give {words}.")


def request_of(task_id: int, spec: dict[str, Any], now: float) -> Request:
    """Return the scheduler's request for a checked resource specification."""
    return Request(
        id=task_id,
        submitted=now,
        priority=float(spec.get("priority", 0.0)),
        slots=spec.get("slots", 1),
        exclusive=spec.get("exclusive", False),
        memory_mb=spec.get("memory_mb"),
        cores=spec.get("cores"),
        expected_s=spec.get("expected_s"),
        preemptible=spec.get("requeue", False),
        name=spec.get("name", f"task-{task_id}"),
    )
