"""The non-public names of Parsl and Colmena that we build on; a failure here says what a new version changed."""

import inspect

from colmena.queue.base import ColmenaQueues
from colmena.queue.python import PipeQueues
from colmena.task_server.parsl import ParslTaskServer
from colmena.thinker import BaseThinker
from parsl.executors import HighThroughputExecutor
from parsl.executors.high_throughput import zmq_pipes
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.executors.high_throughput.interchange import Interchange
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs import strategy

from mdcampaign.executor import SlotExecutor


def source(thing: object) -> str:
    return inspect.getsource(thing)  # type: ignore[arg-type]


def test_executor_methods_that_are_overridden_exist() -> None:
    for name in (
        "_result_queue_worker",
        "_start_local_interchange_process",
        "_hold_manager",
        "connected_managers",
        "connected_managers_packages",
        "connected_blocks",
        "submit_payload",
        "validate_resource_spec",
        "shutdown",
    ):
        assert callable(getattr(HighThroughputExecutor, name)), name
    assert callable(BlockProviderExecutor.set_bad_state_and_fail_all)


def test_executor_attributes_that_are_used_exist() -> None:
    text = source(HighThroughputExecutor)
    for name in ("outgoing_q", "incoming_q", "command_client", "interchange_proc", "_task_counter"):
        assert f"self.{name} = " in text or f"self.{name}: " in text, name
    assert "self._result_queue_thread_exit = threading.Event()" in text
    assert list(inspect.signature(HTEXFuture.__init__).parameters) == ["self", "task_id"]


def test_submit_ends_in_submit_payload() -> None:
    assert "return self.submit_payload(context, fn_buf)" in source(HighThroughputExecutor.submit)
    assert 'context["resource_spec"] = resource_specification' in source(HighThroughputExecutor.submit)


def test_broker_gets_what_it_reads_on_stdin() -> None:
    text = source(HighThroughputExecutor._start_local_interchange_process)
    for key in (
        "client_address",
        "client_ports",
        "interchange_address",
        "worker_port",
        "worker_port_range",
        "hub_address",
        "hub_zmq_port",
        "logdir",
        "heartbeat_threshold",
        "logging_level",
        "cert_dir",
        "run_id",
        "_check_python_mismatch",
    ):
        assert f'"{key}":' in text, key


def test_commands_of_block_scaling_are_the_known_ones() -> None:
    text = source(Interchange.process_command)
    for command in ("CONNECTED_BLOCKS", "MANAGERS", "MANAGERS_PACKAGES", "HOLD_MANAGER", "WORKER_BINDS"):
        assert f'"{command}"' in text, command
    scale_in = source(HighThroughputExecutor.scale_in)
    for key in ("active", "block_id", "tasks", "idle_duration"):
        assert f"manager['{key}']" in scale_in, key


def test_channels_send_pickled_messages() -> None:
    assert "send_pyobj(message)" in source(zmq_pipes.TasksOutgoing.put)
    assert "self.results_receiver.recv()" in source(zmq_pipes.ResultsIncoming.get)
    assert "timeout_s" in inspect.signature(zmq_pipes.CommandClient.run).parameters


def test_idle_scale_in_asks_for_a_subclass_of_htex() -> None:
    assert "isinstance(executor, HighThroughputExecutor)" in source(strategy)
    assert issubclass(SlotExecutor, HighThroughputExecutor)


def test_every_argument_of_htex_is_taken() -> None:
    ours = set(inspect.signature(SlotExecutor.__init__).parameters)
    theirs = set(inspect.signature(HighThroughputExecutor.__init__).parameters)
    assert theirs <= ours, theirs - ours


def test_colmena_names_that_are_overridden_exist() -> None:
    for cls, names in {
        ColmenaQueues: ("get_result", "send_inputs", "send_result", "get_task", "_check_role"),
        PipeQueues: ("_send_request", "_get_request", "_send_result", "_get_result"),
        ParslTaskServer: ("_submit", "_setup", "_cleanup", "process_queue", "listen_and_launch"),
        BaseThinker: ("list_agents", "run", "prepare_agent", "tear_down_agent"),
    }.items():
        for name in names:
            assert callable(getattr(cls, name)), f"{cls.__name__}.{name}"
