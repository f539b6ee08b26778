"""The task server with methods that never heard of us: existing Colmena programs run unchanged, and more."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from colmena.models.methods import PythonGeneratorMethod
from colmena.queue.python import PipeQueues as ColmenaPipeQueues
from colmena.thinker import BaseThinker, ResourceCounter, agent, result_processor, task_submitter
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor

from mdcampaign.errors import BadInput, BadJob
from mdcampaign.steering.queues import ACKS, CONTROL, RESULTS, RUN, CampaignQueues, PipeQueues
from mdcampaign.steering.task_server import CampaignTaskServer
from tests.conftest import wait_until
from tests.steering import methods
from tests.steering.conftest import Make
from tests.steering.standin import StandIn, toy_md

GUARD_S = 30.0

METHODS = [
    methods.square,
    methods.complain,
    methods.leave,
    methods.nonsense,
    methods.weigh,
    methods.blow,
    methods.count,
    methods.specification,
    methods.Echo(),
]

Serve = Callable[..., CampaignTaskServer]


@pytest.fixture
def serve(run_dir: str) -> Iterator[Serve]:
    """Start a task server on the stand-in, or on the executors given; stop it at the end."""
    servers: list[CampaignTaskServer] = []

    def start(queues: CampaignQueues, *executors: Any, served: Any = METHODS, **options: Any) -> CampaignTaskServer:
        config = Config(executors=list(executors) or [StandIn()], run_dir=run_dir, strategy="none")
        server = CampaignTaskServer(served, queues, config, **{"drain_s": 5.0, "run_job": toy_md, **options})
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        if server.is_alive():
            server.queues.send_kill_signal()
            server.join(GUARD_S)
        assert server.exitcode is not None


def ask(queues: CampaignQueues, method: str, *args: Any, topic: str = "default", **options: Any) -> Any:
    queues.send_inputs(*args, method=method, topic=topic, **options)
    result = queues.get_result(topic, timeout=GUARD_S)
    assert result.method == method
    return result


def test_methods_of_every_kind(make_queues: Make, serve: Serve) -> None:
    queues = make_queues()
    serve(queues)
    assert ask(queues, "square", 7).value == 49
    assert ask(queues, "count", 4).value == [0, 1, 2, 3]
    assert ask(queues, "echo", "hello").value == "hello"
    assert queues.active_count == 0


def test_failures_are_results_that_say_why(serve: Serve) -> None:
    """An error of an app, SystemExit, a value that cannot be packed, an unknown method: none ends the server."""
    queues = PipeQueues()
    serve(queues)
    reasons = {
        "complain": "ValueError('not today')",
        "leave": "SystemExit(3)",
        "nonsense": "function",
        "sqare": "there is no such method",
    }
    for method, reason in reasons.items():
        result = ask(queues, method, *(["not today"] if method == "complain" else []))
        assert result.success is False
        assert reason in result.failure_info.exception
    assert ask(queues, "square", 3).value == 9
    assert queues.active_count == 0


def test_colmenas_own_retries_still_work(serve: Serve) -> None:
    queues = PipeQueues()
    serve(queues)
    result = ask(queues, "complain", "again", max_retries=2)
    assert (result.success, result.retries) == (False, 2)


def test_a_specification_reaches_the_executor_over_the_defaults_of_its_method(serve: Serve) -> None:
    """`ParslTaskServer._submit` passes none; Colmena's ResourceRequirements drop unknown keys."""
    queues = PipeQueues()
    serve(queues, method_defaults={"specification": {"slots": 2, "priority": 1.0}})
    asked = {"mdcampaign": {"priority": 5.0, "name": "now"}}
    assert ask(queues, "specification").value == {"slots": 2, "priority": 1.0}
    result = ask(queues, "specification", task_info=asked)
    assert result.value == {"slots": 2, "priority": 5.0, "name": "now"}
    assert result.task_info == asked
    assert ask(queues, "echo", "in a slot", task_info=asked).value == "in a slot"
    bad = ask(queues, "specification", task_info={"mdcampaign": {"priorty": 5}})
    assert "priorty: unknown key" in bad.failure_info.traceback
    assert "Did you mean 'priority'?" in bad.failure_info.traceback


def test_bad_arguments_are_refused_before_anything_starts(run_dir: str) -> None:
    config = Config(executors=[StandIn()], run_dir=run_dir)
    with pytest.raises(BadInput, match=r"queues: cannot carry verbs .*mdcampaign\.steering\.queues"):
        CampaignTaskServer([], ColmenaPipeQueues(), config)
    with pytest.raises(BadInput, match=r"no such method \(got 'sqare'\)\. Did you mean 'square'\?"):
        CampaignTaskServer([methods.square], PipeQueues(), config, method_defaults={"sqare": {}})
    with pytest.raises(BadJob, match=r"slots: impossible value \(got 0\)"):
        CampaignTaskServer([methods.square], PipeQueues(), config, method_defaults={"square": {"slots": 0}})
    queues = PipeQueues()
    streaming = PythonGeneratorMethod(methods.count, streaming_queue=queues)
    with pytest.raises(BadInput, match=r"cannot stream through PipeQueues.*Use RedisQueues"):
        CampaignTaskServer([streaming], queues, config)


def test_jobs_and_verbs_without_an_executor_with_slots_are_answered(serve: Serve, run_dir: str) -> None:
    queues = PipeQueues()
    serve(queues, ThreadPoolExecutor(label="threads", max_threads=1), served=[methods.square])
    assert ask(queues, "square", 2).value == 4
    info = {"mdcampaign": {"name": "default/a"}}
    refused = ask(queues, RUN, {}, topic=RESULTS, task_info=info)
    assert "no executor has slots" in refused.failure_info.traceback
    assert "no executor has slots" in ask(queues, CONTROL, "stop", "default/a", topic=ACKS).value["message"]


def test_an_unknown_verb_is_answered_with_the_nearest_one(serve: Serve) -> None:
    queues = PipeQueues()
    serve(queues)
    ack = ask(queues, CONTROL, "stopp", "default/a", topic=ACKS).value
    assert not ack["ok"]
    assert "Did you mean 'stop'?" in ack["message"]


def test_tasks_run_to_their_end_after_the_kill_signal_as_in_colmena(serve: Serve) -> None:
    queues = PipeQueues()
    server = serve(queues)
    for n in range(20):
        queues.send_inputs(n, method="square")
    queues.send_kill_signal()
    assert sorted(queues.get_result(timeout=GUARD_S).value for _ in range(20)) == [n * n for n in range(20)]
    server.join(GUARD_S)
    assert server.exitcode == 0


def test_an_idle_server_ends_after_its_timeout(serve: Serve) -> None:
    server = serve(PipeQueues(), timeout=1)
    server.join(GUARD_S)
    assert server.exitcode == 0


def test_starting_from_a_process_with_threads_warns(serve: Serve) -> None:
    """The task server is forked: a lock that a thread holds at that moment stays locked."""
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="my-thread")
    thread.start()
    try:
        with pytest.warns(RuntimeWarning, match="my-thread"):
            serve(PipeQueues())
    finally:
        stop.set()
        thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        serve(PipeQueues())


def test_a_method_of_the_script_itself_is_warned_of(run_dir: str) -> None:
    def here() -> None: ...

    here.__module__ = "__main__"
    config = Config(executors=[StandIn()], run_dir=run_dir)
    with pytest.warns(RuntimeWarning, match="the method here is defined in the script"):
        CampaignTaskServer([(here, {"executors": ["standin"]})], PipeQueues(), config)


def orphaned(queues: PipeQueues, config: Config, pid: Any) -> None:
    server = CampaignTaskServer([methods.square], queues, config, drain_s=1.0)
    server.start()
    pid.value = server.pid
    os._exit(9)  # the driver is killed


def test_the_server_ends_with_its_driver(run_dir: str) -> None:
    context = multiprocessing.get_context("fork")
    pid = context.Value("i", 0)
    config = Config(executors=[StandIn()], run_dir=run_dir, strategy="none")
    driver = context.Process(target=orphaned, args=(PipeQueues(), config, pid))
    driver.start()
    driver.join(GUARD_S)
    assert driver.exitcode == 9
    wait_until(lambda: not psutil.pid_exists(pid.value) or psutil.Process(pid.value).status() == "zombie", "its end")


class AsTaught(BaseThinker):
    """A Thinker as Colmena's documentation teaches it: a pool of slots, a submitter, a processor of results."""

    def __init__(self, queues: CampaignQueues, n: int) -> None:
        super().__init__(queues, ResourceCounter(2, ["work"]))
        self.rec.reallocate(None, "work", 2)
        self.n, self.values = n, []
        self.sent = 0

    @task_submitter(task_type="work", n_slots=1)
    def submit(self) -> None:
        self.queues.send_inputs(self.sent, method="square", topic="work")
        self.sent += 1
        if self.sent == self.n:
            self.done.set()

    @result_processor(topic="work")
    def take(self, result: Any) -> None:
        assert result.success, result.failure_info
        self.values.append(result.value)
        self.rec.release("work", 1)

    @agent(startup=True)
    def greet(self) -> None:
        self.logger.info("ready")


def test_a_program_as_colmena_teaches_it_runs_unchanged(make_queues: Make, serve: Serve) -> None:
    queues = make_queues(["work"])
    server = serve(queues)
    thinker = AsTaught(queues, 10)
    thinker.start()
    thinker.join(GUARD_S)
    assert not thinker.is_alive()
    queues.send_kill_signal()
    server.join(GUARD_S)
    assert sorted(thinker.values) == [n * n for n in range(10)]
    assert server.exitcode == 0
