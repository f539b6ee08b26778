"""Mailbox and Outbound: order, newest wins, and nobody waits for a slow receiver."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mdcampaign.steering.mailbox import Item, Mailbox, Outbound

GUARD_S = 20.0


def test_messages_leave_in_order_and_the_newest_of_a_key_takes_the_place_of_the_oldest() -> None:
    box = Mailbox()
    box.put("a")
    box.put("job 1: step 10", key=1)
    box.put("job 2: step 10", key=2)
    box.put("job 1: step 20", key=1, skipped=4)
    box.put("b")
    box.put("job 1: step 30", key=1)
    assert [box.get(0) for _ in range(4)] == [
        Item("a"),
        Item("job 1: step 30", skipped=6),  # two replaced here, four before they came
        Item("job 2: step 10"),
        Item("b"),
    ]
    assert box.get(0.01) is None


def test_a_message_taken_out_is_unfinished_until_it_has_been_dealt_with() -> None:
    box = Mailbox()
    box.put("a")
    assert box.unfinished == 1
    box.get(0)
    assert (box.unfinished, len(box)) == (1, 0)
    box.finish()
    assert box.unfinished == 0


def test_puts_do_not_wait_for_a_receiver_that_is_stuck() -> None:
    sent: list[tuple[str, Any]] = []
    stuck, released = threading.Event(), threading.Event()

    def send(topic: str, message: Any) -> None:
        stuck.set()
        assert released.wait(GUARD_S)
        sent.append((topic, message))

    outbound = Outbound(send, "out")
    outbound.put("t", "first")
    assert stuck.wait(GUARD_S)
    for step in range(1000):
        outbound.put_newest("t", {"step": step}, key="job")
    outbound.put("t", "last")
    assert not outbound.close(0.05)  # the limit holds
    released.set()
    assert outbound.close(GUARD_S)
    assert sent == [("t", "first"), ("t", {"step": 999, "skipped": 999}), ("t", "last")]


def test_after_a_failed_send_putting_raises_and_closing_says_so() -> None:
    def send(topic: str, message: Any) -> None:
        raise OSError("the other end is gone")

    outbound = Outbound(send, "out")
    outbound.put("t", "lost")
    assert not outbound.close(GUARD_S)
    with pytest.raises(ConnectionError, match="the other end is gone"):
        outbound.put("t", "more")
