"""The event log: nothing that was acknowledged is ever lost (N5, N6, D1); real kills."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mdcampaign.errors import BadInput, CampaignError, LedgerCorrupt
from mdcampaign.ledger import KINDS, LedgerWriter, Position, event, read_events
from mdcampaign.segments import GROUP_BYTES, segment_path

WRITE = """
import sys, pathlib, os
from mdcampaign.ledger import LedgerWriter, event
ledger = LedgerWriter(pathlib.Path(sys.argv[1]), rotate_bytes=20_000)
first = int(sys.argv[2])
def safe(n):
    os.write(1, b"%d\\n" % n)
for n in range(first, first + 1_000_000):
    ledger.append(event("warning", text="x" * (n % 300), n=n), then=lambda n=n: safe(n))
    if n % 50 == 0:
        ledger.flush()
"""


def note(n: int) -> dict:
    return event("warning", text="note", n=n)


def numbers(campaign_dir: Path, since: Position | None = None) -> list[int]:
    return [one["n"] for one in read_events(campaign_dir, since)]


def progress(job: str, step: int) -> dict:
    return event("progress", job=job, attempt=1, step=step, target_step=100, saved_step=0)


def segments(campaign_dir: Path) -> list[Path]:
    return sorted((campaign_dir / "events").iterdir())


def test_events_come_back_in_order_over_rotations_and_restarts(tmp_path) -> None:
    for start in (0, 500):
        with LedgerWriter(tmp_path, rotate_bytes=2000) as ledger:
            for n in range(start, start + 500):
                ledger.append(note(n))
                if n % 20 == 0:
                    ledger.flush()
    assert numbers(tmp_path) == list(range(1000))
    assert len(segments(tmp_path)) > 10
    assert all(path.stat().st_size < 4000 for path in segments(tmp_path))


def test_what_was_acknowledged_survives_thirty_kills(tmp_path) -> None:
    """kill -9 at a random moment, thirty times over one log; torn lines are dropped."""
    rng, acknowledged, first = random.Random(7), [], 0
    for _ in range(30):
        command = [sys.executable, "-c", WRITE, str(tmp_path), str(first)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            for _ in range(rng.randrange(1, 200)):
                acknowledged.append(int(writer.stdout.readline()))
            writer.kill()
            acknowledged += [int(line) for line in writer.stdout.read().split(b"\n")[:-1]]
        first = acknowledged[-1] + 1_000
    written = numbers(tmp_path)
    assert len(written) == len(set(written)) and written == sorted(written)
    assert set(acknowledged) <= set(written)


@pytest.mark.parametrize("torn", [b'{"t":1,"ev', b'{"t":1,"event":"warning","text":"x","n":9}', b"\0" * 5000])
def test_a_torn_last_line_is_dropped_and_fenced(tmp_path, torn) -> None:
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(note(1))
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(torn)
    assert numbers(tmp_path) == [1]
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(note(2))
    assert numbers(tmp_path) == [1, 2]


def test_pages_of_an_unsynced_group_lost_in_a_power_cut_are_dropped(tmp_path) -> None:
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(note(1))
    line = json.dumps(note(3)).encode() + b"\n"
    with segments(tmp_path)[-1].open("ab") as file:
        file.write(b"\0" * 4096 + b"\n" + line)
    assert numbers(tmp_path) == [1]
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(note(2))
    assert numbers(tmp_path) == [1, 2]


def test_damage_before_the_tail_is_told_with_file_and_line(tmp_path) -> None:
    with LedgerWriter(tmp_path) as ledger:
        for n in range(5):
            ledger.append(note(n))
    path = segments(tmp_path)[-1]
    lines = path.read_bytes().split(b"\n")
    lines[3] = b"garbage"
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(LedgerCorrupt, match=rf"{path.name}, line 4: no event: b'garbage'"):
        numbers(tmp_path)


def test_a_lost_or_cut_segment_is_told(tmp_path) -> None:
    for n in range(3):
        with LedgerWriter(tmp_path) as ledger:
            ledger.append(note(n))
    path = segments(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(LedgerCorrupt, match=r"log-000002\.jsonl ends at byte"):
        numbers(tmp_path)
    path.unlink()
    with pytest.raises(LedgerCorrupt, match=r"log-000002\.jsonl is missing"):
        numbers(tmp_path)


def test_a_reader_goes_on_where_it_was(tmp_path) -> None:
    with LedgerWriter(tmp_path, rotate_bytes=500) as ledger:
        reader, seen = read_events(tmp_path), []
        for n in range(100):
            ledger.append(note(n))
            ledger.flush()
            if n % 3 == 0:
                reader = read_events(tmp_path, reader.position)
                seen += [one["n"] for one in reader]
        assert seen == list(range(100))
        assert numbers(tmp_path, reader.position) == []
    with pytest.raises(LedgerCorrupt, match="up to which it was read earlier"):
        numbers(tmp_path, Position(reader.position.segment, 10**9))


def test_a_writer_that_lost_the_campaign_cannot_spoil_the_log(tmp_path) -> None:
    """Suspended, taken over, woken: what it adds does not count, and at the next segment it stops."""
    told: list[str] = []
    old = LedgerWriter(tmp_path, rotate_bytes=1000, on_trouble=told.append)
    old.append(note(1))
    old.flush()
    with LedgerWriter(tmp_path) as new:
        new.append(note(2))
        old.append(note(666))
        old.flush()
        new.append(note(3))
    assert numbers(tmp_path) == [1, 2, 3]
    old.append(event("warning", text="x" * 2000))
    old.flush()
    old.append(note(667))
    with pytest.raises(CampaignError, match="another process writes the log"):
        old.flush()
    with pytest.raises(CampaignError, match="closed: another process"):
        old.append(note(668))
    assert len(told) == 1 and numbers(tmp_path) == [1, 2, 3]


def test_many_threads(tmp_path) -> None:
    safe: list[int] = []
    with LedgerWriter(tmp_path) as ledger, ThreadPoolExecutor(8) as pool:
        for start in range(0, 4000, 500):
            pool.submit(lambda s=start: [ledger.append(note(n), lambda n=n: safe.append(n)) for n in range(s, s + 500)])
    assert sorted(numbers(tmp_path)) == sorted(safe) == list(range(4000))


def test_a_failing_callback_harms_nobody(tmp_path) -> None:
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(note(1), then=lambda: 1 / 0)
        ledger.append(note(2))
    assert numbers(tmp_path) == [1, 2]


class FullDisk:
    """Stands before os.pwrite: a disk that takes some bytes of a group and then is full until `free` is set."""

    def __init__(self) -> None:
        self.free, self.refused = threading.Event(), threading.Event()
        self._pwrite = os.pwrite

    def __call__(self, file: int, data: bytes, offset: int) -> int:
        if self.free.is_set():
            return self._pwrite(file, data, offset)
        if len(data) > 100:
            return self._pwrite(file, data[:100], offset)
        self.refused.set()
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch) -> Iterator[FullDisk]:
    disk = FullDisk()
    monkeypatch.setattr(os, "pwrite", disk)
    yield disk
    disk.free.set()


def test_a_full_disk_loses_nothing_and_blocks_nobody(tmp_path, full_disk) -> None:
    told: list[str] = []
    ledger = LedgerWriter(tmp_path, on_trouble=told.append, retry_s=0.01)
    safe = threading.Event()
    ledger.append(note(0))
    assert full_disk.refused.wait(20)
    for n in range(1, 3000):
        ledger.append(note(n))
    ledger.append(note(3000), then=safe.set)
    with pytest.raises(CampaignError, match=r"3001 events are not in the log .* No space left"):
        ledger.flush(timeout_s=0.1)
    assert not safe.is_set() and numbers(tmp_path) == []
    full_disk.free.set()
    assert safe.wait(20)
    ledger.close()
    assert numbers(tmp_path) == list(range(3001))
    assert len(told) == 2 and "No space left" in told[0] and "nothing was lost" in told[1]


def test_closing_on_a_full_disk_ends_and_says_what_is_lost(tmp_path, full_disk) -> None:
    ledger = LedgerWriter(tmp_path, on_trouble=lambda text: None, retry_s=0.01)
    ledger.append(note(0))
    with pytest.raises(CampaignError, match=r"1 events are not in the log .* No space left"):
        ledger.close(timeout_s=0.2)
    ledger.close()


def test_progress_is_thinned_but_the_last_before_an_end_is_written_n6(tmp_path) -> None:
    with LedgerWriter(tmp_path, thin_s=3600) as ledger:
        for step in range(1, 1001):
            for job in ("g/a", "g/b"):
                ledger.append(progress(job, step))
        ledger.append(event("ended", job="g/a", attempt=1, how="result"))
        ledger.append(progress("g/a", 2000))
        ledger.flush()
        ledger.append(progress("g/b", 1001), then=lambda: None)
    steps = [(one["job"], one.get("step")) for one in read_events(tmp_path)]
    a = [("g/a", 1), ("g/a", 1000), ("g/a", None), ("g/a", 2000)]
    assert [one for one in steps if one[0] == "g/a"] == a
    assert [one for one in steps if one[0] == "g/b"] == [("g/b", 1), ("g/b", 1000), ("g/b", 1001)]


def test_progress_that_was_held_back_is_written_in_time(tmp_path) -> None:
    with LedgerWriter(tmp_path, thin_s=0.05) as ledger:
        ledger.append(progress("g/a", 1))
        ledger.append(progress("g/a", 2))
        deadline = threading.Event()
        for _ in range(2000):
            if [one["step"] for one in read_events(tmp_path)] == [1, 2]:
                break
            deadline.wait(0.01)
    assert [one["step"] for one in read_events(tmp_path)] == [1, 2]


def test_values_that_json_lacks_become_null(tmp_path) -> None:
    with LedgerWriter(tmp_path) as ledger:
        ledger.append(event("steering", values={"e": float("nan"), "l": [float("inf"), 1.5]}))
    (one,) = read_events(tmp_path)
    assert one["values"] == {"e": None, "l": [None, 1.5]}


def test_bad_events_are_refused_where_they_are_made(tmp_path) -> None:
    with pytest.raises(BadInput, match=r"unknown kind.*Did you mean 'placed'"):
        event("place", job="g/a")
    with pytest.raises(BadInput, match=r"ended\.how: required field is missing"):
        event("ended", job="g/a", attempt=1)
    with LedgerWriter(tmp_path) as ledger:
        with pytest.raises(BadInput, match="no JSON"):
            ledger.append(event("warning", text=object()))
        with pytest.raises(BadInput, match=f"at most {GROUP_BYTES}"):
            ledger.append(event("warning", text="x" * GROUP_BYTES))
        with pytest.raises(BadInput, match=r"warning\.t: required"):
            ledger.append({"event": "warning", "text": ""})
    assert list(read_events(tmp_path)) == []


def test_a_directory_that_cannot_be_written(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CampaignError, match="cannot write the log"):
        LedgerWriter(tmp_path / "file")


def test_every_kind_is_documented() -> None:
    text = (Path(__file__).parents[1] / "docs" / "campaign-directory.md").read_text()
    assert [kind for kind in KINDS if f"| `{kind}` |" not in text] == []


def test_segments_have_readable_names(tmp_path) -> None:
    assert segment_path(tmp_path, 1).name == "log-000001.jsonl"
