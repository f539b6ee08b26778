"""The state of the scheduler, and the moves between its parts that keep them in agreement."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

from mdcampaign.errors import InvariantBroken
from mdcampaign.scheduling.backlog import Backlog
from mdcampaign.scheduling.device import Attempt, Device, Hold
from mdcampaign.scheduling.fleet import Fleet
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.preemption import Preemption
from mdcampaign.scheduling.queue import ReadyQueue
from mdcampaign.scheduling.request import Request

Rule = Literal["rank", "tail"]


@dataclass(frozen=True)
class Place:
    """Start this job in these slots of this device, now. `rule` says what let it start: its rank or the tail rule."""

    request: Request
    node: str
    device: str
    index: tuple[int, ...]
    rule: Rule = "rank"


@dataclass(frozen=True, order=True)
class Wait:
    """How long a job waited for its first start, and its effective priority at that moment."""

    wait_s: float
    effective_priority: float
    id: int
    name: str
    priority: float


class Books:
    """Who waits, who runs where, and what is held for whom. Anybody may read; only the scheduler writes."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queue = ReadyQueue()
        self.fleet = Fleet()
        self.backlog = Backlog()
        self.preemption = Preemption(policy, self.fleet)
        self.attempts: dict[int, Attempt] = {}
        self.asked: dict[int, Hold] = {}  # shares for which others were told to yield, by owner
        self.hold: Hold | None = None  # the share of the first job in rank order that fits nowhere
        self.passed_over: tuple[int, int] | None = None  # the head, and the job that the tail rule let start before it
        self.top_waits: list[Wait] = []  # the three longest waits for a first start, longest first
        self._never_started: set[int] = set()
        self._submitted = self._gone = 0

    # Moves

    def _enter(self, request: Request) -> None:
        """A job that was never here begins to wait."""
        if (state := self.state(request.id)) is not None:
            raise InvariantBroken(f"{request} was submitted, but a job with its id is {state}")
        self._submitted += 1
        self._never_started.add(request.id)
        self._enqueue(request)

    def _erase(self, id: int) -> None:
        """A waiting job is gone."""
        self._release(id)
        self._dequeue(id)
        self._never_started.discard(id)
        self.preemption.forget(id)
        self._gone += 1

    def _put(self, request: Request, device: Device, now: float, rule: Rule = "rank") -> Place:
        """Move a job from the queue to a device."""
        self._release(request.id)
        self._dequeue(request.id)
        ends = now + request.expected_s if request.expected_s is not None else math.inf
        attempt = Attempt(request, self.policy.key(request), device, device.take(request), now, ends)
        self.attempts[request.id] = attempt
        self.fleet.start(attempt)
        if request.id in self._never_started:
            self._never_started.discard(request.id)
            wait_s, effective = now - request.submitted, self.policy.effective_priority(request, now)
            wait = Wait(wait_s, effective, request.id, request.name, request.priority)
            self.top_waits = heapq.nlargest(3, [*self.top_waits, wait])
        return Place(request, device.node, device.spec.id, attempt.index, rule)

    def _leave(self, id: int, *, waits_again: bool) -> Attempt:
        """Take a running job out of its slots."""
        attempt = self.attempts.pop(id, None)
        if attempt is None:
            raise InvariantBroken(f"job {id} was to leave its slots, but it is {self.state(id) or 'not known'}")
        self.fleet.end(attempt)
        self.preemption.ended(attempt, waits_again=waits_again)
        self._gone += not waits_again
        return attempt

    def _enqueue(self, request: Request) -> None:
        kinds, least = self.fleet.fitting(request)
        self.queue.add(request, self.policy.rank(request), kinds, least, promised=request.id in self.asked)
        self.backlog.add(request)

    def _dequeue(self, id: int) -> Request:
        request = self.queue.remove(id)
        self.backlog.remove(request)
        return request

    def _requeue_in_lane(self, id: int) -> None:
        """Put a waiting job into the lane where it belongs now."""
        self._enqueue(self._dequeue(id))

    def _keep(self, hold: Hold) -> None:
        """Hold a share of a device; a job for which others were told to yield moves to the lane of such jobs."""
        self.fleet.hold(hold)
        if hold.asked:
            self.asked[hold.owner] = hold
            self._requeue_in_lane(hold.owner)
        else:
            self.hold = hold

    def _release(self, id: int) -> None:
        """Give back what is held for the job, if anything."""
        hold = self.hold_of(id)
        if hold is None:
            return
        self.fleet.release(hold)
        if hold.asked:
            del self.asked[id]
            self._requeue_in_lane(id)
        else:
            self.hold = None

    # Questions

    def hold_of(self, id: int) -> Hold | None:
        """Return the share that is held for a waiting job, or None."""
        return self.hold if self.hold and self.hold.owner == id else self.asked.get(id)

    @property
    def waiting(self) -> int:
        """How many jobs wait."""
        return len(self.queue)

    @property
    def running(self) -> int:
        """How many jobs run, those whose node was lost included."""
        return len(self.attempts)

    def waiting_ids(self) -> list[int]:
        """Return the waiting jobs in the order of their rank. Costs as much as there are."""
        return sorted(self.queue.ids(), key=lambda id: self.policy.rank(self.queue[id]))

    def state(self, id: int) -> Literal["waiting", "running"] | None:
        """Whether the job waits or runs; None if it is gone or was never here."""
        return "waiting" if id in self.queue else "running" if id in self.attempts else None

    def request(self, id: int) -> Request:
        """Return a waiting or running job as it is now. Raises KeyError if there is none."""
        if id in self.attempts:
            return self.attempts[id].request
        return self.queue[id]

    def effective_priority(self, id: int, now: float) -> float:
        """The job's priority with its age. Raises KeyError if it neither waits nor runs."""
        return self.policy.effective_priority(self.request(id), now)

    @property
    def tail_problem(self) -> str:
        """Why the tail rule does not act, or "" if it is on."""
        return self.backlog.problem() if self.policy.tail else "the policy switches it off"

    def can_ever_fit(self, request: Request) -> str:
        """Say in a sentence why no device seen or declared could ever hold the job, or ""."""
        reasons = [kind.spec.refusal(request) for kind in self.fleet.kinds.values()]
        if not reasons or not all(reasons):
            return ""
        return f"{request} can never start: {'; elsewhere '.join(dict.fromkeys(reasons))}"

    def check(self) -> None:
        """Raise InvariantBroken unless all books balance. Costs as much as there is: for tests."""
        self.fleet.check()
        self.queue.check()
        self.backlog.check([self.queue[id] for id in self.queue.ids()])
        if self.waiting + self.running + self._gone != self._submitted:
            raise InvariantBroken(f"{self._submitted} submitted is not {self.waiting} + {self.running} + {self._gone}")
        if both := [id for id in self.attempts if id in self.queue]:
            raise InvariantBroken(f"jobs {both} wait and run")
        placed = {id: attempt for device in self.fleet.devices() for id, attempt in device.attempts.items()}
        if placed != {id: attempt for id, attempt in self.attempts.items() if attempt.device is not None}:
            raise InvariantBroken("the jobs in the books of the devices are not those that run")
        self._check_holds()

    def _check_holds(self) -> None:
        holds = [*self.asked.values(), *([self.hold] if self.hold else [])]
        on_devices = [hold for device in self.fleet.devices() for hold in device.holds.values()]
        if sorted(id(hold) for hold in holds) != sorted(id(hold) for hold in on_devices):
            raise InvariantBroken("the shares held on devices are not those promised to jobs")
        for hold in holds:
            request = self.queue.get(hold.owner)
            if request is None or self.policy.rank(request) != hold.rank:
                raise InvariantBroken(f"a share of {hold.device} is held for job {hold.owner}, which does not wait so")
        for id_ in self.queue.ids():
            if self.queue.lane_of(id_).promised != (id_ in self.asked):
                raise InvariantBroken(f"job {id_} is in the wrong lane for what it was promised")
