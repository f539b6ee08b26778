"""What the live view and the plain lines say."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from mdcampaign.display import Display, left_s, remaining_s
from mdcampaign.state import CampaignState


def stream(began: float) -> list[dict]:
    job = {"job": "g/a", "attempt": 1}
    progress = {"step": 250, "target_step": 1000, "saved_step": 0, "rate_ns_per_day": 321.0}
    return [
        {"event": "node_joined", "t": began, "node": "n1", "block": "0", "devices": [{"slot_cores": [[0], [1]]}]},
        {"event": "submitted", "t": began, "job": "g/a", "task": 1, "group": "g", "target_step": 1000},
        {"event": "submitted", "t": began, "job": "g/b", "task": 2, "group": "g", "target_step": 1000},
        {"event": "placed", "t": began, **job, "node": "n1", "device": "cpu", "index": [0]},
        {"event": "started", "t": began, **job},
        {"event": "progress", "t": began + 10, **job, "seq": 1, "skipped": 0, "progress": progress},
    ]


def test_time_left_follows_from_steps_and_rates() -> None:
    state = CampaignState()
    for event in stream(100.0):
        state.apply({**event, **event.get("progress", {})})
    assert left_s(state.jobs["g/a"]) == pytest.approx(30.0)
    assert left_s(state.jobs["g/b"]) is None
    assert remaining_s(list(state.jobs.values()), slots=2) == pytest.approx((30 + 40) / 2)


def test_plain_line_counts_jobs_and_slots() -> None:
    display = Display(Console(file=io.StringIO()))
    for event in stream(time.time()):
        display.take(event)
    line = display._line()
    assert "2 jobs: 1 running, 1 waiting; 1 of 2 slots busy" in line


def test_page_shows_running_jobs_and_takes_no_markup_from_messages() -> None:
    out = io.StringIO()
    display = Display(Console(file=out, width=80, force_terminal=True))
    for event in stream(time.time()):
        display.take(event)
    display.take({"event": "ended", "t": 0.0, "job": "g/a", "attempt": 1, "how": "lost", "message": "[bold]x[/]"})
    display.start()
    display.stop()
    assert "[bold]x[/]" in out.getvalue()


def test_page_names_slot_step_and_rate() -> None:
    display = Display(Console(file=io.StringIO()))
    for event in stream(time.time()):
        display.take(event)
    page = Console(file=io.StringIO(), width=80)
    page.print(display._page())
    text = page.file.getvalue()  # type: ignore[attr-defined]
    for word in ("cpu 0", "g/a", "250/1000", "321"):
        assert word in text
