"""The scheduler: events in, decisions out. It reads no clock, starts nothing and logs nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mdcampaign.scheduling.books import Books, Place, Rule, Wait
from mdcampaign.scheduling.device import Device, DeviceSpec, Hold
from mdcampaign.scheduling.explain import explain
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.queue import Entry, Line
from mdcampaign.scheduling.request import Request

__all__ = ["Decision", "DeviceSpec", "Place", "Policy", "Preempt", "Request", "Rule", "Scheduler", "Wait"]


@dataclass(frozen=True)
class Preempt:
    """Tell the running job `victim` to yield; the slots that it gives back are held for `for_request`."""

    victim: int
    for_request: int


Decision = Place | Preempt


class Scheduler(Books):
    """Says which job starts where, and who must yield.

    Every method takes the time as `now`, in seconds of the clock of `Request.submitted`. A job waits, runs, or is
    gone. What runs on a node that is removed *runs nowhere* until `requeue` or `ended` is called for it. After any
    events call `schedule` once and carry out what it returns: the books already count it as done.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        super().__init__(policy or Policy())
        self._changed = False

    # Nodes

    def declare(self, devices: Sequence[DeviceSpec]) -> None:
        """Say what a node will look like before there is one, so that what can never fit is known from the start."""
        if self.fleet.know(devices):
            for id in self.queue.ids():
                self._requeue_in_lane(id)

    def add_node(self, node: str, devices: Sequence[DeviceSpec], now: float) -> None:
        """A node has registered. Raises BadInput if one of this name is there."""
        self.declare(devices)
        self.fleet.add_node(node, devices)
        self._changed = True

    def drain_node(self, node: str, now: float) -> None:
        """Let what runs on the node go on, and start nothing new there."""
        for device in self.fleet.nodes[node]:
            for owner in list(device.holds):
                self._release(owner)
        self.fleet.close_node(node)
        self._changed = True

    def remove_node(self, node: str, now: float) -> list[int]:
        """The node is lost. Return the jobs that ran there; each must now be requeued or ended."""
        self.drain_node(node, now)
        return [attempt.request.id for attempt in self.fleet.remove_node(node)]

    # Jobs

    def submit(self, request: Request, now: float) -> None:
        """A job begins to wait."""
        self._enter(request)
        self._changed = True

    def cancel_waiting(self, id: int, now: float) -> bool:
        """Forget a waiting job; return False if it does not wait."""
        if id not in self.queue:
            return False
        self._erase(id)
        self._changed = True
        return True

    def rerank(self, id: int, priority: float, now: float) -> bool:
        """Give a waiting or running job another priority; return False if there is no such job."""
        if (attempt := self.attempts.get(id)) is not None:
            attempt.request = replace(attempt.request, priority=priority)
            attempt.key = self.policy.key(attempt.request)
            if attempt.device is not None:
                self.fleet.touch(attempt.device)
        elif id in self.queue:
            reranked = replace(self.queue[id], priority=priority)
            self._release(id)  # what it was promised at its old rank is decided anew
            self._dequeue(id)
            self._enqueue(reranked)
        else:
            return False
        self._changed = True
        return True

    def progress(self, id: int, remaining_s: float | None, now: float) -> None:
        """A running job has reported; None leaves its expected end as it was. Late reports are ignored."""
        attempt = self.attempts.get(id)
        if attempt is None:
            return
        attempt.reported = True
        if remaining_s is not None:
            moved_s = abs(now + remaining_s - attempt.ends)
            attempt.ends = now + remaining_s
            if attempt.device is not None and moved_s > 0.05 * remaining_s:  # else the order hardly changes
                self.fleet.touch(attempt.device)
        self._changed |= self.preemption.consider(attempt, now)

    def requeue(self, id: int, now: float) -> None:
        """A running job was interrupted and waits again, with its age; its expected time is what it last had left."""
        attempt = self._leave(id, waits_again=True)
        request = attempt.request
        if attempt.reported and attempt.ends < math.inf:
            request = replace(request, expected_s=max(0.0, attempt.ends - now))
        self._enqueue(request)
        self._changed = True

    def ended(self, id: int, now: float) -> None:
        """A running job is gone, for whatever reason; its slots are free."""
        self._leave(id, waits_again=False)
        self._changed = True

    # The decision

    def schedule(self, now: float) -> list[Decision]:
        """Return what to do now: jobs to start, and running jobs to tell to yield."""
        self._changed |= self.preemption.grow_up(now, self.attempts)
        decisions: list[Decision] = []
        while self._changed:  # once, and again where a held share was given back on the way
            self._changed = False
            decisions += self._keep_promises(now)
            decisions += self._go_through_the_line(now)
        return decisions

    def _keep_promises(self, now: float) -> Iterator[Place]:
        """Start the jobs for which others have given slots back."""
        while self.fleet.given_back:
            _, device = self.fleet.given_back.popitem()
            for hold in sorted(device.holds.values(), key=lambda hold: hold.rank):
                request = self.queue[hold.owner]
                if hold.asked and device.fits(request, hold.rank):
                    yield self._put(request, device, now)

    def _go_through_the_line(self, now: float) -> Iterator[Decision]:
        """Start whoever fits, in order of rank; make room for whoever does not and may ask for it."""
        line = self._line_up()
        while (request := line.first()) is not None and self._has_a_chance(request):
            if place := self._start_tail(request, now) or self._start(request, now):
                yield place
            elif victims := self._ask(request):
                yield from (Preempt(victim, request.id) for victim in victims)
            else:
                self._hold_for(request)
                line.refuse()

    def _line_up(self) -> Line:
        """Line up the lanes that may have a place now, and the first of the others, which may get a hold."""
        most, memory_mb = self.fleet.room()
        open_kinds = sum(kind.bit for kind in self.fleet.open_kinds())
        chosen: list[Entry] = []
        others: list[Entry] = []
        for (kinds, least), row in self.queue.rows.items():
            first = row.first()
            if first is None or not kinds & open_kinds:
                continue
            limit = self._limit(least)
            if least > most and first[-1].head > limit and not first[-1].promised:
                others.append(first)
                continue
            for entry in row.entries():
                lane = entry[-1]
                if (least <= most and lane.floor_mb <= memory_mb) or lane.head <= limit:
                    chosen.append(entry)
                elif not lane.promised:
                    others.append(entry)
        return Line(self.queue, [*chosen, *([min(others)] if others else [])])

    def _has_a_chance(self, request: Request) -> bool:
        """Whether there is a free slot for this job or a later one, or one may be had without."""
        return self.fleet.free > 0 or self.policy.rank(request) <= self._limit(1)

    def _limit(self, width: int) -> tuple[float, ...]:
        """The last rank that may have `width` slots although none are free: held ones, or by making others yield."""
        held: tuple[float, ...] = self.hold.rank if self.hold and self.hold.device.free else (-math.inf,)
        return max(held, (-self.preemption.least_key(width), math.inf))

    def _start(self, request: Request, now: float) -> Place | None:
        """Start the job if it fits: in the share held for it, in unheld room, or in what is held for a later one."""
        rank, own = self.policy.rank(request), self.hold_of(request.id)
        if own and own.device.fits(request, rank):
            device: Device | None = own.device
        elif device := self._find(request):
            self._changed |= own is not None  # what was held for it elsewhere is free for others
        elif self.hold and rank < self.hold.rank and self.hold.device.fits(request, rank):
            device = self.hold.device
        if device is None:
            return None
        self.passed_over = None
        return self._put(request, device, now)

    def _start_tail(self, head: Request, now: float) -> Place | None:
        """Start the longest waiting job before the head, if the end would else wait for it.

        Never twice in a row, so a job with n jobs before it starts after at most 2 n + 1 others; and never before a
        job that is urgent enough to make the longest one yield.
        """
        longest = self._longest_due()
        if longest is None or longest.id == head.id or self.passed_over:
            return None
        gap = self.policy.preempt_gap
        if gap is not None and self.policy.key(head) - self.policy.key(longest) >= gap:
            return None
        device = self._find(longest)
        if device is None:
            return None
        self.passed_over = (head.id, longest.id)
        return self._put(longest, device, now, rule="tail")

    def _longest_due(self) -> Request | None:
        if not self.policy.tail:
            return None
        id = self.backlog.due(self.fleet.slots, self.fleet.widest, self.policy.tail_fraction)
        return None if id is None else self.queue[id]

    def _find(self, request: Request) -> Device | None:
        if self.fleet.free == 0:
            return None
        return self.fleet.find(request, self.queue.lane_of(request.id).kinds, self.policy.place)

    def _ask(self, request: Request) -> list[int]:
        """Choose the jobs that must yield to this one, if it outranks some by the gap, and hold what they will give."""
        if not self.preemption.on or request.id in self.asked:
            return []
        rank, later = self.policy.rank(request), self.hold
        if later and later.rank >= rank:  # a hold for this job or a later one is no obstacle
            self.fleet.release(later)
        else:
            later = None
        found = self.preemption.victims(request, self.queue.lane_of(request.id).kinds)
        if later and found is None:
            self.fleet.hold(later)
        if found is None:
            return []
        if later:
            self.hold, self._changed = None, True
        device, victims = found
        for attempt in victims:
            attempt.yields_to = request.id
        self._keep(Hold(rank, device, device.spec.width(request), request.memory, asked=True))
        return [attempt.request.id for attempt in victims]

    def _hold_for(self, request: Request) -> None:
        """Hold a share of a device for a job that fits nowhere, unless one is held for a job of better rank."""
        rank = self.policy.rank(request)
        if request.id in self.asked or (self.hold and self.hold.rank <= rank):
            return
        if self.hold:
            self._release(self.hold.owner)
            self._changed = True
        soonest = self.fleet.soonest(request, self.queue.lane_of(request.id).kinds)
        if soonest:
            device = soonest[1]
            self._keep(Hold(rank, device, device.spec.width(request), request.memory, asked=False))

    def explain(self, id: int, now: float) -> str:
        """Say in a sentence why the job is not running, or where it runs."""
        return explain(self, id, now)
