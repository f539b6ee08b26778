"""The task server's desk for what is not a Colmena method: MDJobs, and verbs for running jobs.

Not a public name: `DataFlowKernel._task_launch_pool` of Parsl. Its one thread hands tasks to executors in order, so
a verb that goes through it cannot overtake the task that it is for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import parsl
from colmena.models import FailureInformation, Result
from parsl.app.python import PythonApp
from parsl.config import Config

from mdcampaign.errors import BadInput, nearest
from mdcampaign.steering.apps import WithoutSpecification
from mdcampaign.steering.ending import interrupted, outcome_of
from mdcampaign.steering.queues import CampaignQueues

logger = logging.getLogger(__name__)

VERBS = ("stop", "yield", "extend", "cancel", "rerank", "explain")


class Desk:
    """Passes MDJobs and verbs to the executors with slots, and sends back what becomes of them.

    Args:
        queues: where the answers go.
        config: MDJobs run on those of its executors that have slots (that have a `control` method).
        campaign_dir: by default the first such executor's own.
        run_job: what runs an MDJob in a slot.
    """

    def __init__(
        self, queues: CampaignQueues, config: Config, campaign_dir: str | None, run_job: Callable[..., Any]
    ) -> None:
        slotted: list[Any] = [executor for executor in config.executors if hasattr(executor, "control")]
        self._queues = queues
        self._labels = [executor.label for executor in slotted]
        self.campaign_dir = campaign_dir or next((e.campaign_dir for e in slotted if e.campaign_dir), None)
        app: Any = PythonApp
        self._run = app(WithoutSpecification(run_job), executors=self._labels)
        self._where: dict[str, str] = {}
        self._last_step: dict[str, int] = {}

    def launch(self, app: Callable[..., Any], spec: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Call an app with a resource specification, and remember which executor has the task of that name."""
        future = app(*args, parsl_resource_specification=spec, **kwargs)
        if "name" in spec:
            self._where[spec["name"]] = future.task_record["executor"]
        return future

    def note_progress(self, job: str, step: int) -> None:
        """Remember how far a job came, for an outcome that does not say."""
        self._last_step[job] = step

    # ------------------------------------------------------------ jobs

    def take_job(self, task: Result, spec: dict[str, Any]) -> None:
        """Start an MDJob; its outcome is sent when it has ended.

        Raises:
            BadInput: nothing here can run it.
        """
        task.deserialize()
        job = task.args[0]
        task.keep_inputs, task.inputs = False, ((), {})
        if not self._labels:
            raise BadInput("config.executors", None, "no executor has slots", "Add a SlotExecutor.")
        if self.campaign_dir is None:
            raise BadInput("campaign_dir", None, "no campaign directory is known", "Give it to the task server.")
        task.mark_start_task_submission()  # type: ignore[no-untyped-call]
        future = self.launch(partial(self._run, job, self.campaign_dir), spec)
        future.add_done_callback(lambda done: self._job_ended(done, task, spec["name"]))

    def _job_ended(self, future: Future[Any], task: Result, name: str) -> None:
        outcome, error = outcome_of(future, self._last_step.pop(name, 0))
        self._answer(task, outcome.as_dict(), outcome.kind in ("done", "stopped"), error)

    def interrupt(self, task: Result, reason: str) -> None:
        """Answer for a job that has not ended when everything else has."""
        name = (task.task_info or {}).get("mdcampaign", {}).get("name", "")
        task.set_result(interrupted(self._last_step.get(name, 0), reason).as_dict())
        task.success = False
        task.serialize()

    # ------------------------------------------------------------ verbs

    def take_verb(self, task: Result) -> None:
        """Pass a verb on behind the tasks that were submitted before it; the acknowledgement is sent when it comes."""
        task.deserialize()
        inputs: Any = task.inputs
        (verb, job), payload = inputs
        task.keep_inputs, task.inputs = False, ((), {})
        parsl.dfk()._task_launch_pool.submit(self._pass_verb, task, verb, job, payload)

    def _pass_verb(self, task: Result, verb: str, job: str, payload: dict[str, Any]) -> None:
        asked: Future[dict[str, Any]]
        try:
            if verb not in VERBS:
                mend = f"{nearest(verb, VERBS)}Verbs: {', '.join(VERBS)}."
                raise BadInput("verb", verb, "there is no such verb", mend)
            label = self._where.get(job) or next(iter(self._labels), None)
            if label is None:
                raise BadInput("config.executors", None, "no executor has slots", "Add a SlotExecutor.")
            executor: Any = parsl.dfk().executors[label]
            asked = executor.control(verb, job, **payload)
        except Exception as exc:
            asked = Future()
            asked.set_exception(exc)
        asked.add_done_callback(partial(self._acknowledge, task))

    def _acknowledge(self, task: Result, asked: Future[dict[str, Any]]) -> None:
        exc = asked.exception()
        ack = asked.result() if exc is None else {"ok": False, "state": "unknown", "message": str(exc)}
        self._answer(task, ack, success=True)

    # ------------------------------------------------------------ answers

    def _answer(self, task: Result, value: Any, success: bool, error: BaseException | None = None) -> None:
        task.set_result(value)
        task.success = success
        if error is not None:
            task.failure_info = FailureInformation.from_exception(error)
        task.mark_task_received()  # type: ignore[no-untyped-call]
        task.serialize()
        try:
            self._queues.send_result(task)
        except ConnectionError:
            logger.warning("the answer to %s %s could not be sent", task.method, task.task_id)
