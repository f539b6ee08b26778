"""Expected work that waits, and the longest job in it: what the tail rule asks."""

from __future__ import annotations

from mdcampaign.errors import InvariantBroken
from mdcampaign.scheduling.queue import LazyHeap
from mdcampaign.scheduling.request import Request

_TICKS = 1_000_000
"""Work is added up in whole microseconds: sums of floats would drift over a million jobs."""


class Backlog:
    """The expected times of all waiting jobs, kept current as they come and go in O(log n).

    A job without an expected time counts as long as the mean of the others. Where most are without, there is
    nothing to go by and `due` answers None.
    """

    def __init__(self) -> None:
        self._longest = LazyHeap()
        self._shared = 0  # ticks x slots of the jobs that take some slots
        self._whole = 0  # ticks of the jobs that take whole devices
        self._unknown = 0

    def add(self, request: Request) -> None:
        """Count a job that begins to wait."""
        self._count(request, +1)
        if request.expected_s is not None:
            self._longest.push((-request.expected_s, request.id))

    def remove(self, request: Request) -> None:
        """Forget a job that waits no longer."""
        self._count(request, -1)
        self._longest.discard(request.id)

    def _count(self, request: Request, sign: int) -> None:
        if request.expected_s is None:
            self._unknown += sign
        elif request.exclusive:
            self._whole += sign * round(request.expected_s * _TICKS)
        else:
            self._shared += sign * request.slots * round(request.expected_s * _TICKS)

    def problem(self) -> str:
        """Say why the tail rule cannot act, or "" if it can."""
        if self._unknown <= len(self._longest):
            return ""
        return f"{self._unknown} of {self._unknown + len(self._longest)} waiting jobs have no expected time"

    def work_s(self, device_slots: int) -> float:
        """Expected slot seconds that wait; an exclusive job takes `device_slots`."""
        known = self._shared + self._whole * device_slots
        count = len(self._longest)
        return known / _TICKS * (1 + self._unknown / count) if count else 0.0

    def due(self, slots: int, device_slots: int, fraction: float) -> int | None:
        """Return the longest waiting job if its time reaches `fraction` of (work / slots), else None."""
        longest = self._longest.first()
        if longest is None or slots == 0 or self.problem():
            return None
        share_s = self.work_s(device_slots) / slots
        return longest[-1] if -longest[0] >= fraction * share_s else None

    def check(self, waiting: list[Request]) -> None:
        """Raise InvariantBroken unless the sums are those of `waiting`."""
        again = Backlog()
        for request in waiting:
            again.add(request)
        mine = (self._shared, self._whole, self._unknown, len(self._longest))
        if mine != (again._shared, again._whole, again._unknown, len(again._longest)):
            raise InvariantBroken("the expected work that waits is not the sum over the waiting jobs")
