"""The ready queue: one heap for each group of jobs with like needs, so that a pass looks at heads only."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from typing import Any

from mdcampaign.errors import InvariantBroken
from mdcampaign.scheduling.policy import Rank
from mdcampaign.scheduling.request import Request, Shape, bucket_floor

Entry = tuple[Any, ...]
"""A sort key whose last element is the item that it stands for."""


NOBODY: tuple[float, ...] = (math.inf, math.inf, -1)
"""Ranks after every job; the head of an empty lane."""


class LazyHeap:
    """A heap in which an item's entry can be replaced or discarded in O(log n).

    Dead entries stay until they reach the top, or until they outnumber the live ones.
    """

    __slots__ = ("_heap", "_live")

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._live: dict[Any, Entry] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def entries(self) -> Iterable[Entry]:
        """The live entries, in no particular order."""
        return self._live.values()

    def entry(self, item: object) -> Entry | None:
        """Return the item's live entry."""
        return self._live.get(item)

    def push(self, entry: Entry) -> None:
        """Add the item `entry[-1]`, or give it this entry in place of its old one."""
        if self._live.get(entry[-1]) == entry:
            return
        self._live[entry[-1]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)

    def discard(self, item: object) -> None:
        """Forget the item, if it is here."""
        self._live.pop(item, None)

    def first(self) -> Entry | None:
        """Return the smallest live entry, or None."""
        heap, live = self._heap, self._live
        while heap:
            if live.get(heap[0][-1]) is heap[0]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def smallest(self, n: int) -> list[Entry]:
        """Return up to `n` of the smallest live entries, in order."""
        found: list[Entry] = []
        while len(found) < n and (entry := self.first()) is not None:
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return found


class Lane:
    """Waiting jobs that fit the same devices in the same way; `head` is the rank of the first of them.

    `kinds` is a bit mask of the kinds of device that any of them can run on, `least` the fewest slots that one takes
    there. `promised` jobs already have a share of a device held for them.
    """

    __slots__ = ("_number", "_ranks", "floor_mb", "head", "kinds", "least", "promised")

    def __init__(self, number: int, shape: Shape, kinds: int, least: int, promised: bool) -> None:
        self._number = number
        self.kinds, self.least, self.promised = kinds, least, promised
        self.floor_mb = bucket_floor(shape.memory_mb)
        self.head: tuple[float, ...] = NOBODY
        self._ranks = LazyHeap()

    def add(self, rank: Rank) -> None:
        self._ranks.push(rank)
        if rank < self.head:
            self.head = rank

    def remove(self, id: int) -> None:
        self._ranks.discard(id)
        if self.head[-1] == id:
            self.head = self._ranks.first() or NOBODY

    def entry(self) -> Entry:
        """The lane as an entry of its row; by the number no two lanes compare equal, whatever job heads them."""
        return (*self.head, self._number, self)

    def __len__(self) -> int:
        return len(self._ranks)


LaneKey = tuple[Shape, int, bool]


class ReadyQueue:
    """Jobs that wait for a slot. Adding and removing one costs O(log n).

    `rows` order the same lanes by their heads, apart by `kinds` and `least`: what a pass can skip together.
    """

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self.rows: dict[tuple[int, int], LazyHeap] = {}
        self._jobs: dict[int, tuple[Request, LaneKey]] = {}
        self._made = 0

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, id: object) -> bool:
        return id in self._jobs

    def ids(self) -> list[int]:
        """The ids of all waiting jobs, in no particular order."""
        return list(self._jobs)

    def get(self, id: int) -> Request | None:
        """Return the waiting job, or None."""
        job = self._jobs.get(id)
        return job[0] if job else None

    def __getitem__(self, id: int) -> Request:
        if id not in self._jobs:
            raise KeyError(f"job {id} does not wait")
        return self._jobs[id][0]

    def lane_of(self, id: int) -> Lane:
        """Return the lane of a waiting job."""
        return self.lanes[self._jobs[id][1]]

    def add(self, request: Request, rank: Rank, kinds: int, least: int, promised: bool = False) -> None:
        """Line the job up with others that need the same and fit the same `kinds` of device."""
        key = (request.shape, kinds, promised)
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self._made, request.shape, kinds, least, promised)
            self._made += 1
        lane.add(rank)
        if lane.head is rank:
            self.rows.setdefault((kinds, least), LazyHeap()).push(lane.entry())
        self._jobs[request.id] = (request, key)

    def remove(self, id: int) -> Request:
        """Take a waiting job out."""
        request, key = self._jobs.pop(id)
        lane = self.lanes[key]
        head = lane.head
        lane.remove(id)
        if lane.head is not head:
            self._move(key, lane)
        return request

    def _move(self, key: LaneKey, lane: Lane) -> None:
        """Enter a lane's new head into its row; drop an empty lane, and an empty row."""
        row = self.rows[lane.kinds, lane.least]
        if lane.head is not NOBODY:
            row.push(lane.entry())
            return
        del self.lanes[key]
        row.discard(lane)
        if not row:
            del self.rows[lane.kinds, lane.least]

    def check(self) -> None:
        """Raise InvariantBroken unless every job is in exactly one lane and every head is the best of its lane."""
        if sum(len(lane) for lane in self.lanes.values()) != len(self._jobs):
            raise InvariantBroken("the lanes of the queue do not hold the jobs that wait")
        in_rows = sorted(entry[:3] for row in self.rows.values() for entry in row.entries())
        if in_rows != sorted(lane.head for lane in self.lanes.values()):
            raise InvariantBroken("the rows of the queue do not hold the heads of its lanes")
        for id, (request, key) in self._jobs.items():
            lane = self.lanes[key]
            rank = lane._ranks.entry(id)
            if rank is None or key[0] != request.shape:
                raise InvariantBroken(f"{request} waits, but not in the lane of its shape")
            if rank < lane.head:
                raise InvariantBroken(f"{request} ranks before the head of its lane")


class Line:
    """The heads of some lanes in order of rank, for one pass; a lane whose head is refused leaves the line."""

    def __init__(self, queue: ReadyQueue, entries: list[Entry]) -> None:
        self._queue, self._heap = queue, entries
        heapq.heapify(entries)

    def first(self) -> Request | None:
        """Return the best job in line, or None."""
        while self._heap:
            *_, id, _, lane = self._heap[0]
            if lane.head[-1] == id:
                return self._queue[id]
            heapq.heappop(self._heap)
            if lane.head is not NOBODY:
                heapq.heappush(self._heap, lane.entry())
        return None

    def refuse(self) -> None:
        """Send the lane of the first job away until the next pass: nobody in it fits."""
        heapq.heappop(self._heap)
