"""The files of the event log and how they are read: incrementally, by any number of readers, while one writes."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdcampaign import atomic
from mdcampaign.errors import BadInput, CampaignLocked, LedgerCorrupt
from mdcampaign.layout import EVENTS

GROUP_BYTES = 1024 * 1024
"""What is written between two syncs is no larger, so damage by a power cut lies within the last such stretch."""
SEGMENT = "segment"
"""The kind of a segment's first line; readers of events never see it."""
Event = dict[str, Any]
_NAME = re.compile(r"log-(\d{6,})\.jsonl")
_CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, order=True)
class Position:
    """A place between two events: the number of a segment and a byte in it."""

    segment: int = 0
    byte: int = 0


class EventReader:
    """Iterates over the events after a position; `position` is where to go on later.

    A torn last line is left alone: it is not safe yet, or never will be.

    Raises:
        LedgerCorrupt: (while iterating) a line before the tail is no event, a segment is missing, or the log does
            not have the position (any more); names the file and the line or byte.
    """

    def __init__(self, campaign_dir: Path, since: Position | None = None) -> None:
        self._directory = campaign_dir / EVENTS
        since = since or Position()
        self._segment, self._byte = since.segment, since.byte

    @property
    def position(self) -> Position:
        """The place after the last event that was returned."""
        return Position(self._segment, self._byte)

    def __iter__(self) -> Iterator[Event]:
        numbers = segment_numbers(self._directory)
        first = self._segment or 1
        last = numbers[-1] if numbers else self._segment
        if missing := sorted(set(range(first, last + 1)) - set(numbers)):
            raise LedgerCorrupt(f"{segment_path(self._directory, missing[0])} is missing")
        for number in range(first, last + 1):
            start = self._byte if number == self._segment else 0
            yield from self._read(number, start, None if number == last else self._fence(number))

    def _fence(self, number: int) -> int | None:
        """Return the byte at which the next segment fences this one; None where it does not say."""
        follows = _header(segment_path(self._directory, number + 1)).get("follows", {})
        return follows["bytes"] if follows.get("segment") == number else None

    def _read(self, number: int, start: int, end: int | None) -> Iterator[Event]:
        path = segment_path(self._directory, number)
        if start > (path.stat().st_size if end is None else end):
            raise LedgerCorrupt(f"{path} ends before byte {start}, up to which it was read earlier")
        self._segment, self._byte = number, start
        with path.open("rb") as file:
            file.seek(start)
            rest = b""
            while data := file.read(_CHUNK_BYTES if end is None else min(_CHUNK_BYTES, end - file.tell())):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    event = self._parse(path, line)
                    if event is None:
                        return
                    self._byte += len(line) + 1
                    if event["event"] != SEGMENT:
                        yield event
        if end is not None and self._byte != end:
            raise LedgerCorrupt(f"{path} ends at byte {self._byte} instead of {end}")

    def _parse(self, path: Path, line: bytes) -> Event | None:
        """Return an event; None where the torn tail of the log begins."""
        try:
            event: Event = json.loads(line.decode())  # faster than letting json guess the encoding
            event["event"]
        except (ValueError, TypeError, KeyError):
            at = self._byte
            hole = at + line.find(b"\0")
            if hole >= at and hole >= path.stat().st_size - GROUP_BYTES and self._is_last(path):
                return None  # pages of one unsynced group reach the disk in any order
            number = _line_number(path, at)
            raise LedgerCorrupt(f"{path}, line {number}: no event: {line[:80]!r}") from None
        return event

    def _is_last(self, path: Path) -> bool:
        return path.name == segment_path(self._directory, segment_numbers(self._directory)[-1]).name


class SegmentWriter:
    """The file that this writer appends to. `size` counts what is known to be whole."""

    def __init__(self, directory: Path, number: int, follows: tuple[int, int]) -> None:
        """Begin a segment after (number, bytes); raises FileExistsError where another writer has just done so."""
        header = {
            "t": time.time(),
            "event": SEGMENT,
            "number": number,
            "follows": {"segment": follows[0], "bytes": follows[1]},
            "host": platform.node(),
            "pid": os.getpid(),
        }
        line = encode(header)
        path = segment_path(directory, number)
        if not atomic.create(path, line):
            raise FileExistsError(f"{path} exists")
        self._directory, self._number = directory, number
        self._file = os.open(path, os.O_WRONLY)
        self.size = len(line)

    @classmethod
    def after_last(cls, directory: Path) -> SegmentWriter:
        """Begin a segment after whatever is there."""
        while True:
            number, whole_bytes = last_segment(directory)
            try:
                return cls(directory, number + 1, (number, whole_bytes))
            except FileExistsError:
                continue

    def next(self) -> SegmentWriter:
        """Begin the segment after this one; CampaignLocked where another writer has begun one: it owns the log."""
        try:
            successor = SegmentWriter(self._directory, self._number + 1, (self._number, self.size))
        except FileExistsError:
            raise CampaignLocked(f"another process writes the log in {self._directory}; this one stops") from None
        self.close()
        return successor

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def append(self, data: bytes) -> None:
        """Write at the end of what is whole, and sync; after a failure the same place is written again."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self.size + done)
        os.fdatasync(self._file)
        self.size += len(data)


def read_events(campaign_dir: Path, since: Position | None = None) -> EventReader:
    """Return the events of a campaign after a position, oldest first, as an `EventReader`."""
    return EventReader(campaign_dir, since)


def segment_path(directory: Path, number: int) -> Path:
    """Return the path of a segment by its number, which counts from 1."""
    return directory / f"log-{number:06d}.jsonl"


def segment_numbers(directory: Path) -> list[int]:
    """Return the numbers of the segments that are there, in order; none where there is no directory."""
    try:
        return sorted(int(found[1]) for path in directory.iterdir() if (found := _NAME.fullmatch(path.name)))
    except FileNotFoundError:
        return []


def last_segment(directory: Path) -> tuple[int, int]:
    """Return the number of the last segment and the bytes of it that are whole; (0, 0) where there is none."""
    numbers = segment_numbers(directory)
    if not numbers:
        return 0, 0
    path = segment_path(directory, numbers[-1])
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start = file.seek(max(0, size - 2 * GROUP_BYTES))
        tail = file.read()
    hole = tail.find(b"\0", max(0, len(tail) - GROUP_BYTES))
    whole = tail[:hole] if hole >= 0 else tail
    return numbers[-1], start + whole.rfind(b"\n") + 1


def _header(path: Path) -> dict[str, Any]:
    """Return the first line of a segment; empty where it was never written whole."""
    with path.open("rb") as file:
        line = file.readline()
    try:
        return json.loads(line) if line.endswith(b"\n") else {}
    except ValueError:
        return {}


def _line_number(path: Path, byte: int) -> int:
    with path.open("rb") as file:
        return file.read(byte).count(b"\n") + 1


def encode(event: Event) -> bytes:
    """Return an event as a line of the log; BadInput where that cannot be."""
    try:
        text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN or infinity somewhere
        text = json.dumps(_finite(event), separators=(",", ":"), allow_nan=False)
    except TypeError as exc:
        raise BadInput("event", event, f"no JSON: {exc}") from None
    line = text.encode() + b"\n"
    if len(line) > GROUP_BYTES:
        raise BadInput("event", event["event"], f"{len(line)} bytes; an event has at most {GROUP_BYTES}")
    return line


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
