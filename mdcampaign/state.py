"""What the log says, folded: the jobs of a campaign, their attempts and where each stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mdcampaign.errors import NameTaken
from mdcampaign.segments import read_events

State = Literal["waiting", "running", "interrupted", "done", "stopped", "failed", "cancelled"]
"""Where a job stands. "interrupted": the campaign ended before the job did; a second run goes on with it."""

ENDED: frozenset[str] = frozenset({"done", "stopped", "failed", "cancelled"})


_FINAL = ("result", "exception", "cancelled")
"""Ways for an attempt to end after which the job waits for no other slot, but for *done*."""


@dataclass
class Attempt:
    """One stay of a job in a slot. Times are Unix seconds; `how` is None while it lasts."""

    number: int
    node: str = ""
    device: str = ""
    index: list[int] = field(default_factory=list)
    placed_s: float = 0.0
    started_s: float | None = None
    ended_s: float | None = None
    how: str | None = None
    step: int = 0
    saved_step: int = 0
    rate_ns_per_day: float | None = None
    message: str = ""
    failure: str | None = None


@dataclass
class JobState:
    """What is known of one job. `job` is "GROUP/NAME"; `wait_s` sums its waits, without one that still lasts."""

    job: str
    identity: str | None = None
    group: str = ""
    state: State = "waiting"
    priority: float = 0.0
    slots: int = 1
    exclusive: bool = False
    memory_mb: int | None = None
    cores: int | None = None
    expected_s: float | None = None
    task: int | None = None
    submitted_s: float = 0.0
    waiting_since_s: float | None = None
    wait_s: float = 0.0
    longest_wait_s: float = 0.0
    step: int = 0
    target_step: int = 0
    saved_step: int = 0
    ns: float = 0.0
    rate_ns_per_day: float | None = None
    observables: dict[str, float] = field(default_factory=dict)
    progress_s: float | None = None
    ended_s: float | None = None
    message: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)
    """The *done* event as it stands in the log, with whatever the executor put there; empty until then."""
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether the job has reached an end that is reported to the user."""
        return self.state in ENDED

    @property
    def next_attempt(self) -> int:
        """The number that the next attempt takes; none is ever used twice, over all runs of the campaign."""
        return max((attempt.number for attempt in self.attempts), default=0) + 1

    def attempt(self, number: int) -> Attempt | None:
        """Return an attempt by its number."""
        return next((attempt for attempt in reversed(self.attempts) if attempt.number == number), None)

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one event of this job; kinds and fields that are not known are skipped."""
        if handler := _HANDLERS.get(event["event"]):
            handler(self, event)

    def campaign_over(self, at_s: float) -> None:
        """Close what a campaign left open when it ended or was killed: a job without an end is interrupted."""
        if self.ended:
            return
        for attempt in self.attempts:
            if attempt.how is None:
                attempt.how, attempt.message, attempt.ended_s = "lost", "the campaign ended", self.progress_s or at_s
        self._stop_waiting(at_s)
        self.state = "interrupted"

    def _submitted(self, event: dict[str, Any]) -> None:
        for name in ("identity", "group", "priority", "slots", "exclusive", "memory_mb", "cores", "expected_s", "task"):
            if name in event:
                setattr(self, name, event[name])
        self.target_step = event.get("target_step", self.target_step)
        self.state, self.ended_s, self.message, self.outcome = "waiting", None, "", {}
        self.submitted_s = self.waiting_since_s = event["t"]

    def _placed(self, event: dict[str, Any]) -> None:
        self._stop_waiting(event["t"])
        self.state = "running"
        number = event["attempt"]  # seen before only where a plain task of a later run has the same name
        self.attempts = [attempt for attempt in self.attempts if attempt.number != number]
        self.attempts.append(Attempt(number, event["node"], event["device"], list(event["index"]), event["t"]))

    def _started(self, event: dict[str, Any]) -> None:
        if attempt := self.attempt(event["attempt"]):
            attempt.started_s = event["t"]

    def _progress(self, event: dict[str, Any]) -> None:
        attempt = self.attempt(event["attempt"])
        if attempt is None or attempt.how is not None:  # late news of an attempt that is over
            return
        for record in (self, attempt):
            record.step, record.saved_step = event["step"], event["saved_step"]
            record.rate_ns_per_day = event.get("rate_ns_per_day")
        self.target_step, self.progress_s = event["target_step"], event["t"]
        self.observables = event.get("observables") or {}

    def _attempt_ended(self, event: dict[str, Any]) -> None:
        attempt = self.attempt(event["attempt"])
        if attempt is None or attempt.how is not None:
            return
        outcome = event.get("outcome")
        said = outcome if isinstance(outcome, dict) else event
        attempt.how, attempt.ended_s = event["how"], event["t"]
        attempt.message, attempt.failure = said.get("message") or "", said.get("failure")
        attempt.step = said.get("step") or attempt.step
        self.step = attempt.step or self.step
        if self.state == "running" and attempt.how not in _FINAL:
            self.state, self.waiting_since_s = "waiting", event["t"]

    def _done(self, event: dict[str, Any]) -> None:
        self._stop_waiting(event["t"])
        self.state, self.outcome = event["outcome"], {k: v for k, v in event.items() if k not in ("event", "job")}
        self.step, self.ns = event.get("step") or self.step, event.get("ns") or self.ns
        self.message = event.get("message") or ""
        self.target_step = event.get("target_step") or self.target_step
        self.ended_s = event["t"]
        for attempt in self.attempts:
            if attempt.how is None:
                attempt.how, attempt.ended_s = event["outcome"], event["t"]

    def _reranked(self, event: dict[str, Any]) -> None:
        self.priority = event["priority"]

    def _stop_waiting(self, at_s: float) -> None:
        if self.waiting_since_s is not None:
            waited_s = max(0.0, at_s - self.waiting_since_s)
            self.wait_s += waited_s
            self.longest_wait_s = max(self.longest_wait_s, waited_s)
            self.waiting_since_s = None


_HANDLERS = {
    "submitted": JobState._submitted,
    "placed": JobState._placed,
    "started": JobState._started,
    "progress": JobState._progress,
    "ended": JobState._attempt_ended,
    "done": JobState._done,
    "reranked": JobState._reranked,
}


class CampaignState:
    """The jobs of a campaign by "GROUP/NAME", folded from its log."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobState] = {}

    @classmethod
    def replay(cls, campaign_dir: Path) -> CampaignState:
        """Return the state that the log of a campaign tells; raises LedgerCorrupt."""
        state = cls()
        state.extend(read_events(campaign_dir))
        return state

    def extend(self, events: Iterable[dict[str, Any]]) -> None:
        """Take in events in the order of the log."""
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        if event["event"] in ("campaign_started", "campaign_ended"):
            for state in self.unfinished():
                state.campaign_over(event["t"])
        elif (job := event.get("job")) is not None and event["event"] in _HANDLERS:
            self.job(job).apply(event)

    def job(self, job: str) -> JobState:
        """Return the state of a job, new if it has none."""
        if (state := self.jobs.get(job)) is None:
            state = self.jobs[job] = JobState(job)
        return state

    def unfinished(self) -> Iterator[JobState]:
        """Return the jobs that have no end yet."""
        return (state for state in self.jobs.values() if not state.ended)

    def finished(self, group: str, name: str, identity: str, steps: int) -> JobState | None:
        """Return the job if it must not be run (again): done to this length, stopped by a decision, or cancelled.

        A done or stopped job that is now asked for more steps than it then was goes on, and a failed one is tried
        again: a second run is the way to do that.

        Raises:
            NameTaken: the campaign has a job of this group and name with other content.
        """
        state = self.jobs.get(f"{group}/{name}")
        if state is None:
            return None
        if state.identity not in (None, identity):
            raise NameTaken(
                f"job {group}/{name} exists in this campaign with other content "
                f"(identity {str(state.identity)[:12]} there, {identity[:12]} here); give the new one another name"
            )
        over = state.state == "cancelled" or (
            state.state in ("done", "stopped") and steps <= max(state.target_step, state.step)
        )
        return state if over else None
