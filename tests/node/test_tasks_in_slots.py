"""A real agent runs tasks: results, exceptions, payloads, monitoring, what a slot is to the code in it."""

import os
import pickle
from pathlib import Path

import pytest

from mdcampaign.node import protocol
from tests.node import tasks
from tests.node.fake_broker import FakeBroker, Node, alive, descendants, until


def test_registers_what_it_has(broker: FakeBroker) -> None:
    agent = broker.start(slots=2)
    message = broker.wait(protocol.Register)
    assert (message.protocol, message.uid, message.block_id) == (protocol.VERSION, "agent", "0")
    assert message.pid == agent.process.pid
    assert "parsl" in message.packages
    assert message.directory == str(agent.logdir.parent)
    [device] = message.devices
    assert device.kind == "cpu" and device.uuid.startswith("cpu:")
    assert len(device.slot_cores) == 2
    assert broker.wait(protocol.Heartbeat).running == []


def test_results_and_exceptions(node: Node) -> None:
    broker = node.broker
    broker.ended(broker.place(tasks.exit_by, 1))  # so that the next one needs a fork
    task = broker.place(tasks.echo, {"a": [1, 2]})
    assert broker.result(task) == {"a": [1, 2]}
    ended = broker.ended(task)
    assert (ended.how, ended.failed, ended.outcome) == ("result", False, None)
    assert broker.wait(protocol.Started, task).fork_s > 0
    warm = broker.place(tasks.echo, 1)
    assert broker.result(warm) == 1
    assert broker.wait(protocol.Started, warm).fork_s == 0
    assert broker.wait(protocol.Started, warm).pid == broker.wait(protocol.Started, task).pid

    failed = broker.place(tasks.fail, "so it goes")
    with pytest.raises(ValueError, match="so it goes"):
        broker.result(failed).reraise()
    assert (broker.ended(failed).how, broker.ended(failed).failed) == ("exception", True)
    with pytest.raises(TypeError, match="generator"):
        broker.run(tasks.unpicklable_result).reraise()
    with pytest.raises(RuntimeError, match=r"Stubborn: a stubborn one .*not be serialised"):
        broker.run(tasks.unpicklable_exception).reraise()
    assert broker.run(tasks.pid) == broker.wait(protocol.Started, task).pid  # an exception costs no runner


def test_a_context_may_name_another_executor_of_buffers(node: Node) -> None:
    broker = node.broker
    context = {"task_executor": {"f": "tests.node.tasks.executor", "a": [1], "k": {"b": 2}}}
    size, args, kwargs = broker.run(tasks.nothing, context=context)
    assert (size > 10, args, kwargs) == (True, [1], {"b": 2})
    spec = {"resource_spec": {"priority": 3}}
    assert broker.run(tasks.surroundings, context=spec)["environ"]["PARSL_PRIORITY"] == "3"


def test_ten_megabytes_both_ways(node: Node) -> None:
    broker = node.broker
    data = os.urandom(10_000_000)
    assert broker.run(tasks.echo, data) == data
    assert broker.run(tasks.echo, data[:70_000]) == data[:70_000]


def test_environment_of_a_slot(node: Node) -> None:
    """C1, C3, C4, G4: mask, threads and cores are those of the slot, at every refill; what the user set stays."""
    broker, agent = node.broker, node.agent
    jobs = [broker.place(tasks.surroundings, index=(i,), name=f"job{i}", attempt=3) for i in (0, 1)]
    first, second = map(broker.result, jobs)
    assert [job["environ"]["PARSL_WORKER_RANK"] for job in (first, second)] == ["0", "1"]
    assert [job["cores"] for job in (first, second)] == broker.device.slot_cores
    shared = len(os.sched_getaffinity(0)) < 2
    assert shared or set(first["cores"]).isdisjoint(second["cores"])
    for number, job in enumerate((first, second)):
        environ, slot = job["environ"], job["slot"]
        assert environ["CUDA_VISIBLE_DEVICES"] == ""
        assert environ["OMP_NUM_THREADS"] == environ["OPENMM_CPU_THREADS"] == str(slot.threads)
        assert environ["MKL_NUM_THREADS"] == "5"
        assert environ["PARSL_WORKER_COUNT"] == "2"
        assert (environ["PARSL_WORKER_POOL_ID"], environ["PARSL_WORKER_BLOCK_ID"]) == ("agent", "0")
        assert (slot.device, slot.index, list(slot.cores)) == (broker.device.uuid, (number,), job["cores"])
        assert (job["name"], job["attempt"]) == (f"job{number}", 3)
        assert job["cwd"] == str(agent.logdir.parent)
        assert job["sid"] == job["pid"]
        assert job["sigint"]
        assert job["modules"] == []
    assert first["random"] != second["random"]
    for _ in range(5):
        assert broker.run(tasks.disturb, index=(1,)) == second["pid"]
        refill = broker.run(tasks.surroundings, index=(1,))
        assert refill["pid"] == second["pid"]
        assert refill["environ"] == second["environ"]
        assert (refill["cores"], refill["cwd"]) == (second["cores"], second["cwd"])


def test_more_slots_than_cores_share_them_with_one_thread_each(broker: FakeBroker) -> None:
    """C4."""
    count = len(os.sched_getaffinity(0)) + 1
    agent = broker.start(slots=count)
    job = broker.run(tasks.surroundings, index=(count - 1,))
    assert job["cores"] == sorted(os.sched_getaffinity(0))
    assert job["environ"]["OMP_NUM_THREADS"] == "1"
    assert "share the cores, one thread each" in agent.log


def test_several_slots_are_one_runner_and_idle_ones_make_way(node: Node) -> None:
    broker = node.broker
    singles = [broker.run(tasks.pid, index=(i,)) for i in (0, 1)]
    both = broker.run(tasks.surroundings, index=(0, 1), exclusive=True, memory_mb=100)
    assert both["cores"] == sorted({core for block in broker.device.slot_cores for core in block})
    slot = both["slot"]
    assert (slot.index, slot.exclusive, slot.memory_mb, slot.threads) == ((0, 1), True, 100, len(slot.cores))
    assert both["pid"] not in singles
    assert not any(alive(pid) for pid in singles)
    assert broker.run(tasks.pid, index=(0,)) not in [both["pid"], *singles]
    assert not alive(both["pid"])


def test_what_cannot_be_placed_is_lost_in_words(node: Node, tmp_path: Path) -> None:
    broker = node.broker
    assert "2 slots; [5] is not among them" in broker.ended(broker.place(tasks.nothing, index=(5,))).message
    assert "no device gpu7 here" in broker.ended(broker.place(tasks.nothing, device="gpu7")).message
    held = broker.place(tasks.wait_for, str(tmp_path / "go"))
    broker.wait(protocol.Started, held)
    refused = broker.ended(broker.place(tasks.nothing, index=(0, 1)))
    assert refused.how == "lost" and f"taken by task {held}" in refused.message
    (tmp_path / "go").touch()
    assert broker.ended(held).how == "result"


def test_output_goes_to_files_that_stay_small(node: Node) -> None:
    broker, agent = node.broker, node.agent
    broker.run(tasks.talk, "out", "err")
    assert (agent.directory / "slot-0.out").read_text().endswith("out\n")
    assert (agent.directory / "slot-0.err").read_text().endswith("err\n")
    broker.run(tasks.chatter, 3000)
    broker.run(tasks.talk, "last", "err")
    text = (agent.directory / "slot-0.out").read_text()
    assert len(text) < 1_000_000
    assert "bytes of output were dropped" in text and text.endswith("x\nlast\n")


def test_monitoring_messages_come_whole_and_before_the_result(node: Node) -> None:
    """Parsl's monitoring forks a helper inside the task; both write at the same time."""
    broker = node.broker
    count = 200
    task = broker.place(tasks.monitored, count)
    assert broker.result(task) == 0
    came = [payload for message, payload in broker.heard if isinstance(message, protocol.Monitoring)]
    messages = [pickle.loads(payload)["payload"] for payload in came]
    for who in ("task", "helper"):
        assert [number for name, number, _ in messages if name == who] == list(range(count))
    assert isinstance(broker.heard[-1][0], protocol.Ended | protocol.Heartbeat)


def test_three_hundred_tasks_leave_nothing_behind(node: Node) -> None:
    """L6: no zombies, and no more open files than before."""
    broker, agent = node.broker, node.agent

    def open_files() -> list[int]:
        family = [agent.process.pid, agent.template]
        return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in family]

    def warm_up() -> None:
        for i in (0, 1):
            broker.run(tasks.nothing, index=(i,))

    warm_up()
    before = open_files()
    for _ in range(75):
        pair = [broker.place(tasks.nothing, index=(i,)) for i in (0, 1)]
        for task in pair:
            assert broker.ended(task).how == "result"
    for code in range(1, 76):  # each of these costs a runner
        pair = [broker.place(tasks.exit_by, code, index=(i,)) for i in (0, 1)]
        for task in pair:
            assert broker.ended(task).exit_code == code
    warm_up()
    until(lambda: open_files() == before, "as many open files as before")
    assert [pid for pid in descendants(agent.process.pid) if not alive(pid)] == []
