"""Why a job is not running, in one sentence: the first rule that said no."""

from __future__ import annotations

import math

from mdcampaign.scheduling.books import Books
from mdcampaign.scheduling.device import Attempt, Hold
from mdcampaign.scheduling.request import Request


def explain(books: Books, id: int, now: float) -> str:
    """Say in a sentence why the job is not running, or where it runs and whether it can be made to yield."""
    state = books.state(id)
    if state is None:
        return f"job {id} is not known: it has ended, was cancelled, or was never submitted"
    if state == "running":
        return _running(books, books.attempts[id], now)
    request = books.queue[id]
    return f"{request} waits: {_waiting(books, request, now)}"


def _running(books: Books, attempt: Attempt, now: float) -> str:
    who = str(attempt.request)
    if attempt.device is None:
        return f"{who} has lost its node and will wait again as soon as it is requeued"
    slots = ", ".join(str(slot) for slot in attempt.index)
    where = f"{who} has run for {now - attempt.started:.0f} s in slot {slots} of {attempt.device}"
    if attempt.yields_to is not None:
        return f"{where} and was told to yield to job {attempt.yields_to}"
    refusal = books.preemption.refusal(attempt) if books.preemption.on else ""
    return f"{where}; it cannot be made to yield: {refusal}" if refusal else where


def _waiting(books: Books, request: Request, now: float) -> str:
    if never := books.can_ever_fit(request):
        return never
    kinds = books.fleet.open_kinds(books.queue.lane_of(request.id).kinds)
    if not books.fleet.nodes:
        return "no node has registered yet"
    if not kinds:
        return "no node that takes new jobs now has such a device"
    if hold := books.hold_of(request.id):
        return _held(books, hold, now)
    if books.passed_over and books.passed_over[0] == request.id:
        longest = books.passed_over[1]
        return f"job {longest}, the longest, went first by the tail rule; the next free slot is for this one"
    return f"{_room(books, request)}; {_rank(books, request, now)}"


def _held(books: Books, hold: Hold, now: float) -> str:
    if hold.asked:
        victims = [a.request.id for a in hold.device.attempts.values() if a.yields_to == hold.owner]
        names = ", ".join(str(id) for id in victims)
        return f"{hold.device} is to have room for it as soon as job {names} has yielded"
    until = hold.device.free_at(hold.width)[0] - now
    when = f"in about {max(0.0, until):.0f} s" if until < math.inf else "when what runs there ends"
    free = len(hold.device.free)
    return f"it needs {_slots(hold.width)}; {hold.device} has {free} free, will have enough {when}, and is held for it"


def _room(books: Books, request: Request) -> str:
    if books.fleet.free == 0:
        return f"all {books.fleet.slots} slots are taken or held"
    kinds = books.fleet.open_kinds(books.queue.lane_of(request.id).kinds)
    width = min(kind.spec.width(request) for kind in kinds)
    most = max(kind.room()[0] for kind in kinds)
    if most < width:
        return f"it needs {_slots(width)} and no device that can take it has more than {most} free and unheld"
    if all(kind.find(kind.spec.width(request), request.memory, books.policy.place) is None for kind in kinds):
        return f"it needs {_slots(width)} and {request.memory} MB, and no device has both free and unheld"
    return "there is room for it, and the next pass will start it"


def _rank(books: Books, request: Request, now: float) -> str:
    mine = books.policy.effective_priority(request, now)
    first = int(min(lane.head for lane in books.queue.lanes.values())[-1])
    if first == request.id:
        return f"it is the first of {_others(books)} with an effective priority of {mine:.2f}"
    theirs = books.effective_priority(first, now)
    return f"with an effective priority of {mine:.2f} it comes after job {first} with {theirs:.2f}"


def _others(books: Books) -> str:
    return "1 waiting job" if books.waiting == 1 else f"{books.waiting} waiting jobs"


def _slots(width: int) -> str:
    return "1 slot of a device" if width == 1 else f"{width} slots of one device"
