"""Real kills of runners: what the broker is told, and that the slot is clear when it is told."""

import os
import signal
from pathlib import Path

import pytest

from mdcampaign.node import protocol
from tests.node import tasks
from tests.node.fake_broker import FakeBroker, Node, alive, kill, until


def pids_in(path: Path) -> list[int]:
    until(path.exists, f"the task to write {path.name}")
    return [int(word) for word in path.read_text().split()]


def test_cancel_ends_the_whole_tree_first(node: Node, tmp_path: Path) -> None:
    """L4, L5: shell, sleep and a daemon in a session of its own are gone before the broker hears of it."""
    broker = node.broker
    task = broker.place(tasks.family, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    assert all(map(alive, pids)) and len(pids) == 4
    broker.send(protocol.Cancel(task=task, attempt=1))
    ended = broker.ended(task)
    assert not any(map(alive, pids))
    assert ended.how == "cancelled"
    assert broker.run(tasks.pid) not in pids


def test_cancel_before_it_starts(node: Node) -> None:
    broker = node.broker
    broker.run(tasks.nothing, index=(0,))
    task = broker.place(tasks.iterate, index=(0, 1))  # waits for the idle runner's end
    broker.send(protocol.Cancel(task=task, attempt=1))
    assert broker.ended(task).how == "cancelled"
    broker.send(protocol.Cancel(task=task, attempt=1))
    broker.send(protocol.Cancel(task=99, attempt=1))
    assert broker.run(tasks.echo, 1) == 1
    assert len(broker.all(protocol.Ended, task)) == 1


def test_what_a_task_leaves_behind_ends_with_it(node: Node, tmp_path: Path) -> None:
    broker = node.broker
    task = broker.place(tasks.leave_daemon, str(tmp_path / "pids"))
    runner = broker.result(task)
    [daemon] = pids_in(tmp_path / "pids")
    assert not alive(daemon) and not alive(runner)
    assert broker.run(tasks.pid) != runner


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_killed_from_outside_is_lost(node: Node, tmp_path: Path, number: signal.Signals) -> None:
    """L1: noticed by the wait status at once; the neighbour goes on, the slot can be used again."""
    broker = node.broker
    neighbour = broker.place(tasks.wait_for, str(tmp_path / "go"), index=(1,))
    task = broker.place(tasks.family, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    os.kill(pids[0], number)
    ended = broker.ended(task)
    assert (ended.how, ended.signal) == ("lost", number)
    assert not any(map(alive, pids))
    assert broker.run(tasks.echo, 1) == 1
    (tmp_path / "go").touch()
    assert broker.ended(neighbour).how == "result"


def test_a_result_that_was_sent_counts(broker: FakeBroker, tmp_path: Path) -> None:
    """The agent, stopped for a while, hears of result and death at once."""
    agent = broker.start()
    task = broker.place(tasks.wait_elsewhere, str(tmp_path / "go"))
    pid = broker.wait(protocol.Started, task).pid
    cwd = Path(f"/proc/{pid}/cwd")
    until(lambda: cwd.readlink() == Path("/"), "the task to run")
    agent.signal(signal.SIGSTOP)
    (tmp_path / "go").touch()
    until(lambda: cwd.readlink() != Path("/"), "the runner to have sent the result")
    kill(pid)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the template to have reaped it")
    agent.signal(signal.SIGCONT)
    assert broker.result(task) == pid
    assert broker.run(tasks.pid) != pid


def test_a_task_that_ends_its_process_has_crashed(node: Node) -> None:
    broker = node.broker
    ended = broker.ended(broker.place(tasks.exit_by, 3))
    assert (ended.how, ended.exit_code, ended.signal) == ("crashed", 3, None)
    ended = broker.ended(broker.place(tasks.exit_by, 0))
    assert (ended.how, ended.exit_code) == ("crashed", 0)
    ended = broker.ended(broker.place(tasks.system_exit, 4))  # as in HTEX, where it ends the worker
    assert (ended.how, ended.exit_code) == ("crashed", 4)
    ended = broker.ended(broker.place(tasks.segfault))
    assert (ended.how, ended.signal, ended.exit_code) == ("crashed", signal.SIGSEGV, None)
    assert "SIGSEGV" in ended.message


def test_a_device_failure_costs_the_runner(node: Node) -> None:
    """L13: the next job is in a fresh process."""
    broker = node.broker
    task = broker.place(tasks.device_failure)
    ended = broker.ended(task)
    assert (ended.how, ended.failed, ended.outcome and ended.outcome["failure"]) == ("exception", True, "device")
    before = broker.wait(protocol.Started, task).pid
    assert not alive(before)
    assert broker.run(tasks.pid) != before


def test_idle_runners_killed(node: Node) -> None:
    """Not even when the next task is on its way to one of them."""
    broker = node.broker
    for _ in range(10):
        pids = [broker.run(tasks.pid, index=(i,)) for i in (0, 1)]
        for pid in pids:
            kill(pid)
        jobs = [broker.place(tasks.pid, index=(i,)) for i in (0, 1)]
        assert set(map(broker.result, jobs)).isdisjoint(pids)


def test_garbage_is_dropped(node: Node) -> None:
    broker, agent = node.broker, node.agent
    before = agent.log.count("a message that is dropped")
    for frames in (
        [b""],
        [b"\x80\x04garbage"],
        [b"{}"],
        [b'{"type": "place"}', b"x"],
        [b"a", b"b", b"c"],
        [b"[" * 9000],
    ):
        broker.send_frames(frames)
    broker.send_frames([b'{"type": "cancel", "task": "1", "attempt": 1}'])
    broker.send(
        protocol.Place(task=10_000, attempt=1, name="x", device=broker.device.uuid, index=[0]), b"no task buffer"
    )
    assert broker.ended(10_000).how == "exception"
    assert broker.run(tasks.echo, 1) == 1
    until(lambda: agent.log.count("a message that is dropped") == before + 7, "each of them to be logged")
