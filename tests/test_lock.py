"""One driver at a time (R6): real processes, real kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from mdcampaign.campaign import Campaign
from mdcampaign.errors import CampaignError, CampaignLocked
from mdcampaign.lock import Lock, Owner, holder

HOLD = """
import sys, pathlib
from mdcampaign.errors import CampaignLocked
from mdcampaign.campaign import Campaign
sys.stdin.readline()
try:
    Campaign(pathlib.Path(sys.argv[1])).acquire()
except CampaignLocked as exc:
    print("refused", exc, flush=True)
else:
    print("holds", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def start() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Start a process that takes the campaign at its first line of input, and ends at its second."""
    running: list[subprocess.Popen[str]] = []

    def begin(directory: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLD, str(directory)]
        running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("go\n")
    process.stdin.flush()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line about the lock; "taking ... over" is the message to the user before it."""
    assert process.stdout
    return next(line.strip() for line in process.stdout if not line.startswith("taking"))


def write_lock(path: Path, owner: Owner, age_s: float = 0.0) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(owner)))
    os.utime(path, (time.time() - age_s,) * 2)


def test_a_second_start_is_refused_at_once_naming_host_and_pid_r6(tmp_path, start) -> None:
    first = start(tmp_path / "c")
    go(first)
    assert line_of(first) == "holds"
    with pytest.raises(CampaignLocked, match=f"process {first.pid} of .* on {os.uname().nodename}"):
        Campaign(tmp_path / "c").acquire(take_over=True)


def test_a_killed_owner_is_taken_over_with_a_message_r6(tmp_path, start) -> None:
    first = start(tmp_path / "c")
    go(first)
    assert line_of(first) == "holds"
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, but a zombie: it still has a pid
    told: list[str] = []
    campaign = Campaign(tmp_path / "c", tell=told.append).acquire()
    assert len(told) == 1 and f"process {first.pid}" in told[0]
    assert campaign.owner() is not None
    campaign.release()
    assert campaign.owner() is None and not list((tmp_path / "c").glob("*lock*"))


def test_a_pid_that_is_used_again_holds_nothing_r6(tmp_path) -> None:
    me = Owner.me()
    write_lock(tmp_path / "c" / "lock", replace(me, id="old", start_ticks=me.start_ticks - 1))
    lock = Lock(tmp_path / "c" / "lock", tell=lambda text: None)
    lock.acquire()
    assert holder(lock.path) == lock.owner
    lock.release()


def test_after_a_reboot_nothing_is_held_r6(tmp_path) -> None:
    write_lock(tmp_path / "c" / "lock", replace(Owner.me(), id="old", boot="another"))
    assert holder(tmp_path / "c" / "lock") is None


@pytest.mark.parametrize("elsewhere", [{"host": "login2"}, {"pid_space": "pid:[1]"}])
def test_an_owner_that_cannot_be_looked_up_is_judged_by_its_beat_r6(tmp_path, elsewhere) -> None:
    path = tmp_path / "c" / "lock"
    other = replace(Owner.me(), id="other", **elsewhere)
    write_lock(path, other, age_s=100)
    with pytest.raises(CampaignLocked, match=f"on {other.host}.*--take-over"):
        Lock(path).acquire()
    assert Owner.read(path) == other
    write_lock(path, other, age_s=1000)
    lock = Lock(path, tell=lambda text: None)
    lock.acquire()
    lock.release()
    write_lock(path, other, age_s=1)
    lock.acquire(take_over=True)
    lock.release()


def test_of_many_that_start_at_once_one_wins_r6(tmp_path, start) -> None:
    """On a fresh directory, and over a stale lock."""
    for directory in (tmp_path / "fresh", tmp_path / "stale"):
        if directory.name == "stale":
            (directory / "events").mkdir(parents=True)
            write_lock(directory / "lock", replace(Owner.me(), id="old", boot="another"))
        starters = [start(directory) for _ in range(6)]
        for process in starters:
            go(process)
        said = [line_of(process) for process in starters]
        assert sum(line == "holds" for line in said) == 1, said
        winner = starters[said.index("holds")]
        owner = holder(directory / "lock")
        assert owner is not None and owner.pid == winner.pid
        assert not list(directory.glob("lock.claim*"))


def test_a_starter_that_died_while_taking_over_is_no_obstacle_r6(tmp_path) -> None:
    path = tmp_path / "c" / "lock"
    dead = replace(Owner.me(), boot="another")
    write_lock(path, replace(dead, id="first"))
    write_lock(path.with_name("lock.claim-first"), replace(dead, id="second"))
    write_lock(path.with_name("lock.claim-second"), replace(dead, id="third"))
    lock = Lock(path, tell=lambda text: None)
    lock.acquire()
    assert sorted(p.name for p in path.parent.iterdir()) == ["lock"]
    lock.release()


def test_whoever_loses_the_campaign_is_told(tmp_path) -> None:
    """A driver that was suspended for too long must not go on as if nothing had happened."""
    lost = threading.Event()
    path = tmp_path / "lock"
    lock = Lock(path, on_lost=lambda holder: lost.set(), beat_s=0.02)
    lock.acquire()
    before = path.stat().st_mtime_ns
    deadline = time.monotonic() + 20
    while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.stat().st_mtime_ns > before and not lost.is_set()
    write_lock(path, replace(Owner.me(), id="other"))
    assert lost.wait(20)
    lock.release()
    assert Owner.read(path) is not None  # the other's lock stays


def test_a_forked_child_does_not_give_the_campaign_back(tmp_path) -> None:
    lock = Lock(tmp_path / "lock")
    lock.acquire()
    if (pid := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(pid, 0)
    assert holder(lock.path) == lock.owner
    lock.release()


def test_a_directory_with_other_things_is_left_alone(tmp_path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CampaignError, match="other things"):
        Campaign(tmp_path).acquire()
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
