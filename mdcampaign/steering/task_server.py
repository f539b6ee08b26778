"""Colmena's Parsl task server, with resource specifications, verbs, progress and an end that saves the work.

It runs the methods of existing Colmena programs as `ParslTaskServer` does. What it adds:

* `task_info["mdcampaign"]` of a request, over the defaults of its method, reaches Parsl as resource specification.
* The reserved method `mdcampaign.run` takes an `MDJob`; the value of its result is an `Outcome` as a dict.
* The reserved method `mdcampaign.control` takes a verb for a running job; it keeps its place among the requests.
* What the executor reports goes to the Thinker on the topic `mdcampaign.events`.
* Every request gets exactly one final result, whatever happens to it or to the server, short of SIGKILL.

Names that are not public: `_preprocess_callback` of Colmena.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import parsl
import psutil
from colmena.exceptions import KillSignalException, TimeoutException
from colmena.models import FailureInformation, Result
from colmena.task_server.parsl import ParslTaskServer, _preprocess_callback
from parsl.config import Config
from parsl.errors import NoDataFlowKernelError

from mdcampaign.errors import BadInput, MDCampaignError, nearest
from mdcampaign.resources import check_resource_specification
from mdcampaign.steering import apps
from mdcampaign.steering.desk import Desk
from mdcampaign.steering.queues import CONTROL, RUN, CampaignQueues
from mdcampaign.steering.streaming import lean

logger = logging.getLogger(__name__)

_TICK_S = 0.5  # how often the waiting server looks for signals and for the death of its parent
_LATE_S = 2.0  # how much later than asked an executor may say that it has drained
_PARSL_S = 15.0  # how long Parsl may take to end
_FLUSH_S = 5.0  # how long the last results may take to leave


class CampaignTaskServer(ParslTaskServer):
    """Task server of a campaign; a process, started before any thread or socket exists in its parent.

    Args:
        methods: as for `ParslTaskServer`; may be empty where there are MDJobs only.
        queues: `PipeQueues` or `RedisQueues` of `mdcampaign.steering.queues`.
        config: Parsl configuration; MDJobs go to its executors that have slots (`SlotExecutor`).
        timeout: end when no request came for this many seconds; by default never.
        default_executors: as for `ParslTaskServer`.
        campaign_dir: where the jobs' directories are; by default the executor's `campaign_dir`.
        method_defaults: resource specification by method name, for requests that bring none or only part of one.
        run_job: what runs an MDJob in a slot, called with the job as JSON values and the campaign directory.
        drain_s: how long running jobs may take to save their state at the end.
        ignore_interrupt: leave Ctrl-C to the parent process.

    Raises:
        BadInput: names the argument, its value and the mend.
    """

    queues: CampaignQueues

    def __init__(
        self,
        methods: Sequence[Any],
        queues: CampaignQueues,
        config: Config,
        timeout: int | None = None,
        default_executors: str | list[str] = "all",
        *,
        campaign_dir: str | None = None,
        method_defaults: dict[str, dict[str, Any]] | None = None,
        run_job: Callable[[dict[str, Any], str], dict[str, Any]] = apps.run_job,
        drain_s: float = 30.0,
        ignore_interrupt: bool = False,
    ) -> None:
        if not isinstance(queues, CampaignQueues):
            mend = "Use PipeQueues or RedisQueues of mdcampaign.steering.queues."
            raise BadInput("queues", type(queues).__name__, "cannot carry verbs and progress", mend)
        super().__init__([lean(method) for method in methods], queues, config, timeout, default_executors)
        _warn_of_main(methods)
        self.drain_s = drain_s
        self.ignore_interrupt = ignore_interrupt
        self.method_defaults = self._checked(method_defaults or {})
        for app in (app for app, _ in self.methods_.values()):
            app.func = apps.WithoutSpecification(app.func)
        for _, after in self.exec_apps_.values():
            after.func = apps.WithoutSpecification(after.func)
        self._desk = Desk(queues, config, campaign_dir, run_job)
        self._parent = 0
        self._parsl_stuck = False

    def _checked(self, defaults: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, spec in defaults.items():
            if name not in self.methods_:
                mend = f"{nearest(name, self.methods_)}Methods: {', '.join(self.methods_) or 'none'}."
                raise BadInput("method_defaults", name, "there is no such method", mend)
            check_resource_specification(spec)
        return defaults

    # ------------------------------------------------------------ life of the process

    def start(self) -> None:
        """Start the process by forking this one; warn if this one has threads, which do not survive that."""
        others = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
        if others:
            warnings.warn(
                f"the task server is forked from a process with other threads ({', '.join(others)}), whose locks may "
                "stay locked in it; start the task server first",
                RuntimeWarning,
                stacklevel=2,
            )
        self._parent = os.getpid()
        super().start()

    def run(self) -> None:
        """Serve until the kill signal, SIGTERM, an idle `timeout` or the death of the parent; then clean up."""
        self._stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN if self.ignore_interrupt else lambda *_: self._stop.set())
        self.queues.set_role("server")
        self.queues.start_sending()
        well = self._guarded("set-up", self._setup) and self._guarded("serving", self.listen_and_launch)
        well &= self._guarded("clean-up", self._cleanup)
        well &= self.queues.stop_sending(_FLUSH_S if self._has_parent() else 0.0)
        if not well or self._parsl_stuck:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os._exit(1)  # a thread of Parsl that still runs must not hold this process

    def _guarded(self, what: str, step: Callable[[], None]) -> bool:
        """Do a step of the server's life; tell the Thinker when it fails, and return whether it went well."""
        try:
            step()
            return True
        except Exception as exc:
            traceback.print_exc()
            logger.exception("the task server failed in %s", what)
            words = {"during": what, "error": repr(exc), "traceback": traceback.format_exc()}
            self._forward({"event": "server_failed", "t": time.time(), **words})
            return False

    def _setup(self) -> None:
        super()._setup()  # type: ignore[no-untyped-call]
        for executor in parsl.dfk().executors.values():
            if hasattr(executor, "subscribe"):
                executor.subscribe(self._forward)

    def _forward(self, event: dict[str, Any]) -> None:
        """Pass an event of the executor on; called from its threads, and never waits."""
        job = event.get("job") if event.get("event") == "progress" else None
        if job is not None:
            self._desk.note_progress(job, event["progress"].get("step", 0))
        try:
            self.queues.send_event(event, key=job)
        except ConnectionError:
            logger.debug("an event could not be sent", exc_info=True)

    def _has_parent(self) -> bool:
        return os.getppid() == self._parent

    def listen_and_launch(self) -> None:
        """Take requests, each on its own: what is wrong with one is its result and ends nobody else."""
        last = time.monotonic()
        while not self._stop.is_set() and self._has_parent():
            try:
                topic, task = self.queues.get_task(_TICK_S)
            except KillSignalException:
                return
            except TimeoutException:
                if self.timeout is not None and time.monotonic() - last > self.timeout:
                    return
                continue
            except ValueError:
                logger.exception("dropped a request that cannot be read")
                continue
            last = time.monotonic()
            try:
                self.process_queue(topic, task)
            except Exception as exc:
                logger.exception("the request of %s was refused", task.method)
                self._fail(task, exc)

    # ------------------------------------------------------------ requests

    def process_queue(self, topic: str, task: Result) -> None:
        """Start one request; its result is sent when it is there."""
        if task.method == CONTROL:
            self._desk.take_verb(task)
        elif task.method == RUN:
            self._desk.take_job(task, self._specification(task))
        elif task.method in self.method_names:
            super().process_queue(topic, task)
        else:
            known = ", ".join(sorted(self.method_names)) or "none"
            raise BadInput("method", task.method, "there is no such method", f"Methods: {known}.")

    def _specification(self, task: Result) -> dict[str, Any]:
        """Return what the request, over the defaults of its method, asks of a slot."""
        asked: dict[str, Any] = (task.task_info or {}).get("mdcampaign", {})
        spec = self.method_defaults.get(str(task.method), {}) | asked
        check_resource_specification(spec)
        return spec

    def _submit(self, task: Result, topic: str) -> Future[Any] | None:
        """Submit a method; with a specification where there is one, else just as Colmena does."""
        spec = self._specification(task)
        if not spec:
            return super()._submit(task, topic)
        task.mark_start_task_submission()  # type: ignore[no-untyped-call]
        app, kind = self.methods_[str(task.method)]
        if kind == "basic":
            future: Future[Any] = self._desk.launch(app, spec, task)
            return future
        inputs: Any = task.inputs
        execute, after = self.exec_apps_[str(task.method)]
        light = {key: spec[key] for key in ("priority",) if key in spec}  # before and after need no whole device
        steps: Any = (
            partial(self._desk.launch, execute, spec),
            partial(after, parsl_resource_specification=light),
        )
        before = app(task, parsl_resource_specification=light)
        before.add_done_callback(lambda done: _preprocess_callback(done, inputs, task, self, topic, *steps))
        return None

    def perform_callback(self, future: Future[Any], result: Result, topic: str) -> None:
        """Send the result of a method; one that is no `Result` at all counts as failed."""
        try:
            super().perform_callback(future, result, topic)
        except Exception as exc:
            logger.exception("the result of %s cannot be sent", result.method)
            self._fail(result, exc)

    def _fail(self, task: Result, error: BaseException) -> None:
        """Send a failed final result that says why."""
        task.success, task.value, task.complete = False, None, None
        task.failure_info = FailureInformation.from_exception(error)
        try:
            self.queues.send_result(task)
        except ConnectionError:
            logger.warning("the result of %s %s could not be sent", task.method, task.task_id)

    # ------------------------------------------------------------ the end

    def _cleanup(self) -> None:
        """Let running jobs save their state, end Parsl, and answer what has no answer yet.

        Where no MDJob is under way, and nothing else hurries, tasks run to their end first, as in Colmena.
        """
        if not any(task.method == RUN for task in self.queues.unanswered()):
            while self.queues.unanswered() and self._has_parent() and not self._stop.wait(0.1):
                pass
        try:
            kernel = parsl.dfk()
        except NoDataFlowKernelError:  # the set-up failed before there was one
            pass
        else:
            drains: list[Any] = [getattr(executor, "drain", None) for executor in kernel.executors.values()]
            within([partial(drain, self.drain_s) for drain in drains if drain], self.drain_s + _LATE_S)
            self._parsl_stuck = not within([kernel.cleanup], _PARSL_S)
        lost = MDCampaignError("the task server ended before this task did")
        for task in self.queues.unanswered():
            task.success, task.inputs = False, ((), {})
            task.failure_info = FailureInformation.from_exception(lost)
            if task.method == RUN:
                self._desk.interrupt(task, str(lost))
            self.queues.abandon(task)


def _warn_of_main(methods: Sequence[Any]) -> None:
    """Warn of methods in the script itself: a slot gets their code, and none of what it refers to there."""
    for method in methods:
        function: Any = method[0] if isinstance(method, tuple | list) else method
        function = getattr(function, "_function", getattr(function, "function", function))
        if getattr(function, "__module__", "") == "__main__":
            warnings.warn(
                f"the method {function.__name__} is defined in the script: other names of the script, such as its "
                "imports, are unknown to it in a slot. Put it into a module that can be imported there",
                RuntimeWarning,
                stacklevel=3,
            )


def within(actions: Sequence[Callable[[], Any]], limit_s: float) -> bool:
    """Do all actions at once, and return whether they ended within the limit.

    Threads do them: an executor whose other end is gone may hang, and nothing can interrupt it.
    """
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
