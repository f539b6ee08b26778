"""Queues of both kinds: every trap of Colmena's queues that was seen, mended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from pathlib import Path
from typing import Any

import proxystore.store
import pytest
from colmena.exceptions import KillSignalException, TimeoutException
from colmena.models import Result
from proxystore.connectors.file import FileConnector
from proxystore.store import Store

from mdcampaign.errors import BadInput, TaskServerLost
from mdcampaign.steering.queues import EVENTS, CampaignQueues, PipeQueues, RedisQueues
from tests.steering.conftest import Make

GUARD_S = 30.0

fork = multiprocessing.get_context("fork")


def mirror(queues: CampaignQueues) -> None:
    """A server that answers each request with its own inputs."""
    queues.set_role("server")
    queues.start_sending()
    while True:
        try:
            _, task = queues.get_task(GUARD_S)
        except KillSignalException:
            break
        task.deserialize()
        task.set_result(task.args[0])
        task.serialize()
        queues.send_result(task)
    assert queues.stop_sending(GUARD_S)


def started(queues: CampaignQueues, server: Any = mirror) -> Any:
    process = fork.Process(target=server, args=(queues,), daemon=True)
    process.start()
    return process


def ended(process: Any) -> int:
    process.join(GUARD_S)
    assert process.exitcode is not None, "the server did not end"
    return process.exitcode


def test_six_threads_send_without_harm_to_one_another(make_queues: Make) -> None:
    """Six threads sending 4 kB corrupted Colmena's PipeQueues. 1,200 requests and their results, both ways full."""
    queues = make_queues()
    server = started(queues)

    def send(thread: int) -> None:
        for n in range(200):
            queues.send_inputs((thread, n, "x" * 4096), method="mirror")

    threads = [threading.Thread(target=send, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    came = [queues.get_result(timeout=GUARD_S).value for _ in range(1200)]
    assert sorted(value[:2] for value in came) == [(thread, n) for thread in range(6) for n in range(200)]
    for thread in range(6):
        assert [n for of, n, _ in came if of == thread] == list(range(200))  # each thread's in order
    assert queues.active_count == 0
    queues.send_kill_signal()
    assert ended(server) == 0


def test_a_topic_that_nobody_reads_does_not_hold_up_the_others(make_queues: Make) -> None:
    queues = make_queues(["read", "unread"])
    server = started(queues)
    for _ in range(50):
        queues.send_inputs("x" * 100_000, method="mirror", topic="unread")
    queues.send_inputs("here", method="mirror", topic="read")
    assert queues.get_result("read", timeout=GUARD_S).value == "here"
    queues.send_kill_signal()
    assert ended(server) == 0


def test_two_threads_may_wait_for_one_topic(make_queues: Make) -> None:
    queues = make_queues()
    server = started(queues)
    came: list[int] = []

    def take() -> None:
        came.extend(queues.get_result(timeout=GUARD_S).value for _ in range(50))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for n in range(100):
        queues.send_inputs(n, method="mirror")
    for thread in threads:
        thread.join(GUARD_S)
    assert sorted(came) == list(range(100))
    queues.send_kill_signal()
    assert ended(server) == 0


def intermediate_then_final(queues: CampaignQueues) -> None:
    queues.set_role("server")
    _, task = queues.get_task(GUARD_S)
    inputs = task.inputs
    task.deserialize()
    for value in range(3):
        task.set_result(value, intermediate=value < 2)
        task.inputs = ((), {}) if value < 2 else inputs
        copy = task.model_copy(deep=True)
        copy.serialize()
        queues.send_result(copy)


def test_only_the_final_result_ends_a_task(make_queues: Make) -> None:
    """Colmena drops a task at its first result, and the Thinker quits early. Inputs come back though they stayed."""
    queues = make_queues()
    server = started(queues, intermediate_then_final)
    queues.send_inputs("big", method="count")
    seen = []
    for _ in range(3):
        result = queues.get_result(timeout=GUARD_S)
        seen.append((result.value, result.complete, queues.active_count))
        assert result.args == ("big",) or result.complete
    assert seen == [(0, False, 1), (1, False, 1), (2, True, 0)]
    assert queues.wait_until_done(timeout=0)
    assert ended(server) == 0


def test_nobody_reads_requests_and_sending_still_returns() -> None:
    """A server that is busy, or dead: 10 MB of requests do not fit into any pipe, and nobody waits."""
    queues = PipeQueues()
    for _ in range(100):
        queues.send_inputs("x" * 100_000, method="mirror")
    assert queues.active_count == 100


def test_large_messages_pass_and_too_large_ones_are_refused_in_words(make_queues: Make) -> None:
    """Colmena's pipes assert 32 MiB, in a callback where nobody sees it: the result never comes."""
    queues = make_queues()
    server = started(queues)
    big = b"x" * (20 << 20)  # 40 MiB as hexadecimal text, which is how Colmena packs it
    queues.send_inputs(big, method="mirror", keep_inputs=False)
    assert queues.get_result(timeout=GUARD_S).value == big
    queues.message_limit_bytes = 1 << 20
    with pytest.raises(BadInput, match=r"the request: larger than the 1\.0 MiB .*40\.0 MiB.*ProxyStore"):
        queues.send_inputs(big, method="mirror")
    assert queues.active_count == 0
    queues.send_kill_signal()
    assert ended(server) == 0


def test_a_result_that_is_too_large_is_a_failed_result(make_queues: Make) -> None:
    queues = make_queues()
    queues.send_inputs("x" * 100, method="mirror")
    _, task = queues.get_task(GUARD_S)
    task.set_result("y" * 3_000_000)
    queues.message_limit_bytes = 1 << 20
    queues.send_result(task)
    result = queues.get_result(timeout=GUARD_S)
    assert result.success is False
    assert "the result of mirror: larger than the 1.0 MiB" in result.failure_info.traceback
    assert queues.active_count == 0


def test_a_value_that_cannot_be_unpacked_is_a_failed_result(make_queues: Make) -> None:
    queues = make_queues()
    queues.send_inputs(1, method="mirror")
    _, task = queues.get_task(GUARD_S)
    task.set_result(None)
    task.value = "no pickle in hexadecimal"
    queues.send_result(task)
    result = queues.get_result(timeout=GUARD_S)
    assert (result.success, result.value) == (False, None)
    assert "ValueError" in result.failure_info.exception
    assert queues.active_count == 0


def test_when_the_server_is_lost_what_had_arrived_comes_first_and_then_an_error(make_queues: Make) -> None:
    queues = make_queues()
    server = started(queues)
    queues.send_inputs("in time", method="mirror")
    queues.send_kill_signal()
    assert ended(server) == 0
    queues.send_inputs("never answered", method="mirror")
    queues.fail(TaskServerLost("the task server is gone"))
    assert queues.get_result(timeout=GUARD_S).value == "in time"
    with pytest.raises(TaskServerLost, match="is gone"):
        queues.get_result(timeout=None)
    with pytest.raises(TaskServerLost, match="is gone"):
        queues.send_inputs("more", method="mirror")
    assert not queues.wait_until_done(timeout=None)


def test_timeouts_below_a_second_are_kept(make_queues: Make) -> None:
    queues = make_queues()
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(TimeoutException):
            queues.get_result(timeout=0.02)
    assert time.monotonic() - began < 4.0  # Colmena's RedisQueues make five seconds of it


def report_often(queues: CampaignQueues, go: Any) -> None:
    queues.set_role("server")
    queues.start_sending()
    for step in range(1, 2001):
        queues.send_event({"event": "progress", "job": "j", "step": step, "padding": "x" * 4096}, key="j")
    queues.send_event({"event": "ended", "job": "j"})
    go.set()
    assert queues.stop_sending(GUARD_S)


def test_the_newest_progress_wins_where_the_way_is_full() -> None:
    """8 MB of progress while nobody reads: what does not fit is replaced, counted, and costs the sender no time."""
    queues = PipeQueues()
    go = fork.Event()
    server = fork.Process(target=report_often, args=(queues, go), daemon=True)
    server.start()
    assert go.wait(GUARD_S)  # the sender was never held up
    events = [queues.get_event(GUARD_S)]
    while events[-1]["event"] != "ended":
        events.append(queues.get_event(GUARD_S))
    progress = events[:-1]
    steps = [event["step"] for event in progress]
    assert steps == sorted(steps)
    assert steps[-1] == 2000
    assert len(steps) + sum(event.get("skipped", 0) for event in progress) == 2000
    assert len(steps) < 100
    assert ended(server) == 0


def send_events(queues: CampaignQueues) -> None:
    queues.set_role("server")
    queues.start_sending()
    for n in range(2500):
        queues.send_event({"event": "placed", "n": n})
    assert queues.stop_sending(GUARD_S)


def test_events_that_are_no_progress_all_come_in_order(make_queues: Make) -> None:
    queues = make_queues()
    server = started(queues, send_events)
    assert [queues.get_event(GUARD_S)["n"] for _ in range(2500)] == list(range(2500))
    assert ended(server) == 0


def test_each_redis_queue_has_a_prefix_of_its_own(redis_port: int) -> None:
    first, second = RedisQueues(port=redis_port), RedisQueues(port=redis_port)
    assert first.prefix != second.prefix
    first.send_inputs(1, method="mirror")
    with pytest.raises(TimeoutException):
        second.get_task(timeout=0.05)
    assert first.get_task(timeout=GUARD_S)[1].method == "mirror"


def test_redis_queues_travel_to_another_machine(redis_port: int) -> None:
    queues = RedisQueues(["stream"], port=redis_port)
    queues.send_inputs(1, method="mirror", topic="stream")
    there: RedisQueues = pickle.loads(pickle.dumps(queues))
    topic, task = there.get_task(timeout=GUARD_S)
    task.set_result(2)
    there.send_result(task)
    assert (topic, queues.get_result("stream", timeout=GUARD_S).value) == ("stream", 2)


def test_a_fork_while_a_thread_holds_the_locks_leaves_the_child_free() -> None:
    queues = PipeQueues()
    with queues._here.books, queues._here.writing, queues._active_lock:
        child = fork.Process(target=lambda: os._exit(queues.active_count + (not queues._here.books.acquire(False))))
        child.start()
    assert ended(child) == 0


def test_proxied_inputs_can_be_read_again_until_the_task_has_ended(tmp_path: Path) -> None:
    """Colmena evicts them at the first read, so a requeued task cannot read them again."""
    store = Store("kept", FileConnector(str(tmp_path / "store")), cache_size=0, register=True)
    try:
        queues = PipeQueues(proxystore_name="kept", proxystore_threshold=1000)
        queues.send_inputs("x" * 5000, "small", method="weigh", input_kwargs={"more": "y" * 5000})
        _, task = queues.get_task(GUARD_S)
        assert task.message_sizes["inputs"] < 5000
        for _ in range(2):  # a first attempt that is lost, and a second
            attempt = Result.model_validate_json(task.json())
            attempt.deserialize()
            assert [len(attempt.args[0]), attempt.args[1], len(attempt.kwargs["more"])] == [5000, "small", 5000]
        assert len([path for path in (tmp_path / "store").iterdir() if not path.suffix]) == 2
        task.set_result(0)
        queues.send_result(task)
        queues.get_result(timeout=GUARD_S)
        assert not list((tmp_path / "store").iterdir())
    finally:
        proxystore.store.unregister_store("kept")
        store.close()


def test_reserved_topics_are_there_beside_those_of_the_program(make_queues: Make) -> None:
    assert {"mine", "default", EVENTS} <= make_queues(["mine"]).topics


def test_flush_drops_what_has_arrived(make_queues: Make) -> None:
    queues = make_queues()
    server = started(queues)
    queues.send_inputs("old", method="mirror")
    queues.send_kill_signal()
    assert ended(server) == 0
    queues.flush()
    with pytest.raises(TimeoutException):
        queues.get_result(timeout=0.2)
