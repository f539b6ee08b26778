"""Colmena's queues, made fit for steering: verbs one way, progress and acknowledgements the other.

What Colmena's queues do, these do too; a program changes the class and nothing else. What is different:

* Sends are safe from any number of threads. (Six threads sending 4 kB through Colmena's `PipeQueues` corrupt it.)
* A task counts as active until its *final* result; Colmena drops it at its first, intermediate, one.
* A result or request that is too large is refused in words, and ends nobody.
* `RedisQueues` has a prefix of its own for each object, and timeouts below a second.
* When the task server is lost (`fail`), whoever waits for a result is told, after what had arrived was delivered.

**Why nothing can block for ever.** A pipe holds 64 KiB. If a process both reads one pipe and, in the same thread,
writes to another, two such processes can each wait for the other to read. So no thread here does both:

1. The server's reading thread takes a request and never sends. What it has to say (acknowledgements, results) goes
   into an unbounded mailbox, and so does what the executor's threads have to say. One outbound thread empties it.
2. The client's callers never touch the request pipe either: requests go into an unbounded mailbox that one outbound
   thread empties.
3. The client has one inbound thread for each result pipe. It moves messages into unbounded memory and does nothing
   else, so a result pipe is emptied whatever the Thinker's handlers do, and no topic can hold up another.

So every pipe has a reader that waits for nothing but its pipe (1, 3), hence every writer (1, 2) goes on, hence all
mailboxes drain. A writer whose reader has died waits alone: it is a daemon thread, closed with a limit. Memory is
bounded by what is in flight: one progress report for each job, as the newest replaces the older one, and the
requests and results that exist anyway. A Redis server takes whatever is sent, so there rules 2 and 3 hold without
threads of ours; rule 1 still keeps a slow server from slowing the reading thread.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Hashable
from typing import Any, cast
from uuid import uuid4

import colmena.queue.python
import colmena.queue.redis
from colmena.exceptions import TimeoutException
from colmena.models import FailureInformation, Result
from colmena.queue.base import ColmenaQueues, QueueRole

from mdcampaign.errors import BadInput
from mdcampaign.steering.mailbox import Outbound
from mdcampaign.steering.proxies import KeptInputs

CONTROL = "mdcampaign.control"
"""Reserved method: a verb (`stop`, `extend`, ...) for a job, in order with the submissions."""
RUN = "mdcampaign.run"
"""Reserved method: an MDJob."""
RESULTS, ACKS, EVENTS = "mdcampaign.results", "mdcampaign.acks", "mdcampaign.events"
RESERVED_TOPICS = frozenset({RESULTS, ACKS, EVENTS})

_TICK_S = 0.5  # how often a waiting reader looks whether the server is lost
_GRACE_S = 0.5  # how long after that loss messages may still be on their way through this process
_MIB = 1 << 20


class _ProcessState:
    """What belongs to one process: never pickled, and made anew after a fork."""

    def __init__(self) -> None:
        self.books = threading.RLock()
        self.writing = threading.Lock()
        self.results: Outbound | None = None
        self.requests: Outbound | None = None
        self.events: deque[str] = deque()
        self.inboxes: dict[str, queue.SimpleQueue[str]] = {}
        self.kept = KeptInputs()
        self.inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.unanswered: dict[str, Result] = {}
        self.abandoned: set[str] = set()
        self.failure: Exception | None = None
        self.failed_at = 0.0


class CampaignQueues(ColmenaQueues):
    """What both kinds of queues share; see the module for what differs from Colmena's."""

    message_limit_bytes = 1024 * _MIB
    """A larger message is refused: `send_inputs` raises, and a result becomes a failed one that says so."""

    def __init__(self, topics: Collection[str] = (), *args: Any, **kwargs: Any) -> None:
        super().__init__({*topics, *RESERVED_TOPICS}, *args, **kwargs)
        self._renew()

    def _renew(self) -> None:
        self._here = _ProcessState()
        self._active_lock, self._all_complete = threading.Lock(), threading.Event()
        _instances.add(self)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        del state["_here"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._renew()

    # ------------------------------------------------------------ client

    def send_inputs(
        self, *input_args: Any, input_kwargs: dict[str, Any] | None = None, topic: str = "default", **options: Any
    ) -> str:
        """Send a task request, as Colmena does; from any thread, without waiting.

        Raises:
            BadInput: the request is larger than `message_limit_bytes`.
            TaskServerLost: nobody is there to take it.
        """
        if self._here.failure is not None:
            raise self._here.failure
        with self._here.books:  # a result cannot be counted before its task is
            args, kwargs, proxies = self._here.kept.store(self, topic, input_args, input_kwargs or {})
            task_id = super().send_inputs(*args, input_kwargs=kwargs, topic=topic, **options)
            self._here.kept.remember(task_id, proxies)
            self._here.inputs[task_id] = (input_args, input_kwargs or {})
        return task_id

    def get_result(self, topic: str = "default", timeout: float | None = None) -> Result:
        """Return the next result of a topic; only a final one (`complete` is not False) ends its task.

        A value that cannot be unpacked here makes the result a failed one.

        Raises:
            TimeoutException: nothing came within `timeout` seconds.
            TaskServerLost: tasks are active, and nothing will come any more.
        """
        self._check_role(QueueRole.CLIENT, "get_result")
        result = Result.model_validate_json(self._receive(topic, timeout))
        try:
            result.time.deserialize_results = result.deserialize()
        except Exception as exc:
            result.inputs, result.value, result.success = ((), {}), None, False
            result.failure_info = FailureInformation.from_exception(exc)
        result.mark_result_received()  # type: ignore[no-untyped-call]
        if result.complete is not False:
            self._end(result.task_id)
        elif result.keep_inputs:  # intermediate results travel without the inputs
            result.inputs = self._here.inputs.get(result.task_id, result.inputs)
        return result

    def get_event(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the next event of the executor; raises as `get_result` does."""
        event: dict[str, Any] = json.loads(self._receive(EVENTS, timeout))
        return event

    def wait_until_done(self, timeout: float | None = None) -> bool:
        """Wait until no task is active; False when the time is over or the task server is lost."""
        end = None if timeout is None else time.monotonic() + timeout
        while not super().wait_until_done(_slice(end)):
            if self.lost or (end is not None and time.monotonic() >= end):
                return False
        return True

    def fail(self, error: Exception) -> None:
        """Tell everybody who waits, or comes to wait, that nothing more will come."""
        if self._here.failure is None:
            self._here.failure, self._here.failed_at = error, time.monotonic()

    def _receive(self, topic: str, timeout: float | None) -> str:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                return self._get_result(topic, timeout=_slice(end))  # type: ignore[arg-type]
            except TimeoutException:
                if self.lost and self._active_tasks:
                    raise self._here.failure from None  # type: ignore[misc]
                if self.lost:  # nobody is owed anything: a loop that asks whether it is over may ask
                    raise
                if end is not None and time.monotonic() >= end:
                    raise

    @property
    def lost(self) -> bool:
        """Whether `fail` was called, and what had arrived by then has had time to be delivered."""
        return self._here.failure is not None and time.monotonic() - self._here.failed_at > _GRACE_S

    def _end(self, task_id: str) -> None:
        with self._here.books, self._active_lock:
            self._active_tasks.discard(task_id)
            if not self._active_tasks:
                self._all_complete.set()
            self._here.inputs.pop(task_id, None)
            self._here.kept.release(task_id)

    # ------------------------------------------------------------ server

    def start_sending(self) -> None:
        """From here on, results and events of this process leave by one outbound thread."""
        self._here.results = Outbound(self._write, "outbound-results")

    def stop_sending(self, limit_s: float) -> bool:
        """Send what is left; tell whether all of it left within the limit."""
        outbound, self._here.results = self._here.results, None
        return outbound is None or outbound.close(limit_s)

    def get_task(self, timeout: float | None = None) -> tuple[str, Result]:
        """Return the topic and content of the next request, as Colmena does; it is unanswered from here on."""
        topic, task = super().get_task(timeout)  # type: ignore[arg-type]
        self._here.unanswered[task.task_id] = task
        return topic, task

    def unanswered(self) -> list[Result]:
        """Return the requests taken by this process that have no final result yet."""
        return list(self._here.unanswered.values())

    def abandon(self, result: Result) -> None:
        """Send the final result of a task that has not ended; should it end after all, nothing more is sent."""
        if result.task_id in self._here.unanswered:
            self.send_result(result)
            self._here.abandoned.add(result.task_id)

    def send_result(self, result: Result) -> None:
        """Send a result. One that is too large, or cannot be packed, goes as a failed one that says why."""
        self._check_role(QueueRole.SERVER, "send_result")
        if result.task_id in self._here.abandoned:
            return
        if result.complete is not False:
            self._here.unanswered.pop(result.task_id, None)
        result.mark_result_sent()  # type: ignore[no-untyped-call]
        try:
            message = result.json()
            self._check_size(message, f"the result of {result.method}")
        except Exception as exc:
            failed = result.model_copy(update={"inputs": ((), {}), "value": None, "success": False, "complete": None})
            failed.failure_info = FailureInformation.from_exception(exc)
            message = failed.json()
        self._send_result(message, topic=result.topic)  # type: ignore[arg-type]

    def send_event(self, event: dict[str, Any], key: Hashable | None = None) -> None:
        """Send an event of the executor; a newer one under the same key replaces it on the way."""
        outbound = self._here.results
        if outbound is None:
            self._write(EVENTS, event)
        elif key is None:
            outbound.put(EVENTS, event)
        else:
            outbound.put_newest(EVENTS, event, key)

    def _send_result(self, message: str, topic: str) -> None:
        if self._here.results is not None:
            self._here.results.put(topic, message)
        else:
            self._write(topic, message)

    def _write(self, topic: str, message: str | dict[str, Any]) -> None:
        text = json.dumps(message, default=str) if isinstance(message, dict) else message
        with self._here.writing:
            self._write_result(topic, text)

    def _write_result(self, topic: str, message: str) -> None:
        super()._send_result(message, topic)  # type: ignore[safe-super]

    def _check_size(self, message: str, what: str) -> None:
        if len(message) > self.message_limit_bytes:
            raise BadInput(
                what,
                f"{len(message) / _MIB:.1f} MiB",
                f"larger than the {self.message_limit_bytes / _MIB:.1f} MiB that may pass through a queue",
                "Write it to a file and send the path, or use a ProxyStore.",
            )


class PipeQueues(CampaignQueues, colmena.queue.python.PipeQueues):
    """Colmena's `PipeQueues` (client and server on one machine) with the promises of this module."""

    def _send_request(self, message: str, topic: str) -> None:
        self._check_size(message, "the request")
        with self._here.books:
            if self._here.requests is None:
                self._here.requests = Outbound(self._write_request, "outbound-requests")
        self._here.requests.put(topic, message)

    def _write_request(self, topic: str, message: str) -> None:
        self.request_queue[1].send((topic, message))

    def _write_result(self, topic: str, message: str) -> None:
        self.result_queues[topic][1].send(message)

    def _get_result(self, topic: str, timeout: float | None = None) -> str:
        try:
            return self._inboxes()[topic].get(timeout=timeout)
        except queue.Empty:
            raise TimeoutException() from None

    def _inboxes(self) -> dict[str, queue.SimpleQueue[str]]:
        if not self._here.inboxes:
            with self._here.books:
                self._here.inboxes = self._here.inboxes or self._start_inbound()
        return self._here.inboxes

    def _start_inbound(self) -> dict[str, queue.SimpleQueue[str]]:
        inboxes: dict[str, queue.SimpleQueue[str]] = {topic: queue.SimpleQueue() for topic in self.result_queues}
        for topic, (reader, _) in self.result_queues.items():
            arguments = (reader, inboxes[topic])
            threading.Thread(target=_empty, args=arguments, name=f"inbound-{topic}", daemon=True).start()
        return inboxes

    def flush(self) -> None:
        """Drop all results that have arrived, and all requests that nobody has taken."""
        if not self._here.inboxes:
            super().flush()  # type: ignore[no-untyped-call]
        for inbox in self._here.inboxes.values():
            while not inbox.empty():
                inbox.get()


class RedisQueues(CampaignQueues, colmena.queue.redis.RedisQueues):
    """Colmena's `RedisQueues` with the promises of this module; needs a Redis server of version 6 or later."""

    message_limit_bytes = 512 * _MIB - 1

    def __init__(self, topics: Collection[str] = (), *args: Any, prefix: str | None = None, **kwargs: Any) -> None:
        super().__init__(topics, *args, prefix=prefix or str(uuid4()), **kwargs)

    def _send_request(self, message: str, topic: str) -> None:
        self._check_size(message, "the request")
        super()._send_request(message, topic)

    def _get_result(self, topic: str, timeout: float | None = None) -> str:
        """Events are taken a thousand at a time: a round trip for each would not keep up with a large campaign."""
        here, client = self._here.events, cast(Any, self.redis_client)
        if topic == EVENTS and here:
            return here.popleft()
        first: str = super()._get_result(topic, timeout)
        if topic == EVENTS:
            here.extend(client.lpop(f"{self.prefix}_{topic}_result", 1000) or ())
        return first

    def _get_message(self, queue: str, timeout: float | None) -> str:
        client = cast(Any, self.redis_client)
        found: tuple[str, str] | None = client.blpop([queue], timeout=0 if timeout is None else max(timeout, 0.01))
        if found is None:
            raise TimeoutException()
        return found[1]


def _empty(reader: Any, inbox: queue.SimpleQueue[str]) -> None:
    """Move messages from a pipe into memory, and do nothing else."""
    try:
        while True:
            inbox.put(reader.recv())
    except (EOFError, OSError):
        return


def _slice(end: float | None) -> float:
    return _TICK_S if end is None else min(_TICK_S, max(0.0, end - time.monotonic()))


_instances: weakref.WeakSet[CampaignQueues] = weakref.WeakSet()


def _renew_all() -> None:
    """In a forked child no thread of the parent lives, and a lock may be held by one: begin afresh."""
    for queues in list(_instances):
        queues._renew()


os.register_at_fork(after_in_child=_renew_all)
