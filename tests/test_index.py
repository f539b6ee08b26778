"""The index of readers: catches up, never stands in the writer's way (N5, N6), is rebuilt when in doubt."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import fields
from pathlib import Path

import pytest

from mdcampaign.errors import CampaignError, LedgerCorrupt
from mdcampaign.index import CampaignIndex, default_path
from mdcampaign.ledger import LedgerWriter, event, read_events
from mdcampaign.state import Attempt, CampaignState, JobState


def life(ledger: LedgerWriter, n: int, end: str | None = "done") -> None:
    """A job with two attempts; without an end it is left running."""
    job = f"g{n % 3}/job-{n}"
    ledger.append(event("submitted", job=job, task=n, identity=f"{n:064x}", group=f"g{n % 3}", priority=float(n % 5)))
    for attempt in (1, 2):
        ledger.append(event("placed", job=job, attempt=attempt, node=f"n{n % 7}", device="GPU-1", index=[0]))
        ledger.append(event("started", job=job, attempt=attempt))
        ledger.append(
            event(
                "progress", job=job, attempt=attempt, step=50 * attempt, target_step=100, saved_step=0, observables={}
            )
        )
        if attempt == 1 or end:
            ledger.append(event("ended", job=job, attempt=attempt, how="interrupted" if attempt == 1 else "result"))
    if end:
        ledger.append(event("done", job=job, outcome=end, step=100, ns=1.0, message=""))


def assert_equals_log(index: CampaignIndex, campaign_dir: Path) -> None:
    """The index says of every job what a fold of the whole log says."""
    folded = CampaignState.replay(campaign_dir).jobs
    assert {job.job: index.job(job.job) for job in index.jobs()} == folded


@pytest.fixture
def campaign_dir(tmp_path: Path) -> Path:
    with LedgerWriter(tmp_path / "c") as ledger:
        for n in range(30):
            life(ledger, n, "failed" if n % 10 == 0 else "done")
        life(ledger, 30, None)
        ledger.append(event("warning", text="beware"))
    return tmp_path / "c"


def test_questions(campaign_dir, tmp_path) -> None:
    with CampaignIndex(campaign_dir, tmp_path / "i.sqlite") as index:
        assert index.refresh() == len(list(read_events(campaign_dir)))
        assert index.refresh() == 0
        assert index.counts() == {"done": 27, "failed": 3, "running": 1}
        assert [job.job for job in index.jobs("failed")] == ["g0/job-0", "g1/job-10", "g2/job-20"]
        assert len(index.jobs(("failed", "running"), group="g0")) == 2
        assert len(index.jobs(limit=5)) == 5
        assert [attempt.how for attempt in index.attempts("g0/job-30")] == ["interrupted", None]
        assert len(index.all_attempts()) == 62
        assert index.job("g9/none") is None
        assert [note["text"] for note in index.notes("warning")] == ["beware"]
        assert_equals_log(index, campaign_dir)


def test_catching_up_step_by_step_equals_the_log(tmp_path) -> None:
    with LedgerWriter(tmp_path, rotate_bytes=5000) as ledger, CampaignIndex(tmp_path, tmp_path / "i.sqlite") as index:
        for n in range(40):
            life(ledger, n, None if n % 4 == 0 else "done")
            if n % 9 == 0:
                ledger.append(
                    event("campaign_started", host="h", pid=1, version="0.1", python="3.11", parsl="2026.10.26")
                )
            ledger.flush()
            index.refresh()
        assert_equals_log(index, tmp_path)


def test_two_readers_of_one_index(campaign_dir, tmp_path) -> None:
    path = tmp_path / "i.sqlite"
    with CampaignIndex(campaign_dir, path) as one, CampaignIndex(campaign_dir, path) as two:
        assert one.refresh() > 0
        assert two.refresh() == 0
        assert one.counts() == two.counts()


def test_a_reader_with_an_open_transaction_disturbs_nobody_n5(tmp_path) -> None:
    """Reads are held open during 10,000 events; the writer never waits for them and no event is lost."""
    path, written, stop = tmp_path / "i.sqlite", 10_000, threading.Event()
    with LedgerWriter(tmp_path) as ledger:
        for n in range(10):
            life(ledger, n)
        ledger.flush()
        with CampaignIndex(tmp_path, path) as index:
            index.refresh()
            held = sqlite3.connect(path, isolation_level=None)
            held.execute("BEGIN")
            held.execute("SELECT count(*) FROM jobs").fetchone()

            def read() -> None:
                while not stop.is_set():
                    list(read_events(tmp_path))

            reader = threading.Thread(target=read)
            reader.start()
            for n in range(written):
                ledger.append(event("warning", text="", n=n))
            ledger.flush()
            stop.set()
            reader.join()
            assert [one["n"] for one in read_events(tmp_path) if "n" in one] == list(range(written))
            held.execute("COMMIT")
            held.close()
            assert index.refresh() == written


@pytest.mark.parametrize("damage", ["garbage", "truncated", "version", "pages"])
def test_a_damaged_index_is_built_anew_without_a_word(campaign_dir, tmp_path, damage) -> None:
    path = tmp_path / "i.sqlite"
    with CampaignIndex(campaign_dir, path) as index:
        index.refresh()
    content = path.read_bytes()
    if damage == "garbage":
        path.write_bytes(b"no database" * 1000)
    elif damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "pages":
        path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    else:
        with sqlite3.connect(path) as db:
            db.execute("PRAGMA user_version = 99")
        db.close()
    with CampaignIndex(campaign_dir, path) as index:
        index.refresh()
        assert index.counts() == {"done": 27, "failed": 3, "running": 1}
        assert_equals_log(index, campaign_dir)


def test_another_log_under_the_same_path_is_noticed(campaign_dir, tmp_path) -> None:
    path = tmp_path / "i.sqlite"
    with CampaignIndex(campaign_dir, path) as index:
        index.refresh()
        for segment in (campaign_dir / "events").iterdir():
            segment.unlink()
        with LedgerWriter(campaign_dir) as ledger:
            for n in range(90):
                life(ledger, n)
        index.refresh()
        assert index.counts() == {"done": 90}


def test_a_damaged_log_is_told_and_not_indexed(campaign_dir, tmp_path) -> None:
    with (campaign_dir / "events" / "log-000001.jsonl").open("ab") as file:
        file.write(b"garbage\n")
    with CampaignIndex(campaign_dir, tmp_path / "i.sqlite") as index:
        with pytest.raises(LedgerCorrupt, match="garbage"):
            index.refresh()
        assert index.counts() == {}


def test_an_index_that_cannot_be_written_is_kept_in_memory(campaign_dir, tmp_path) -> None:
    with CampaignIndex(campaign_dir, tmp_path / "nowhere" / "i.sqlite") as index:
        index.refresh()
        assert index.counts()["done"] == 27


def test_each_campaign_has_an_index_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    paths = {default_path(tmp_path / name / "c") for name in ("a", "b")}
    assert len(paths) == 2 and all(path.parent.stat().st_mode & 0o077 == 0 for path in paths)
    with pytest.raises(CampaignError, match="no campaign directory"):
        CampaignIndex(tmp_path / "a")


def test_every_column_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "campaign-directory.md").read_text()
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| `")}
    for table, record in (("jobs", JobState), ("attempts", Attempt)):
        columns = rows[f"| `{table}`"]
        assert [one.name for one in fields(record) if f" {one.name}" not in columns and one.name != "attempts"] == []
