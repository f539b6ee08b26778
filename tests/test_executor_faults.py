"""Faults, each with a real kill: of runners, agents, the broker and the driver; of strangers and nonsense."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import parsl
import psutil
import pytest
import zmq
from parsl import python_app
from parsl.executors.errors import BadStateException
from parsl.executors.high_throughput.errors import ManagerLost, WorkerLost

from mdcampaign.errors import Crashed
from mdcampaign.node import protocol
from tests import apps
from tests.conftest import GUARD_S, Start, wait_until

double = python_app(apps.double)
nap = python_app(apps.nap)
steps = python_app(apps.steps)
seat = python_app(apps.seat)


def pid_of(seen: list, job: str) -> int:
    """Wait until a job has started and reported, and return its process id."""
    wait_until(lambda: any(e["event"] == "progress" and e["job"] == job for e in seen), f"a report of {job}")
    return [e["pid"] for e in seen if e["event"] == "started" and e["job"] == job][-1]


def agent_pids(logdir: str) -> list[int]:
    """Return the process ids of this test's own agents, found by their log directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "mdcampaign.node.agent" in command and any(logdir in part for part in command):
            found.append(process.pid)
    return found


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_l1_killed_runner_job_with_requeue_comes_back_uncharged(start: Start, events, tmp_path: Path) -> None:
    executor = start()
    seen = events(executor)
    spec = {"name": "demo/a", "requeue": True}
    future = steps(40, 0.02, str(tmp_path / "save"), parsl_resource_specification=spec)
    os.kill(pid_of(seen, "demo/a"), signal.SIGKILL)
    result = future.result(GUARD_S)
    assert (result["last"], result["attempt"]) == (40, 2)
    assert result["first"] > 0
    assert [e["how"] for e in seen if e["event"] == "ended"] == ["lost", "result"]


def test_l1_killed_runner_plain_task_gets_worker_lost_and_the_slot_goes_on(start, events, tmp_path) -> None:
    executor = start(slots_per_device=1)
    seen = events(executor)
    future = steps(4000, 0.02, str(tmp_path / "save"), parsl_resource_specification={"name": "demo/a"})
    os.kill(pid_of(seen, "demo/a"), signal.SIGKILL)
    with pytest.raises(WorkerLost):
        future.result(GUARD_S)
    assert double(4).result(GUARD_S) == 8


def test_a_job_that_is_lost_again_and_again_without_saving_fails(start: Start, events) -> None:
    executor = start(slots_per_device=1)
    seen = events(executor)
    spec = {"name": "demo/a", "requeue": True}
    future = nap(1000, parsl_resource_specification=spec)
    killed: set[int] = set()
    while not future.done():
        fresh = [e["pid"] for e in list(seen) if e["event"] == "started" and e["pid"] not in killed]
        for pid in fresh:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        if not fresh:
            wait_until(lambda: future.done() or len([e for e in seen if e["event"] == "started"]) > len(killed), "it")
    with pytest.raises(Exception, match="without a newly saved step"):
        future.result(GUARD_S)
    assert len(killed) == 5


@pytest.mark.parametrize(("function", "arguments"), [(apps.segfault, ()), (apps.leave, (3,))])
def test_a_task_that_ends_itself_is_charged(start: Start, function, arguments) -> None:
    start(slots_per_device=1)
    with pytest.raises(WorkerLost):
        python_app(function)(*arguments).result(GUARD_S)
    with pytest.raises(Crashed, match=r"SIGSEGV|3"):
        python_app(function)(*arguments, parsl_resource_specification={"requeue": True}).result(GUARD_S)
    assert double(1).result(GUARD_S) == 2


def test_idle_runners_killed_are_forked_again(start: Start) -> None:
    executor = start()
    assert [f.result(GUARD_S) for f in [nap(0.2), nap(0.2)]] == [0.2, 0.2]
    (agent,) = agent_pids(executor.logdir)
    for child in family_of(agent):
        if "template" not in " ".join(child.cmdline()) or child.ppid() != agent:
            child.kill()
    assert [f.result(GUARD_S) for f in [double(n) for n in range(4)]] == [0, 2, 4, 6]


def test_l2_l3_killed_agent_leaves_nothing_alive_and_its_tasks_are_lost(start: Start, tmp_path: Path) -> None:
    executor = start()
    pids_file = tmp_path / "pids"
    future = python_app(apps.silent_family)(str(pids_file))
    wait_until(pids_file.exists, "the family to be born")
    (agent,) = agent_pids(executor.logdir)
    family = family_of(agent)
    assert len(family) >= 4
    os.kill(agent, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=GUARD_S)
    assert not alive
    with pytest.raises(ManagerLost):
        future.result(GUARD_S)


def test_l2_p3_killed_agent_is_replaced_and_its_jobs_go_on(start: Start, events, tmp_path: Path) -> None:
    executor = start()
    seen = events(executor)
    spec = {"name": "demo/a", "requeue": True}
    future = steps(200, 0.02, str(tmp_path / "save"), parsl_resource_specification=spec)
    pid_of(seen, "demo/a")
    os.kill(*agent_pids(executor.logdir), signal.SIGKILL)
    result = future.result(GUARD_S)
    assert (result["last"], result["attempt"]) == (200, 2)
    assert result["first"] > 0


def test_l12_pilots_that_never_register_end_the_wait_with_their_stderr(start: Start) -> None:
    start(launch_cmd="echo 'bad /tmp on this node' >&2; exit 7 #")
    with pytest.raises(BadStateException, match=r"bad /tmp on this node"):
        double(1).result(GUARD_S)


def test_killed_broker_fails_every_future_and_cleanup_does_not_hang(start: Start) -> None:
    executor = start()
    futures = [nap(1000) for _ in range(5)]
    wait_until(lambda: executor.snapshot()["running"] == 2, "two to run")
    executor.interchange_proc.kill()
    for future in futures:
        with pytest.raises(BadStateException, match="broker"):
            future.result(GUARD_S)
    with pytest.raises(BadStateException):
        double(1).result(GUARD_S)
    agents = [psutil.Process(pid) for pid in agent_pids(executor.logdir)]
    parsl.dfk().cleanup()
    parsl.clear()
    _, alive = psutil.wait_procs(agents, timeout=GUARD_S)
    assert not alive


def test_killed_driver_takes_broker_and_agents_with_it(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import parsl, time
            from parsl import python_app
            from mdcampaign.executor import SlotExecutor
            from tests import apps
            executor = SlotExecutor(label="slots", address="127.0.0.1", heartbeat_period=1, heartbeat_threshold=4)
            parsl.load(parsl.Config(executors=[executor], run_dir={str(tmp_path / "runinfo")!r}, strategy="none"))
            tasks = [python_app(apps.nap)(1000) for _ in range(2)]
            while executor.snapshot()["running"] == 0:
                time.sleep(0.05)
            print(executor.interchange_proc.pid, executor.logdir, flush=True)
            time.sleep(1000)
            """
        )
    )
    environ = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert driver.stdout is not None
    broker, logdir = driver.stdout.readline().split()
    (agent,) = agent_pids(logdir)
    mourners = [psutil.Process(int(broker)), psutil.Process(agent), *family_of(agent)]
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(mourners, timeout=GUARD_S)
    assert not alive


def stranger(executor, uid: bytes) -> zmq.Socket:
    sock = zmq.Context.instance().socket(zmq.DEALER)
    sock.setsockopt(zmq.IDENTITY, uid)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, int(GUARD_S * 1000))
    sock.connect(f"tcp://127.0.0.1:{executor.worker_port}")
    return sock


def registration(**changes) -> protocol.Register:
    from importlib.metadata import version

    facts = {
        "protocol": protocol.VERSION,
        "version": version("mdcampaign"),
        "parsl_version": parsl.__version__,
        "python_version": "3.11.0",
        "uid": "stranger",
        "block_id": "9",
        "hostname": "elsewhere",
        "pid": 1,
        "os": "Linux",
        "directory": "/",
        "start_time": 0.0,
        "cpu_count": 1,
        "memory_mb": 100,
        "packages": {},
        "devices": [protocol.DeviceReport(uuid="cpu", kind="cpu", slot_cores=[[0]])],
    }
    return protocol.Register(**{**facts, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"python_version": "3.6.1"}, "Python 3.6.1"),
        ({"version": "0.0.1"}, "mdcampaign 0.0.1"),
        ({"protocol": 99}, "protocol 99"),
        ({"parsl_version": "1999.1.1"}, "Parsl 1999.1.1"),
    ],
)
def test_a_pilot_that_does_not_match_is_refused_alone(start: Start, changes: dict, words: str) -> None:
    executor = start()
    sock = stranger(executor, b"stranger")
    sock.send_multipart(protocol.encode(registration(**changes)))
    message, _ = protocol.decode_to_agent(sock.recv_multipart())
    assert isinstance(message, protocol.Refused)
    assert words in message.reason
    assert double(5).result(GUARD_S) == 10
    sock.close()


def test_an_unknown_agent_is_fenced(start: Start) -> None:
    executor = start()
    sock = stranger(executor, b"ghost")
    sock.send_multipart(protocol.encode(protocol.Heartbeat()))
    message, _ = protocol.decode_to_agent(sock.recv_multipart())
    assert isinstance(message, protocol.Fenced)
    sock.close()


def test_malformed_messages_harm_nobody(start: Start) -> None:
    executor = start()
    dice = random.Random(7)
    good = [
        frame
        for message in (registration(), protocol.Heartbeat(), protocol.Ended(task=1, attempt=1, how="result"))
        for frame in protocol.encode(message)
    ]
    sock = stranger(executor, b"fuzzer")
    for _ in range(400):
        raw = bytearray(dice.choice(good))
        for _ in range(dice.randrange(1, 6)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        frames = [bytes(raw[: dice.randrange(1, len(raw) + 1)]), *(b"junk" for _ in range(dice.randrange(3)))]
        sock.send_multipart(frames)
    for silly in ([b""], [b"{}"], [b"null"], [b"[]"], [b'{"type": "register"}'], [b'{"type": 1}']):
        sock.send_multipart(silly)
    assert [f.result(GUARD_S) for f in [double(n) for n in range(10)]] == [2 * n for n in range(10)]
    assert executor.interchange_proc.poll() is None
    sock.close()


def test_late_result_of_a_cancelled_task_is_shrugged_off(start: Start) -> None:
    executor = start()
    future = nap(0.3)
    wait_until(lambda: executor.snapshot()["running"] == 1, "it to run")
    inner = future.task_record["exec_fu"]
    task_id = inner.parsl_executor_task_id
    executor.tasks.pop(task_id)  # the executor forgets it: its result must not end the result thread
    wait_until(lambda: executor.snapshot()["running"] == 0, "its end")
    assert double(2).result(GUARD_S) == 4
    inner.cancel()


def test_monitoring_rows_arrive(tmp_path: Path) -> None:
    import sqlite3

    from parsl.monitoring import MonitoringHub

    from mdcampaign.executor import SlotExecutor

    config = parsl.Config(
        executors=[SlotExecutor(label="slots", address="127.0.0.1")],
        run_dir=str(tmp_path / "runinfo"),
        monitoring=MonitoringHub(
            resource_monitoring_interval=1, logging_endpoint=f"sqlite:///{tmp_path}/monitoring.db"
        ),
        strategy="none",
    )
    with parsl.load(config):
        assert nap(1.5).result(GUARD_S) == 1.5
    rows = sqlite3.connect(tmp_path / "monitoring.db")
    assert rows.execute("SELECT count(*) FROM node").fetchone()[0] >= 1
    assert rows.execute("SELECT count(*) FROM try WHERE task_executor='slots'").fetchone()[0] == 1
    assert rows.execute("SELECT count(*) FROM resource").fetchone()[0] >= 1


def test_p1_idle_blocks_are_scaled_in_and_busy_ones_are_not(tmp_path: Path) -> None:
    from parsl.providers import LocalProvider

    from mdcampaign.executor import SlotExecutor

    executor = SlotExecutor(
        label="slots",
        address="127.0.0.1",
        slots_per_device=1,
        provider=LocalProvider(init_blocks=0, min_blocks=0, max_blocks=2),
    )
    config = parsl.Config(
        executors=[executor],
        run_dir=str(tmp_path / "runinfo"),
        strategy="htex_auto_scale",
        strategy_period=0.5,
        max_idletime=1.0,
    )
    with parsl.load(config):
        long, short = nap(8), nap(0.5)
        short.result(GUARD_S)
        wait_until(lambda: sum(m["active"] for m in executor.connected_managers()) == 1, "one block to go")
        assert not long.done()
        assert long.result(GUARD_S) == 8
        wait_until(lambda: not any(m["active"] for m in executor.connected_managers()), "the other to go")
        assert double(3).result(GUARD_S) == 6
