"""The Thinker of a campaign: submits MDJobs, sees every iteration, and changes its mind about running jobs.

A Colmena Thinker in all else: `@agent`, `@result_processor`, `@task_submitter`, `@event_responder` and
`queues.send_inputs` work as they do there. For the decorators `@on_progress` and `@on_result` see
`mdcampaign.steering.handlers`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, overload

from mdcampaign.errors import BadInput, BadJob, NameTaken, TaskServerLost
from mdcampaign.jobs import MDJob
from mdcampaign.steering.handlers import on_progress, on_result
from mdcampaign.steering.listening import Ack, ListeningThinker
from mdcampaign.steering.queues import ACKS, CONTROL, RESULTS, RUN

__all__ = ["Ack", "CampaignThinker", "on_progress", "on_result"]


class CampaignThinker(ListeningThinker):
    """Base class of a campaign's Thinker.

    Submit from an agent that runs at the start, or from any handler::

        class Ensemble(CampaignThinker):
            @agent(startup=True)
            def begin(self):
                self.submit([MDJob(name=f"r{i}", engine=..., steps=100_000, replica=i) for i in range(24)])

            @on_progress
            def look(self, job, progress, info):
                if progress.observables["phi"] > 0:
                    self.stop(job)

    Handlers of progress run in one thread and handlers of results in another, each in order. A slow handler never
    slows a simulation: of each job the newest report waits, and `info.skipped` counts those that it replaced. The
    last report of a job may be delivered after its result. A handler that raises ends the campaign: its traceback is
    shown, running jobs save their state, and the exit status is not 0.

    The campaign is over when no job is active, no starting agent runs, and `finished()` says so.

    Attributes:
        jobs: every job submitted, by name ("group/name").
        outcomes: how each job ended, by name.
        reports: the newest progress of each job, by name.
        campaign_dir: the campaign's directory, where inputs that the Thinker makes may lie; set before it starts.
        failures: what went wrong with agents, handlers and the task server: pairs of a name and an exception.
    """

    # ------------------------------------------------------------ what a campaign does

    @overload
    def submit(self, job: MDJob) -> str: ...
    @overload
    def submit(self, job: Iterable[MDJob]) -> list[str]: ...
    def submit(self, job: MDJob | Iterable[MDJob]) -> str | list[str]:
        """Submit a job, or several at once: all or, when one of them is refused, none.

        A job that has ended may be submitted again, for example with more steps; it goes on where it was. Nothing is
        sent any more once the campaign is ending.

        Returns:
            The name of the job ("group/name"), or the names.

        Raises:
            BadJob: not an MDJob, or a job that is active already.
            NameTaken: another simulation has this name.
            TaskServerLost: nobody is there to run it.
        """
        several = not isinstance(job, MDJob) and isinstance(job, Iterable)
        jobs: Any = list(job) if several else [job]
        with self._books:
            specs = self._checked(jobs)
            if self.done.is_set():
                self.logger.warning("not submitted, as the campaign is ending: %s", ", ".join(specs))
            else:
                for (name, spec), accepted in zip(specs.items(), jobs):
                    self._send_job(name, spec, accepted)
        return list(specs) if several else next(iter(specs))

    def stop(self, job: MDJob | str) -> Future[Ack]:
        """End a job at its next report and keep its result; one that waits ends at once."""
        return self._verb("stop", job)

    def cancel(self, job: MDJob | str) -> Future[Ack]:
        """End a job now; it is never started again."""
        return self._verb("cancel", job)

    def yield_now(self, job: MDJob | str) -> Future[Ack]:
        """Have a job save its state at its next report and go back to the queue."""
        return self._verb("yield", job)

    def extend(self, job: MDJob | str, target_step: int) -> Future[Ack]:
        """Give a job a new target, counted in steps from its start.

        Raises:
            BadInput: `target_step` is not a whole number of at least 1.
        """
        if isinstance(target_step, bool) or not isinstance(target_step, int) or target_step < 1:
            raise BadInput("target_step", target_step, "must be a whole number of at least 1")
        return self._verb("extend", job, target_step=target_step)

    def rerank(self, job: MDJob | str, priority: float) -> Future[Ack]:
        """Give a job another priority; larger is more urgent.

        Raises:
            BadInput: `priority` is not a finite number.
        """
        if isinstance(priority, bool) or not isinstance(priority, int | float) or not math.isfinite(priority):
            raise BadInput("priority", priority, "must be a finite number")
        return self._verb("rerank", job, priority=float(priority))

    def explain(self, job: MDJob | str) -> Future[Ack]:
        """Ask why a job does not run; the answer is the `message` of the acknowledgement."""
        return self._verb("explain", job)

    def findings(self) -> dict[str, Any]:
        """Return what the campaign found, by name, for the summary; override. Values are plain JSON values."""
        return {}

    # ------------------------------------------------------------ submitting

    def _checked(self, jobs: list[MDJob]) -> dict[str, dict[str, Any]]:
        """Return the resource specifications by name, or raise for the first job that cannot be submitted."""
        specs: dict[str, dict[str, Any]] = {}
        new: dict[str, MDJob] = {}
        for job in jobs:
            if not isinstance(job, MDJob):
                mend = "Make it with MDJob(name=..., engine=..., steps=...)."
                raise BadJob("job", job, "only an MDJob can be submitted", mend)
            spec = job.resource_specification()
            name = spec["name"]
            old = new.get(name) or self.jobs.get(name)
            if old is not None and old.identity != job.identity:
                raise NameTaken(f"{name}: another simulation has this name; give this job another one")
            if name in new or name in self._active:
                mend = "Use extend() to make it longer, or give this job another name."
                raise BadJob("name", name, "this job is active already", mend)
            specs[name], new[name] = spec, job
        return specs

    def _send_job(self, name: str, spec: dict[str, Any], job: MDJob) -> None:
        self.queues.send_inputs(
            job.model_dump(mode="json"), method=RUN, topic=RESULTS, keep_inputs=False, task_info={"mdcampaign": spec}
        )
        self.jobs[name] = job
        self.outcomes.pop(name, None)
        self._active.add(name)
        self._last_activity = time.monotonic()

    # ------------------------------------------------------------ verbs

    def _verb(self, verb: str, job: MDJob | str, **payload: Any) -> Future[Ack]:
        """Send a verb; the future is there at once, its result when the executor has answered."""
        name = job if isinstance(job, str) else f"{job.group}/{job.name}"
        name = name if "/" in name else f"default/{name}"
        ack: Future[Ack] = Future()
        with self._books:
            if self._acks_closed:
                ack.set_result(Ack(False, "unknown", "the campaign has ended"))
                return ack
            try:
                sent = self.queues.send_inputs(
                    verb, name, method=CONTROL, topic=ACKS, keep_inputs=False, input_kwargs=payload
                )
            except TaskServerLost as exc:
                ack.set_result(Ack(False, "unknown", str(exc)))
            else:
                self._acks[sent] = ack
        return ack
