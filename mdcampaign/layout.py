"""Where things lie in a campaign directory."""

from __future__ import annotations

import zlib
from pathlib import Path

CAMPAIGN_FILE = "campaign.yaml"
EVENTS = "events"
JOBS = "jobs"
CONTROL = "control"
LOCK = "lock"
REPORT = "report.html"

FLAT = 500
"""So many names lie directly in `jobs/` or in a group; later ones go into buckets."""
BUCKETS = 500


def job_directory(campaign_dir: Path, group: str, name: str) -> Path:
    """Return the directory of a job: `jobs/GROUP/NAME`, or with a bucket `_NNN` before a crowded group or name.

    Looks at what is on disk: a directory that exists is the answer; where there is none it is the plain path. The
    one process that holds the campaign makes the directory when a job is submitted (`Campaign.job_dir`), so
    every other process finds it, and it never moves.
    """
    return _find(_find(campaign_dir / JOBS, group), name)


def bucket(name: str) -> str:
    """Return the bucket of a name, "_000" to "_499"; no job or group can be named so."""
    return f"_{zlib.crc32(name.encode()) % BUCKETS:03d}"


def _find(parent: Path, name: str) -> Path:
    plain = parent / name
    if not plain.is_dir() and (crowded := parent / bucket(name) / name).is_dir():
        return crowded
    return plain


class Allocator:
    """Makes job directories and keeps every directory at or below `FLAT + BUCKETS` entries.

    One process at a time: the holder of the campaign's lock. Up to `FLAT * BUCKETS` names fit on each level before
    buckets themselves are expected to pass a thousand.
    """

    def __init__(self, campaign_dir: Path) -> None:
        self._jobs = campaign_dir / JOBS
        self._plain: dict[Path, int] = {}

    def make(self, group: str, name: str) -> Path:
        """Return the directory of a job, made if it is new."""
        return self._make(self._make(self._jobs, group), name)

    def _make(self, parent: Path, name: str) -> Path:
        found = _find(parent, name)
        if found.is_dir():
            return found
        if parent not in self._plain:
            self._plain[parent] = sum(not entry.name.startswith((".", "_")) for entry in parent.iterdir())
        if self._plain[parent] >= FLAT:
            found = parent / bucket(name) / name
        else:
            self._plain[parent] += 1
        found.mkdir(parents=True, exist_ok=True)
        return found
