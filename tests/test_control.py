"""Requests from another terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mdcampaign.campaign import Campaign
from mdcampaign.control import Inbox, Request, request
from mdcampaign.errors import CampaignError


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    with Campaign(tmp_path / "c") as held:
        yield held


def wait_for(inbox: Inbox, count: int = 1) -> list[Request]:
    found: list[Request] = []
    pause = threading.Event()
    for _ in range(2000):
        if len(found := found + inbox.poll()) >= count:
            return found
        pause.wait(0.01)
    raise AssertionError(f"{len(found)} of {count} requests came")


@pytest.mark.parametrize("kind", ["pipe", "link", "infinity"])
def test_what_is_no_request_does_not_hold_up_the_next(campaign: Campaign, kind: str) -> None:
    directory = campaign.directory
    inbox = campaign.inbox()
    bad, good = directory / "control" / "a.request", directory / "control" / "b.request"
    if kind == "pipe":
        os.mkfifo(bad)
    elif kind == "link":
        bad.symlink_to("/dev/zero")
    else:
        bad.write_text('{"verb": "stop", "pid": Infinity}')
    good.write_text('{"verb": "stop"}')
    assert [request.id for request in inbox.poll()] == ["b"]
    assert not bad.exists()


def test_a_request_from_another_process_is_answered(campaign) -> None:
    inbox = campaign.inbox()
    code = (
        "import sys, pathlib; from mdcampaign.control import request;"
        "print(request(pathlib.Path(sys.argv[1]), 'extend', job='g/a', steps=7, timeout_s=60))"
    )
    command = [sys.executable, "-c", code, str(campaign.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asker:
        (asked,) = wait_for(inbox)
        assert (asked.verb, asked.payload, asked.pid) == ("extend", {"job": "g/a", "steps": 7}, asker.pid)
        inbox.answer(asked, message="continues to step 7", target=7)
        said, _ = asker.communicate(timeout=60)
    assert said.strip() == "Answer(ok=True, message='continues to step 7', data={'target': 7})"
    assert list((campaign.directory / "control").iterdir()) == []


def test_requests_come_in_order_and_each_gets_its_own_answer(campaign) -> None:
    inbox = campaign.inbox()
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(request, campaign.directory, "rerank", n=n, timeout_s=60) for n in range(20)]
        found = wait_for(inbox, 20)
        for one in found:
            inbox.answer(one, n=one.payload["n"])
        assert [future.result().data["n"] for future in asked] == list(range(20))
    assert inbox.poll() == []


def test_nobody_serves(tmp_path) -> None:
    with pytest.raises(CampaignError, match="no campaign directory"):
        request(tmp_path, "stop")
    with Campaign(tmp_path / "c"):
        pass
    with pytest.raises(CampaignError, match=r"no campaign runs in .*mdcampaign run"):
        request(tmp_path / "c", "stop")


def test_no_answer_in_time_withdraws_the_request(campaign) -> None:
    with pytest.raises(CampaignError, match=rf"no answer from process {os.getpid()}.*withdrawn"):
        request(campaign.directory, "stop", timeout_s=0.05)
    assert campaign.inbox().poll() == []


def test_a_request_that_was_taken_may_still_act(campaign, monkeypatch) -> None:
    monkeypatch.setattr("mdcampaign.control._GRACE_S", 0.05)
    inbox = campaign.inbox()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(request, campaign.directory, "stop", timeout_s=1)
        wait_for(inbox)
        with pytest.raises(CampaignError, match="may still act"):
            asked.result()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b'{"verb": 3}', b'{"verb": "x", "payload": []}', b"\xff\xfe", b"[" * 60_000, b" " * 100_000],
    ids=["empty", "torn", "list", "verb", "payload", "bytes", "deep", "large"],
)
def test_a_malformed_request_is_moved_aside_with_an_answer(campaign, content) -> None:
    inbox = campaign.inbox()
    control = campaign.directory / "control"
    (control / "0-bad.request").write_bytes(content)
    (control / "1-good.request").write_text('{"verb": "stop"}')
    assert [one.id for one in inbox.poll()] == ["1-good"]
    assert (control / "rejected" / "0-bad.request").read_bytes() == content
    answer = json.loads((control / "0-bad.answer").read_text())
    assert answer["ok"] is False and answer["message"].startswith("not a request")


def test_the_same_request_twice_acts_once(campaign) -> None:
    inbox = campaign.inbox()
    path = campaign.directory / "control" / "7.request"
    path.write_text('{"verb": "stop"}')
    (asked,) = inbox.poll()
    path.write_text('{"verb": "stop"}')
    assert inbox.poll() == []
    inbox.answer(asked, message="stopped")
    path.with_suffix(".answer").unlink()
    path.write_text('{"verb": "stop"}')
    assert inbox.poll() == []
    assert json.loads(path.with_suffix(".answer").read_text())["message"] == "stopped"


def test_requests_from_before_this_start_are_refused(campaign) -> None:
    """A stop that was meant for yesterday's run must not stop today's."""
    control = campaign.directory / "control"
    (control / "1.request").write_text('{"verb": "stop"}')
    (control / "2.taken").write_text('{"verb": "stop"}')
    assert campaign.inbox().poll() == []
    assert "was not running" in (control / "1.answer").read_text()
    assert "ended before it answered" in (control / "2.answer").read_text()


def test_answers_that_nobody_fetches_are_removed(campaign) -> None:
    inbox = campaign.inbox()
    old, new = (campaign.directory / "control" / f"{n}.answer" for n in ("old", "new"))
    old.write_text("{}")
    new.write_text("{}")
    os.utime(old, (0, 0))
    inbox.poll()
    assert not old.exists() and new.exists()
