"""What is written of the progress of jobs: of each job the newest report, once in a while."""

from __future__ import annotations

AGE_SHARE = 0.1
"""An attempt that reports for a long time is written less often: after this share of the time it has reported ..."""
LONGEST = 12.0
"""... but, for its age alone, never less often than once in this many times the shortest interval."""
CROWD = 20
"""With more jobs than this reporting, all wait longer, so that the log grows no faster than with so many."""


class Thinned:
    """The newest report of each job that waits for its turn to be written. Not thread-safe; times are monotonic.

    With the shortest interval of 5 s at most 4 reports a second are written for all jobs together: 100,000 jobs of
    ten minutes on 512 slots leave some 7 reports each.
    """

    def __init__(self, shortest_s: float) -> None:
        self._shortest_s = shortest_s
        self._began: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._newest: dict[str, bytes] = {}
        self._look_at = 0.0

    def due(self, job: str, line: bytes, now: float) -> bool:
        """Return whether this report is to be written now; if not, it is kept in place of an older one."""
        if now < self._due.get(job, now):
            self._newest[job] = line
            return False
        self._newest.pop(job, None)
        self._written(job, now)
        return True

    def forget(self, job: str) -> list[bytes]:
        """Return the report that waits, if any, and forget the job: its attempt ends."""
        self._began.pop(job, None)
        self._due.pop(job, None)
        newest = self._newest.pop(job, None)
        return [] if newest is None else [newest]

    def take_due(self, now: float) -> list[bytes]:
        """Return the reports whose time has come; looks only a few times in each shortest interval."""
        if now < self._look_at:
            return []
        self._look_at = now + self._shortest_s / 20
        return self._take([job for job in self._newest if now >= self._due[job]], now)

    def take_all(self, now: float) -> list[bytes]:
        """Return all reports that wait."""
        return self._take(list(self._newest), now)

    def next_look_s(self, now: float) -> float | None:
        """Return the time until `take_due` looks again; None where nothing waits."""
        return max(0.0, self._look_at - now) if self._newest else None

    def _take(self, jobs: list[str], now: float) -> list[bytes]:
        for job in jobs:
            self._written(job, now)
        return [self._newest.pop(job) for job in jobs]

    def _written(self, job: str, now: float) -> None:
        age_s = now - self._began.setdefault(job, now)
        for_age_s = min(AGE_SHARE * age_s, LONGEST * self._shortest_s)
        for_crowd_s = self._shortest_s * len(self._began) / CROWD
        self._due[job] = now + max(self._shortest_s, for_age_s, for_crowd_s)
