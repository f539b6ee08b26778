"""The numbers that a campaign may choose, and the order that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mdcampaign.errors import BadWorkload, nearest
from mdcampaign.scheduling.request import Request

Rank = tuple[float, float, int]
"""Place of a job in the queue; the smaller goes first. Ends with the id, so no two are equal."""

PLACES = ("spread", "pack")


@dataclass(frozen=True)
class Policy:
    """How the scheduler chooses.

    Attributes:
        aging: levels of priority that a waiting job gains per second. With one rate for all, the order of two waiting
            jobs never changes. 0 means strict priority, first come first served inside a level.
        place: "spread" takes the emptiest device first, "pack" the fullest.
        tail: let the longest waiting job start early when the end of the campaign would else wait for it.
        tail_fraction: the tail rule acts when the longest expected time reaches this fraction of
            (expected work waiting / slots).
        preempt_gap: levels by which a waiting job must outrank a running one to make it yield; None: never.
        min_runtime_s: no job is made to yield sooner after its start.
        max_preemptions: no job is made to yield more often.

    Raises:
        BadWorkload: a number or word that makes no sense, with the field's name.
    """

    aging: float = 1 / 86400
    place: Literal["spread", "pack"] = "spread"
    tail: bool = True
    tail_fraction: float = 0.9
    preempt_gap: float | None = None
    min_runtime_s: float = 0.0
    max_preemptions: int = 3

    def __post_init__(self) -> None:
        for field in ("aging", "min_runtime_s", "max_preemptions"):
            if not 0 <= (value := getattr(self, field)) < math.inf:
                raise BadWorkload(field, value, "is not a finite number of 0 or more", "Give 0 or more.")
        if self.place not in PLACES:
            mend = f"{nearest(self.place, PLACES)}Known: {', '.join(PLACES)}."
            raise BadWorkload("place", self.place, "unknown way to place jobs", mend)
        if not 0 < self.tail_fraction < math.inf:
            raise BadWorkload("tail_fraction", self.tail_fraction, "must be above 0", "0.9 is a good value.")
        if self.preempt_gap is not None and not 0 < self.preempt_gap < math.inf:
            mend = "Give a number above 0, or None to switch preemption off."
            raise BadWorkload("preempt_gap", self.preempt_gap, "equal jobs must never preempt each other", mend)

    def key(self, request: Request) -> float:
        """The constant part of the effective priority: it orders jobs, and no passing of time changes it."""
        return request.priority - self.aging * request.submitted

    def rank(self, request: Request) -> Rank:
        """The job's place in the queue."""
        return (-self.key(request), request.submitted, request.id)

    def effective_priority(self, request: Request, now: float) -> float:
        """The priority with what the job has gained by waiting."""
        return request.priority + self.aging * (now - request.submitted)
