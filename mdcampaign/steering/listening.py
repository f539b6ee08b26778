"""What a Thinker hears: acknowledgements, events, progress and results, each in an agent of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from colmena.exceptions import TimeoutException
from colmena.models import Result
from colmena.thinker import agent

from mdcampaign.errors import BadInput, BrokerLost, TaskServerLost
from mdcampaign.jobs import MDJob, Outcome, Progress
from mdcampaign.steering.agents import AgentThinker
from mdcampaign.steering.handlers import Handler, ReportInfo, handlers_of
from mdcampaign.steering.mailbox import Item, Mailbox
from mdcampaign.steering.queues import ACKS, RESULTS, CampaignQueues

_TICK_S = 0.25  # how often an agent of ours looks whether the campaign is over
_QUIET_S = 0.5  # how long nothing must have come in before no active job means that the campaign is over
_PROGRESS = {field.name for field in fields(Progress)}
_OUTCOME = {field.name for field in fields(Outcome)}


def _agent(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Mark an agent of ours; it starts with the Thinker, and its end is not the campaign's."""
    marked: Callable[[Any], None] = agent(method, startup=True)
    return marked


@dataclass(frozen=True)
class Ack:
    """What became of a verb: taken or not, the state of the job then, and words.

    `state` is "waiting", "running", "ended" or "unknown". A verb that is taken has its effect at the job's next
    report. The same verb twice is no error; where the job is past it, `ok` is False and `message` says why.
    """

    ok: bool
    state: str
    message: str = ""


class ListeningThinker(AgentThinker):
    """Keeps the books of jobs and verbs, calls the handlers, and ends the campaign when nothing is left.

    `CampaignThinker` describes its attributes.
    """

    queues: CampaignQueues

    def __init__(self, queue: CampaignQueues, *args: Any, **kwargs: Any) -> None:
        if not isinstance(queue, CampaignQueues):
            mend = "Use PipeQueues or RedisQueues of mdcampaign.steering.queues."
            raise BadInput("queue", type(queue).__name__, "cannot carry verbs and progress", mend)
        super().__init__(queue, *args, **kwargs)
        self.campaign_dir = Path.cwd()
        self.jobs: dict[str, MDJob] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.reports: dict[str, Progress] = {}
        self._books = threading.RLock()
        self._active: set[str] = set()
        self._acks: dict[str, Future[Ack]] = {}
        self._acks_closed = False
        self._waiting_reports = Mailbox()
        self._observers: list[Callable[[dict[str, Any]], None]] = []
        self._handler_failed = False
        self._server_traceback = ""
        self._last_activity = time.monotonic()
        self._on_progress = handlers_of(type(self), "progress")
        self._on_result = handlers_of(type(self), "result")

    @property
    def active_jobs(self) -> list[str]:
        """The names of the jobs that have been submitted and have not ended."""
        with self._books:
            return sorted(self._active)

    def finished(self) -> bool:
        """Tell whether the campaign is over, when no job is active; override to go on in spite of that.

        The default waits for the tasks of other methods too. Called every quarter of a second or so.
        """
        return self.queues.active_count == 0

    def observe(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Have every event of the executor given to `callback`, for a display; it must return at once."""
        self._observers.append(callback)

    # ------------------------------------------------------------ acknowledgements

    @_agent
    def _take_acks(self) -> None:
        while (result := self._next(ACKS)) is not None:
            with self._books:
                ack = self._acks.pop(result.task_id, None)
            if ack is None:
                continue
            if isinstance(result.value, dict):
                ack.set_result(Ack(**result.value))
            else:
                ack.set_result(Ack(False, "unknown", _why_failed(result)))
        with self._books:
            self._acks_closed = True
            for ack in self._acks.values():
                ack.set_result(Ack(False, "unknown", "the campaign ended before there was an answer"))
            self._acks.clear()

    # ------------------------------------------------------------ events and progress

    @_agent
    def _take_events(self) -> None:
        while not self._over():
            try:
                event = self.queues.get_event(_TICK_S)
            except TimeoutException:
                continue
            except TaskServerLost:
                return
            if event.get("event") == "progress":
                self._last_activity = time.monotonic()
                self.reports[event["job"]] = self._progress(event)
                if self._on_progress:
                    self._waiting_reports.put(event, event["job"], event.get("skipped", 0))
            elif event.get("event") == "server_failed":
                self._server_traceback = event["traceback"]
            elif event.get("event") == "executor_failed":
                self.fail("executor", BrokerLost(event["text"]))
            for observer in self._observers:
                observer(event)

    @_agent
    def _deliver_progress(self) -> None:
        while not (self._over() or self.queues.lost) or self._waiting_reports.unfinished:
            if (item := self._waiting_reports.get(_TICK_S)) is None:
                continue
            try:
                self._call_progress(item)
            finally:
                self._last_activity = time.monotonic()
                self._waiting_reports.finish()

    def _call_progress(self, item: Item) -> None:
        event = item.message
        job = event["job"]
        info = ReportInfo(event.get("attempt", 0), event.get("seq", 0), item.skipped, event.get("t", 0.0))
        self._call(self._on_progress, job, item.skipped + 1, self._progress(event), info)

    def _call(self, handlers: list[Handler], job: str, reports: int, *args: Any) -> None:
        """Call the handlers that want it; when one fails, no handler is called any more."""
        for handler in handlers:
            if self._handler_failed or not handler.wants(job, reports):
                continue
            try:
                getattr(self, handler.name)(job, *args)
            except Exception as exc:
                self._handler_failed = True
                self.fail(handler.name, exc)

    @staticmethod
    def _progress(event: dict[str, Any]) -> Progress:
        return Progress(**{key: value for key, value in event["progress"].items() if key in _PROGRESS})

    # ------------------------------------------------------------ results

    @_agent
    def _deliver_results(self) -> None:
        while not self._over():
            try:
                result = self.queues.get_result(RESULTS, timeout=_TICK_S)
            except TimeoutException:
                self._end_if_finished()
                continue
            except TaskServerLost:
                return
            self._take_result(result)
            self._last_activity = time.monotonic()

    def _take_result(self, result: Result) -> None:
        """Book how a job ended and call the handlers; not for jobs that the end of the campaign interrupts."""
        name = (result.task_info or {})["mdcampaign"]["name"]
        outcome = _outcome_of(result)
        with self._books:
            self.outcomes[name] = outcome
            self._active.discard(name)
        if outcome.kind == "interrupted" and self.done.is_set():
            return
        self._call(self._on_result, name, 1, outcome, result)

    def _end_if_finished(self) -> None:
        with self._books:
            begun = bool(self.jobs) or self.has_starting_agents
            busy = self._active or self._waiting_reports.unfinished or self.starting_agents
            quiet = time.monotonic() - self._last_activity > _QUIET_S
        try:
            if begun and not busy and quiet and not self.done.is_set() and self.finished():
                self.logger.info("all jobs have ended and nothing more is wanted")
                self.done.set()
        except Exception as exc:
            self.fail("finished", exc)

    # ------------------------------------------------------------ the task server

    def watch(self, server: BaseProcess) -> None:
        """Notice when the task server ends; when it was still needed, that is a failure of the campaign."""
        threading.Thread(target=self._watch, args=(server,), name="watch-task-server", daemon=True).start()

    def _watch(self, server: BaseProcess) -> None:
        while server.is_alive():  # not its sentinel alone: a process that it forked may hold that open
            server.join(_TICK_S)
        if self.done.is_set():
            self.queues.fail(TaskServerLost("the campaign has ended"))
            return
        code = server.exitcode or 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        end = time.monotonic() + 1.0
        while code > 0 and not self._server_traceback and time.monotonic() < end:
            time.sleep(0.05)  # its last words may still be on the way
        error = TaskServerLost(f"the task server {how}\n{self._server_traceback}".rstrip())
        self.queues.fail(error)
        self.fail("task server", error)

    # ------------------------------------------------------------ loops

    def _next(self, topic: str) -> Result | None:
        """Return the next result of a topic; None when there will be none."""
        while not self._over():
            try:
                return self.queues.get_result(topic, timeout=_TICK_S)
            except TimeoutException:
                continue
            except TaskServerLost:
                return None
        return None

    def _over(self) -> bool:
        """Tell whether the campaign is ending and everything asked for has come."""
        return self.done.is_set() and self.submitters_done.is_set() and self.queues.active_count == 0


def _outcome_of(result: Result) -> Outcome:
    if isinstance(result.value, dict):
        return Outcome(**{key: value for key, value in result.value.items() if key in _OUTCOME})
    return Outcome("failed", failure="input", message=_why_failed(result))


def _why_failed(result: Result) -> str:
    """Return the last line of a failed result's traceback: the exception in words."""
    lines = ((result.failure_info and result.failure_info.traceback) or "no reason was given").strip().splitlines()
    return lines[-1]
