"""The event log of a campaign: `events/log-NNNNNN.jsonl`, one JSON object a line, and its only writer.

The log is the truth. What happened is what it says; everything else (state, index, report) is folded from it. A
writer begins a segment of its own, and the first line of a segment fences the one before it at the byte where that
was whole: no two writers ever write to one file, and what a writer that lost the campaign adds later does not count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mdcampaign.errors import BadInput, CampaignError, CampaignLocked, nearest
from mdcampaign.layout import EVENTS
from mdcampaign.segments import GROUP_BYTES, Event, EventReader, Position, SegmentWriter, encode, read_events
from mdcampaign.thinning import Thinned

__all__ = ["KINDS", "Event", "EventReader", "LedgerWriter", "Position", "event", "flat", "read_events"]

log = logging.getLogger(__name__)

KINDS: dict[str, tuple[str, ...]] = {
    "campaign_started": ("host", "pid", "version", "python", "parsl"),
    "campaign_ended": (),
    "submitted": ("job", "task"),
    "placed": ("job", "attempt", "node", "device", "index"),
    "started": ("job", "attempt"),
    "progress": ("job", "attempt", "step", "target_step", "saved_step"),
    "directive": ("job", "attempt", "kind"),
    "ended": ("job", "attempt", "how"),
    "done": ("job", "outcome"),
    "reranked": ("job", "priority"),
    "node_joined": ("node", "block", "devices"),
    "node_left": ("node",),
    "node_lost": ("node",),
    "warning": ("text",),
    "executor_failed": ("text",),
    "steering": (),
}
"""Kinds of events and the fields that each must have; more are allowed, and readers skip what they do not know."""

ROTATE_BYTES = 64 * 1024 * 1024
THIN_S = 5.0


def event(kind: str, **fields: Any) -> Event:
    """Return an event with the time now; times are Unix seconds.

    Raises:
        BadInput: an unknown kind, or a field that the kind must have is missing.
    """
    made = {"t": time.time(), "event": kind, **fields}
    _check(made)
    return made


def flat(news: Event) -> Event:
    """Return an event as the log keeps it: the fields of a progress report beside its job and attempt."""
    progress: Event = news.get("progress", {})
    return {key: value for key, value in news.items() if key != "progress"} | progress


class LedgerWriter:
    """Appends events in groups: one write and one sync for all that came since the last.

    Every method may be called from any thread. `append` never touches the disk. While the disk is full or away,
    events wait in memory and are written when it is back.

    Args:
        campaign_dir: the campaign directory; its `events/` is made if missing.
        on_trouble: is given one line when writing fails, and one when it works again; called in the writer's thread.
        rotate_bytes: a segment that has reached this size is followed by a new one.
        thin_s: of the progress of one job, one report in this many seconds is written, the newest; fewer where many
            jobs report or one does for long (`thinning`). The last one before an attempt ends is always written.
        retry_s: time between two tries while writing fails.

    Raises:
        CampaignError: the directory cannot be made or written to.
    """

    def __init__(
        self,
        campaign_dir: Path,
        *,
        on_trouble: Callable[[str], None] = log.warning,
        rotate_bytes: int = ROTATE_BYTES,
        thin_s: float = THIN_S,
        retry_s: float = 1.0,
    ) -> None:
        self._directory = directory = campaign_dir / EVENTS
        self._on_trouble, self._rotate_bytes, self._retry_s = on_trouble, rotate_bytes, retry_s
        self._waiting: deque[tuple[bytes, Callable[[], None] | None]] = deque()
        self._thinned = Thinned(thin_s)
        self._changed = threading.Condition()
        self._appended = self._safe = 0
        self._closing = self._given_up = False
        self._trouble: str | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._segment = SegmentWriter.after_last(directory)
        except OSError as exc:
            raise CampaignError(f"cannot write the log in {directory}: {exc}") from exc
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def append(self, event: Event, then: Callable[[], None] | None = None) -> None:
        """Append an event; `then` is called in the writer's thread when it is safe on disk.

        Progress is thinned unless it has a `then`. Values that JSON does not know (NaN, infinities) become null.

        Raises:
            CampaignError: the ledger is closed.
            BadInput: the event is of no known kind, lacks a field, is no JSON, or is too large.
        """
        _check(event)
        line = encode(event)
        job = event.get("job")
        with self._changed:
            if self._closing or self._given_up:
                raise CampaignError(f"the ledger is closed{f': {self._trouble}' if self._trouble else ''}")
            if job is not None and event["event"] == "progress" and then is None:
                if not self._thinned.due(job, line, time.monotonic()):
                    return
            elif job is not None and event["event"] in ("ended", "done"):
                self._extend(self._thinned.forget(job))
            self._waiting.append((line, then))
            self._appended += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float = 30.0) -> None:
        """Return when everything appended so far, thinned progress included, is on disk.

        Raises:
            CampaignError: it is not within the time; says what is in the way.
        """
        with self._changed:
            self._extend(self._thinned.take_all(time.monotonic()))
            target = self._appended
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._safe >= target or self._given_up, timeout_s)
            self._must_be_safe(target)

    def close(self, timeout_s: float = 30.0) -> None:
        """Flush and end the writer; callable twice. Raises as `flush` does, and then gives up what is left."""
        with self._changed:
            if self._closing:
                return
            self._extend(self._thinned.take_all(time.monotonic()))
            self._closing = True
            target = self._appended
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            self._must_be_safe(target)

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _must_be_safe(self, target: int) -> None:
        if self._safe < target:
            why = self._trouble or "the file system does not answer"
            raise CampaignError(f"{target - self._safe} events are not in the log of {self._directory}: {why}")

    def _extend(self, lines: list[bytes]) -> None:
        self._waiting.extend((line, None) for line in lines)
        self._appended += len(lines)

    def _run(self) -> None:
        try:
            self._write_groups()
        finally:
            self._segment.close()

    def _write_groups(self) -> None:
        while (group := self._next_group()) is not None:
            if not self._write(b"".join(line for line, _ in group)):
                return
            with self._changed:
                self._safe += len(group)
                self._changed.notify_all()
            for _, then in group:
                if then is not None:
                    _call(then)

    def _next_group(self) -> list[tuple[bytes, Callable[[], None] | None]] | None:
        """Wait for events and return a group of at most `GROUP_BYTES`; None when closed and all is written."""
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait(self._thinned.next_look_s(time.monotonic()))
                self._extend(self._thinned.take_due(time.monotonic()))
            group, size = [], 0
            while self._waiting and size + len(self._waiting[0][0]) <= GROUP_BYTES:
                group.append(self._waiting.popleft())
                size += len(group[-1][0])
            return group

    def _write(self, data: bytes) -> bool:
        """Put a group on disk, however long that takes; False when given up."""
        while True:
            try:
                if self._segment.size >= self._rotate_bytes:
                    self._segment = self._segment.next()
                self._segment.append(data)
            except CampaignLocked as exc:
                self._trouble = str(exc)
                self._tell(str(exc))
                with self._changed:
                    self._given_up = True
                    self._changed.notify_all()
                return False
            except OSError as exc:
                if self._trouble is None:
                    self._tell(f"the log in {self._directory} cannot be written ({exc}); events wait in memory")
                self._trouble = str(exc)
                with self._changed:
                    if self._changed.wait_for(lambda: self._given_up, self._retry_s):
                        return False
                continue
            if self._trouble is not None:
                self._trouble = None
                self._tell(f"the log in {self._directory} is written again; nothing was lost")
            return True

    def _tell(self, text: str) -> None:
        _call(lambda: self._on_trouble(text))


def _check(event: Event) -> None:
    kind = event.get("event")
    if kind not in KINDS:
        raise BadInput("event", kind, "unknown kind of event", f"{nearest(kind, KINDS)}Known: {', '.join(KINDS)}.")
    for name in ("t", *KINDS[kind]):
        if name not in event:
            raise BadInput(f"{kind}.{name}", None, "required field is missing")


def _call(function: Callable[[], None]) -> None:
    """Call somebody else's function; its failure must not end the writer."""
    try:
        function()
    except Exception:
        log.exception("a callback of the ledger failed")
