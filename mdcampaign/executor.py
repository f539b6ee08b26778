"""SlotExecutor: a complete Parsl executor whose unit is the slot of a device.

It is HTEX with another broker and another node agent: blocks, providers, launchers, certificates, serialisation and
monitoring are Parsl's own. Non-public names of Parsl used here: `_result_queue_worker`,
`_start_local_interchange_process`, `_result_queue_thread_exit`, `_task_counter`, `_hold_manager`, `outgoing_q`,
`incoming_q`, `command_client` and `interchange_proc` of HighThroughputExecutor. `tests/contract` watches them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typeguard
import zmq
from parsl.data_provider.staging import Staging
from parsl.executors import HighThroughputExecutor
from parsl.executors.errors import BadStateException, InvalidResourceSpecification
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.executors.high_throughput.manager_selector import ManagerSelector, RandomManagerSelector
from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.states import JobStatus
from parsl.monitoring.radios.base import RadioConfig
from parsl.process_loggers import wrap_with_logs
from parsl.providers import LocalProvider
from parsl.providers.base import ExecutionProvider

from mdcampaign.blocks import replace_or_give_up
from mdcampaign.errors import BadJob, BrokerLost, JobCancelled, JobInterrupted, NameTaken
from mdcampaign.futures import SlotFuture, retry_handler
from mdcampaign.futures import resolve as resolve_future
from mdcampaign.journal import Journal, spec_facts
from mdcampaign.node.options import Options
from mdcampaign.node.protocol import DeviceReport
from mdcampaign.node.slots import equip
from mdcampaign.resources import check_resource_specification, request_of
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.scheduler import DeviceSpec, Scheduler

__all__ = ["SlotExecutor", "retry_handler"]

logger = logging.getLogger(__name__)

COMMAND_S = 30.0
"""Limit of a question to the broker; it answers in milliseconds unless it is gone."""

MAX_SLOTS = 10_000
"""Slots of one device, more than any could serve."""

LAUNCH_CMD = (
    "{python} -m mdcampaign.node.agent {{debug}} {{max_workers_per_node}} "
    "-a {{addresses}} --port={{worker_port}} -c {{cores_per_worker}} -m {{mem_per_worker}} "
    "--cert_dir {{cert_dir}} --logdir={{logdir}} --block_id={{{{block_id}}}} "
    "--hb_period={{heartbeat_period}} --hb_threshold={{heartbeat_threshold}} --drain_period={{drain_period}} "
    "--cpu-affinity {{cpu_affinity}} {{address_probe_timeout_string}} --slots_per_device={slots}"
)


class SlotExecutor(HighThroughputExecutor):
    """Parsl executor that fills the slots of devices by continuous batching.

    Everything is defaulted: `SlotExecutor(label="slots")` works on a laptop, with the CPU cores as one device. The
    arguments that HTEX has too keep their meaning there. Resource keys of a task (`parsl_resource_specification`):
    `priority` (larger is more urgent), `slots`, `exclusive`, `memory_mb`, `cores`, `expected_s`, `requeue`, `name`
    and `first_attempt`.

    Args:
        slots_per_device: slots that each device is divided into; by default one a GPU, and on CPU cores as many as
            HTEX would start workers.
        devices_per_node: declared number of devices of a node; with it, what can never fit is refused at once.
        device_memory_mb: declared memory of a device, MiB.
        policy: scheduling policy; `Policy()` by default.
        campaign_dir: a campaign directory; its log then records every event before a future resolves.

    Raises:
        BadJob: an impossible argument.
    """

    @typeguard.typechecked
    def __init__(
        self,
        label: str = "slots",
        provider: ExecutionProvider | None = None,
        launch_cmd: str | None = None,
        interchange_launch_cmd: Sequence[str] | None = None,
        address: str | None = None,
        loopback_address: str = "127.0.0.1",
        worker_port: int | None = None,
        worker_port_range: tuple[int, int] | None = (54000, 55000),
        interchange_port_range: tuple[int, int] | None = (55000, 56000),
        storage_access: list[Staging] | None = None,
        working_dir: str | None = None,
        worker_debug: bool = False,
        cores_per_worker: float = 1.0,
        mem_per_worker: float | None = None,
        max_workers_per_node: int | float | None = None,
        cpu_affinity: str = "block",
        available_accelerators: int | Sequence[str] = (),
        prefetch_capacity: int = 0,
        heartbeat_threshold: int = 30,
        heartbeat_period: int = 5,
        drain_period: int | None = None,
        poll_period: int = 100,
        address_probe_timeout: int | None = None,
        worker_logdir_root: str | None = None,
        manager_selector: ManagerSelector = RandomManagerSelector(),  # noqa: B008 - HTEX's own default
        block_error_handler: bool | Callable[[BlockProviderExecutor, dict[str, JobStatus]], None] = True,
        encrypted: bool = True,
        remote_monitoring_radio: RadioConfig | None = None,
        slots_per_device: int | None = None,
        devices_per_node: int | None = None,
        device_memory_mb: int | None = None,
        policy: Policy | None = None,
        campaign_dir: str | None = None,
    ) -> None:
        if slots_per_device is not None and not 1 <= slots_per_device <= MAX_SLOTS:
            mend = f"Give 1 to {MAX_SLOTS}, or leave it out for the default."
            raise BadJob("slots_per_device", slots_per_device, "impossible number of slots", mend)
        if prefetch_capacity:
            logger.warning("prefetch_capacity=%s is ignored: a queue on the node defeats priorities", prefetch_capacity)
        self.slots_per_device = slots_per_device
        self.devices_per_node = devices_per_node
        self.device_memory_mb = device_memory_mb
        self.policy = policy or Policy()
        self.campaign_dir = campaign_dir
        self.journal: Journal | None = None
        self._names: dict[str, int] = {}
        self._acks: dict[int, Future[dict[str, Any]]] = {}
        self._subscribers: list[Callable[[dict[str, Any]], None]] = []
        self._sending = threading.Lock()
        self._counter = threading.Lock()
        self._closing = threading.Event()
        self._ack_counter = 0
        launch = LAUNCH_CMD.format(python=shlex.quote(sys.executable), slots=slots_per_device)
        super().__init__(
            label=label,
            provider=provider,
            launch_cmd=launch_cmd or launch,
            address=address,
            loopback_address=loopback_address,
            worker_port=worker_port,
            worker_port_range=worker_port_range,
            interchange_port_range=interchange_port_range,
            storage_access=storage_access,
            working_dir=working_dir,
            worker_debug=worker_debug,
            cores_per_worker=cores_per_worker,
            mem_per_worker=mem_per_worker,
            max_workers_per_node=whole(max_workers_per_node),
            cpu_affinity=cpu_affinity,
            available_accelerators=available_accelerators,
            heartbeat_threshold=heartbeat_threshold,
            heartbeat_period=heartbeat_period,
            drain_period=drain_period,
            poll_period=poll_period,
            address_probe_timeout=address_probe_timeout,
            worker_logdir_root=worker_logdir_root,
            manager_selector=manager_selector,
            block_error_handler=replace_or_give_up if block_error_handler is True else block_error_handler,
            encrypted=encrypted,
            remote_monitoring_radio=remote_monitoring_radio,
        )
        self._own_broker = interchange_launch_cmd is None
        if interchange_launch_cmd is not None:
            self.interchange_launch_cmd = interchange_launch_cmd
        self._fitting = Scheduler(self.policy)
        self._declared = self._declared_shape()
        if self._declared:
            self._fitting.declare(self._declared)
            self._workers_per_node = sum(device.slots for device in self._declared)

    def _declared_shape(self) -> list[DeviceSpec]:
        """Return the devices of a node as far as they are known before any pilot: declared, or this machine's cores."""
        slots, cores_per_slot = self.slots_per_device or 1, sys.maxsize
        if isinstance(self.provider, LocalProvider) and self.devices_per_node is None:
            here = DeviceReport(uuid="declared", kind="cpu", slot_cores=[])
            options = Options(
                addresses="",
                port=0,
                slots_per_device=self.slots_per_device,
                cores_per_worker=self.cores_per_worker,
                max_workers_per_node=self.max_workers_per_node,
                mem_per_worker=self.mem_per_worker,
                cpu_affinity=self.cpu_affinity,
            )
            (device,) = equip([here], options)
            slots, cores_per_slot = len(device.slot_cores), len(device.slot_cores[0])
        elif self.devices_per_node is None:
            return []
        return [
            DeviceSpec(f"declared-{n}", slots, cores_per_slot, self.device_memory_mb)
            for n in range(self.devices_per_node or 1)
        ]

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the broker and, as Parsl's scaling asks for blocks, agents."""
        if self.campaign_dir is not None:
            self.journal = Journal(Path(self.campaign_dir), self.policy)
        super().start()

    def _start_local_interchange_process(self) -> None:
        declared = [asdict(device) for device in self._declared]
        ours = {"policy": asdict(self.policy), "declared": declared, "events": self._listening()}
        if self._own_broker:
            self.interchange_launch_cmd = [sys.executable, "-m", "mdcampaign.broker", json.dumps(ours)]
        super()._start_local_interchange_process()
        threading.Thread(target=self._watch_broker, name="Broker-Watch", daemon=True).start()

    def _watch_broker(self) -> None:
        """Fail everything as soon as the broker ends; in stock HTEX nobody would notice."""
        assert self.interchange_proc is not None, "started after the broker"
        status = self.interchange_proc.wait()
        if not self._closing.is_set():
            log = f"{self.logdir}/interchange.log"
            self.set_bad_state_and_fail_all(BrokerLost(f"the broker ended with status {status}; see {log}"))

    def set_bad_state_and_fail_all(self, exception: Exception) -> None:
        """Fail every future, and let none be submitted any more."""
        logger.error("The executor fails: %s", exception)
        self._executor_exception = exception
        self._executor_bad_state.set()
        if not self._closing.is_set():
            self._publish({"event": "executor_failed", "t": time.time(), "text": str(exception)})
        for task_id in list(self.tasks):
            if future := self.tasks.pop(task_id, None):
                future.set_exception(BadStateException(self, exception))
        for ident in list(self._acks):
            if ack := self._acks.pop(ident, None):
                ack.set_exception(BrokerLost(str(exception)))

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Start nothing more and ask running jobs to checkpoint.

        Returns:
            True when no job that may be repeated (`requeue`) runs any more, False when the limit was reached first.
        """
        if self.bad_state_is_set or self.interchange_proc is None:
            return True
        return bool(self._ask("drain", timeout_s=timeout_s).result(timeout_s + COMMAND_S)["ok"])

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the broker, which ends the agents; what has not ended by then is interrupted."""
        self._closing.set()
        if self.interchange_proc is not None and not self.bad_state_is_set:
            self._ask("shutdown")
        super().shutdown(timeout)
        for task_id in list(self.tasks):
            if future := self.tasks.pop(task_id, None):
                future.set_exception(JobInterrupted(f"task {task_id} had not ended when the executor was shut down"))
        for ident in list(self._acks):
            if ack := self._acks.pop(ident, None):
                ack.set_exception(BrokerLost("the executor was shut down"))
        if self.journal is not None:
            self.journal.close()

    # ------------------------------------------------------------ tasks

    def validate_resource_spec(self, resource_specification: dict[str, Any]) -> None:
        """Refuse a specification that is wrong or can never fit.

        Raises:
            InvalidResourceSpecification: with the key, the value, what is wrong and what would be right.
        """
        try:
            resource_specification = resource_specification or {}
            check_resource_specification(resource_specification)
            why = self._fitting.can_ever_fit(request_of(0, resource_specification, 0.0))
            if why:
                raise BadJob("resource_specification", resource_specification, why)
        except BadJob as exc:
            raise InvalidResourceSpecification({exc.field}, str(exc)) from exc

    def submit_payload(self, context: dict[str, Any], buffer: bytes) -> HTEXFuture:
        """Send a task to the broker; see HTEX for `context`."""
        if self.bad_state_is_set:
            raise BadStateException(self, self.executor_exception)
        spec = context.get("resource_spec", {})
        with self._counter:
            self._task_counter += 1
            task_id = self._task_counter
        name = spec.get("name", f"task-{task_id}")
        future = SlotFuture(task_id, name, self._cancel)
        if self.journal is not None and "identity" in spec:
            try:
                if known := self.journal.outcome_before(name, spec):
                    future.set_result(known.as_dict())
                    return future
            except (JobCancelled, NameTaken) as exc:
                future.set_exception(exc)
                return future
            context = {**context, "resource_spec": self.journal.prepare(name, spec)}
        self.tasks[task_id] = future
        if "name" in spec:
            self._names[name] = task_id
        if self._listening():
            self._publish(
                {"event": "submitted", "t": time.time(), "job": name, "task": task_id, **spec_facts(name, spec)}
            )
        self._send({"task_id": task_id, "context": context, "buffer": buffer})
        return future

    def _cancel(self, task_id: int) -> None:
        with contextlib.suppress(BrokerLost):  # then it is over for the task too
            self._send({"control": "cancel", "task_id": task_id, "id": None})

    def _send(self, message: dict[str, Any]) -> None:
        """Send on the one socket that leads to the broker; ZeroMQ allows one sender at a time.

        Raises:
            BrokerLost: the broker is gone; without a peer the socket would wait for ever.
        """
        with self._sending:
            if self.bad_state_is_set or not self.outgoing_q.zmq_socket.poll(int(COMMAND_S * 1000), zmq.POLLOUT):
                raise BrokerLost(str(self.executor_exception or "the broker takes no messages"))
            self.outgoing_q.put(message)

    # ------------------------------------------------------------ steering

    def control(self, verb: str, job: str, **payload: Any) -> Future[dict[str, Any]]:
        """Tell a job, by the `name` of its resource specification, to change its course.

        Verbs: "stop", "yield", "extend" (target_step=...), "cancel", "rerank" (priority=...), "explain".

        Returns:
            A future of the acknowledgement: {"ok": bool, "state": "waiting" | "running" | "ended" | "unknown",
            "message": str}. It says that the verb was taken; its effect shows at the job's next report.

        Raises:
            BadJob: a priority or target step that is none.
        """
        check_resource_specification(payload)
        task_id = self._names.get(job)
        if task_id is None:
            unknown: Future[dict[str, Any]] = Future()
            unknown.set_result({"ok": False, "state": "unknown", "message": f"no job is named {job!r}"})
            return unknown
        return self._ask(verb, task_id=task_id, **payload)

    def snapshot(self) -> dict[str, Any]:
        """Return counts of waiting and running tasks, and the nodes.

        Raises:
            TimeoutError: the broker did not answer within `COMMAND_S`.
        """
        return self._ask("snapshot").result(COMMAND_S)

    def _ask(self, verb: str, **payload: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        if self.bad_state_is_set:
            future.set_exception(BrokerLost(str(self.executor_exception)))
            return future
        with self._counter:
            self._ack_counter += 1
            ident = self._ack_counter
        self._acks[ident] = future
        try:
            self._send({"control": verb, "id": ident, **payload})
        except BrokerLost as exc:
            if self._acks.pop(ident, None):
                future.set_exception(exc)
        return future

    def subscribe(self, callback: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Have every event (see docs/campaign-directory.md) given to `callback`, in the executor's own thread.

        The callback must return at once. Returns a function that ends the subscription.
        """
        listened = self._listening()
        self._subscribers.append(callback)
        if not listened and self.interchange_proc is not None:
            self._ask("events", on=True)
        return lambda: self._subscribers.remove(callback)

    def _listening(self) -> bool:
        return self.journal is not None or bool(self._subscribers)

    def _publish(self, news: dict[str, Any], then: Callable[[], None] | None = None) -> None:
        """Log an event, tell the subscribers, and do `then` when the event is safe on disk."""
        if self.journal is not None:
            self.journal.append(news, then=then)
        for callback in list(self._subscribers):
            try:
                callback(news)
            except Exception:
                logger.exception("A subscriber failed on %s", news.get("event"))
        if self.journal is None and then is not None:
            then()

    # ------------------------------------------------------------ what the broker says

    @wrap_with_logs
    def _result_queue_worker(self) -> None:
        """Take results, events and acknowledgements until the executor closes."""
        while not self.bad_state_is_set and not self._result_queue_thread_exit.is_set():
            raw = self.incoming_q.get(timeout_ms=self.poll_period)
            if raw is None:
                continue
            try:
                message = pickle.loads(raw)
                self._take(message)
            except Exception:
                logger.exception("Dropped a message of the broker")
        self.incoming_q.close()

    def _take(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "result":
            self._take_result(message)
        elif kind == "event":
            self._publish(message["event"])
        elif kind == "ack":
            ack = self._acks.pop(message.pop("id"), None)
            message.pop("type")
            if ack is not None:
                ack.set_result(message)

    def _take_result(self, message: dict[str, Any]) -> None:
        """Log the end of a task, then resolve its future."""
        task_id = message["task_id"]
        future = self.tasks.pop(task_id, None)
        if not isinstance(future, SlotFuture):
            logger.info("Dropped the result of task %s, which nobody waits for", task_id)
            return

        def resolve() -> None:
            resolve_future(future, message)

        if not self._listening():
            resolve()
            return
        ended = {"event": "done", "t": time.time(), "job": future.name, "task": task_id}
        said = {key: value for key, value in (message.get("outcome") or {}).items() if key not in ("kind", "failure")}
        self._publish({**said, **ended, "outcome": message["how"]}, then=resolve)

    # ------------------------------------------------------------ questions of Parsl's block scaling

    def _command(self, request: Any, otherwise: Any) -> Any:
        """Ask the broker within a limit; a broker that is gone must not hang block scaling or clean-up."""
        if self.bad_state_is_set:
            return otherwise
        try:
            return self.command_client.run(request, timeout_s=COMMAND_S)
        except Exception as exc:
            if not self._closing.is_set() and not self.bad_state_is_set:
                self.set_bad_state_and_fail_all(BrokerLost(f"the broker does not answer {request!r}: {exc!r}"))
            return otherwise

    def connected_managers(self) -> list[dict[str, Any]]:
        """Return the registered agents, as HTEX's managers."""
        return self._command("MANAGERS", [])

    def connected_managers_packages(self) -> dict[str, dict[str, str]]:
        """Return the installed packages of each agent."""
        return self._command("MANAGERS_PACKAGES", {})

    def connected_blocks(self) -> list[str]:
        """Return the ids of blocks that have registered."""
        return self._command("CONNECTED_BLOCKS", [])

    def _hold_manager(self, manager_id: str) -> None:
        self._command(["HOLD_MANAGER", manager_id], None)


def whole(workers: float | None) -> int | None:
    """Return HTEX's `max_workers_per_node`, whose default attribute value is infinity, as its constructor takes it."""
    return None if workers is None or workers == float("inf") else int(workers)
