"""What the log says of jobs, and what a second run makes of it (R1, R2)."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdcampaign.errors import NameTaken
from mdcampaign.jobs import MDJob
from mdcampaign.ledger import LedgerWriter
from mdcampaign.state import CampaignState

ID = "1" * 64


def at(t: float, kind: str, **fields) -> dict:
    return {"t": t, "event": kind, "job": "g/a", **fields}


def submitted(t: float, **fields) -> dict:
    return at(t, "submitted", task=1, identity=ID, group="g", priority=1.0, slots=1, target_step=100, **fields)


def placed(t: float, attempt: int, node: str = "n1") -> dict:
    return at(t, "placed", attempt=attempt, node=node, device="GPU-1", index=[0, 1])


def progress(t: float, attempt: int, step: int) -> dict:
    return at(t, "progress", attempt=attempt, step=step, target_step=100, saved_step=step - 5, rate_ns_per_day=2.5)


def ended(t: float, attempt: int, how: str, **outcome) -> dict:
    return at(t, "ended", attempt=attempt, how=how, outcome=outcome or None)


def done(t: float, outcome: str = "done", step: int = 100) -> dict:
    return at(t, "done", outcome=outcome, step=step, ns=0.2, message="", frames=10)


def fold(*events: dict) -> CampaignState:
    state = CampaignState()
    state.extend(events)
    return state


STARTED = {"t": 50.0, "event": "campaign_started", "host": "h", "pid": 1, "version": "0", "python": "3", "parsl": "2"}


def test_the_life_of_a_job() -> None:
    job = fold(
        submitted(0.0),
        placed(10.0, 1),
        at(11.0, "started", attempt=1),
        progress(12.0, 1, 40),
        ended(13.0, 1, "interrupted", kind="interrupted", step=40, message="yielded"),
        at(14.0, "reranked", priority=7.0),
        placed(20.0, 2, "n2"),
        progress(21.0, 1, 41),  # late news of the attempt before
        progress(22.0, 2, 90),
        ended(30.0, 2, "result", kind="done", step=100),
        done(30.5),
    ).jobs["g/a"]
    assert (job.state, job.step, job.ns, job.priority, job.next_attempt) == ("done", 100, 0.2, 7.0, 3)
    assert (job.wait_s, job.longest_wait_s, job.waiting_since_s) == (17.0, 10.0, None)
    first, second = job.attempts
    assert (first.how, first.step, first.saved_step, first.message) == ("interrupted", 40, 35, "yielded")
    assert (first.placed_s, first.started_s, first.ended_s) == (10.0, 11.0, 13.0)
    assert (second.node, second.device, second.index, second.rate_ns_per_day) == ("n2", "GPU-1", [0, 1], 2.5)
    assert job.outcome["frames"] == 10


def test_what_the_campaign_left_open_is_interrupted_and_goes_on_in_the_second_run() -> None:
    killed = [submitted(0.0), placed(10.0, 1), progress(12.0, 1, 40), STARTED]
    job = fold(*killed).jobs["g/a"]
    assert (job.state, job.attempts[0].how, job.attempts[0].ended_s) == ("interrupted", "lost", 12.0)
    again = fold(*killed, submitted(60.0), placed(61.0, 2), done(70.0)).jobs["g/a"]
    assert (again.state, again.wait_s, len(again.attempts)) == ("done", 11.0, 2)


def test_kinds_of_the_future_are_skipped() -> None:
    assert fold(submitted(0.0), at(1.0, "thawed", by="somebody")).jobs["g/a"].state == "waiting"


@pytest.mark.parametrize(
    ("outcome", "steps", "repeated"),
    [
        ("done", 100, False),
        ("done", 50, False),
        ("done", 200, True),  # a longer target continues it
        ("stopped", 100, False),
        ("stopped", 200, True),
        ("cancelled", 200, False),
        ("failed", 100, True),
    ],
)
def test_a_second_run_does_not_repeat_what_is_finished_r1(outcome, steps, repeated) -> None:
    state = fold(submitted(0.0), placed(1.0, 1), done(9.0, outcome, step=100 if outcome == "done" else 30))
    assert (state.finished("g", "a", ID, steps) is None) is repeated


def test_unfinished_and_unknown_jobs_are_run() -> None:
    state = fold(submitted(0.0))
    assert state.finished("g", "a", ID, 100) is None
    assert state.finished("g", "b", ID, 100) is None


def test_a_name_with_other_content_is_refused() -> None:
    with pytest.raises(NameTaken, match=r"job g/a exists .*identity 111111111111 there, 222222222222 here"):
        fold(submitted(0.0)).finished("g", "a", "2" * 64, 100)


def test_the_key_is_the_content_not_a_path_r2(tmp_path: Path) -> None:
    """The same tpr elsewhere, at another priority, asked for right after *done*: not run again."""
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "in.tpr").write_bytes(b"content")
    engine = {"kind": "gromacs", "tpr": tmp_path / "x" / "in.tpr"}
    job = MDJob(name="a", group="g", engine=engine, steps=100)
    moved = MDJob(name="a", group="g", engine={**engine, "tpr": tmp_path / "y" / "in.tpr"}, steps=100, priority=9)
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(submitted(0.0) | {"identity": job.identity})
        ledger.append(done(1.0))
    found = CampaignState.replay(tmp_path).finished("g", "a", moved.identity, moved.steps)
    assert found is not None and found.outcome["ns"] == 0.2
