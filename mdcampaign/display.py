"""The live view of a running campaign: what runs in which slot, how fast, and how long it will take."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mdcampaign.ledger import flat
from mdcampaign.state import CampaignState, JobState

PLAIN_S = 10.0
"""Where there is no terminal: seconds between two lines."""

ROWS = 16
"""Most running jobs that are listed; the rest is counted."""


class Display:
    """Shows a campaign from the events of its executor, on a terminal as a page that is drawn again each second.

    `take` is called for each event and returns at once; a thread of its own draws. Where the output is no terminal,
    one line is printed every ten seconds.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self._state = CampaignState()
        self._slots = 0
        self._notes: list[str] = []
        self._began = time.time()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="display", daemon=True)

    def take(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        with self._lock:
            self._state.apply(flat(event))
            kind = event["event"]
            if kind == "node_joined":
                self._slots += sum(len(device["slot_cores"]) for device in event["devices"])
            if note := self._note(event):
                self._notes = [*self._notes[-3:], f"{time.time() - self._began:5.0f} s  {note}"]

    @staticmethod
    def _note(event: dict[str, Any]) -> str:
        """Return a line for what a user wants to hear of."""
        kind = event["event"]
        if kind == "node_joined":
            return f"node {event['node']} joined"
        if kind in ("node_lost", "node_left"):
            return f"node {event['node']}: {event.get('why', 'gone')}"
        if kind == "directive" and event["kind"] != "extend":
            return f"{event['job']} is told to {event['kind']}{' as ' + event['why'] if event.get('why') else ''}"
        if kind == "ended" and event["how"] in ("lost", "interrupted", "crashed"):
            return f"{event['job']}, attempt {event['attempt']}: {event['how']}; {event.get('message', '')}".rstrip(
                "; "
            )
        if kind == "warning":
            return str(event["text"])
        return ""

    def start(self) -> None:
        """Begin to draw."""
        self._thread.start()

    def stop(self) -> None:
        """Draw once more and end."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def _draw(self) -> None:
        if not self.console.is_terminal:
            while not self._ended.wait(PLAIN_S):
                self.console.print(self._line(), highlight=False)
            return
        with Live(self._page(), console=self.console, auto_refresh=False, transient=True) as live:
            while not self._ended.wait(1.0):
                live.update(self._page(), refresh=True)

    def _line(self) -> str:
        """Return where the campaign stands, in one line."""
        with self._lock:
            jobs = list(self._state.jobs.values())
            counts = Counter(job.state for job in jobs)
            parts = [f"{count} {state}" for state, count in sorted(counts.items())]
            left = remaining_s(jobs, self._slots)
        eta = "" if left is None else f"; about {left:.0f} s left"
        busy = f"{counts['running']} of {self._slots} slots busy"
        return f"{time.time() - self._began:5.0f} s  {len(jobs)} jobs: {', '.join(parts)}; {busy}{eta}"

    def _page(self) -> Group:
        headline = Text(self._line(), style="bold")
        with self._lock:
            running = [job for job in self._state.jobs.values() if job.state == "running"]
            notes = Text("\n".join(self._notes), style="dim")
        seated = sorted(running, key=lambda job: (job.attempts[-1].device, job.attempts[-1].index))
        table = running_table(seated[:ROWS])
        if len(running) > ROWS:
            table.add_row("", f"and {len(running) - ROWS} more", "", "", "", "")
        return Group(headline, table, notes)


def running_table(jobs: list[JobState]) -> Table:
    """Return the table of running jobs, one a row; jobs that have not been placed yet are left out."""
    table = Table("slot", "job", "attempt", "progress", "ns/day", "left (s)", expand=False)
    for job in jobs:
        if job.attempts:
            table.add_row(*row(job))
    return table


def row(job: JobState) -> tuple[str, ...]:
    """Return the cells of a running job."""
    attempt = job.attempts[-1]
    done = f"{job.step}/{job.target_step} {100 * job.step / job.target_step:3.0f} %" if job.target_step else ""
    rate = "" if job.rate_ns_per_day is None else f"{job.rate_ns_per_day:.0f}"
    left = "" if (seconds := left_s(job)) is None else f"{seconds:.0f}"
    slot = f"{attempt.device} {','.join(map(str, attempt.index))}"
    return slot, job.job, str(attempt.number), done, rate, left


def left_s(job: JobState) -> float | None:
    """Return the seconds that a job still needs in a slot, from the steps of its present attempt; None if unknown."""
    if not job.attempts or job.progress_s is None:
        return None
    attempt = job.attempts[-1]
    first = max((a.step for a in job.attempts[:-1]), default=0)
    took_s, steps = job.progress_s - (attempt.started_s or attempt.placed_s), job.step - first
    if steps <= 0 or took_s <= 0:
        return None
    return max(0.0, (job.target_step - job.step) * took_s / steps)


def remaining_s(jobs: list[JobState], slots: int) -> float | None:
    """Estimate the time to the end: steps left, at the rates of each group so far, over all slots; None if unknown."""
    rates: dict[str, list[float]] = {}
    for job in jobs:
        took_s = sum((a.ended_s or job.progress_s or a.placed_s) - a.placed_s for a in job.attempts)
        if job.step and took_s > 0:
            rates.setdefault(job.group, []).append(job.step / took_s)
    need_s = 0.0
    for job in jobs:
        if job.ended:
            continue
        if not (known := rates.get(job.group)) or not job.target_step:
            return None
        need_s += max(0, job.target_step - job.step) / (sum(known) / len(known))
    return need_s / slots if slots else None
