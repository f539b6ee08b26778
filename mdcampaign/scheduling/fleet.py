"""All devices, indexed so that a place is found without looking at each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mdcampaign.errors import BadInput, InvariantBroken
from mdcampaign.scheduling.device import Attempt, Device, DeviceSpec, Hold
from mdcampaign.scheduling.queue import LazyHeap
from mdcampaign.scheduling.request import Request

__all__ = ["DeviceSpec", "Fleet", "Kind"]

KindKey = tuple[int, int, int | None]


class Kind:
    """All devices of one make: the same slots, cores and memory.

    `by_room[n]` orders the open devices with n unheld free slots by their unheld memory. `by_drain` and `by_price`
    are made for a width when a job of that width first needs them: devices by when that many slots will be free of
    themselves, and by the key of the dearest attempt that must yield for them.
    """

    def __init__(self, spec: DeviceSpec, bit: int) -> None:
        self.spec = spec
        self.bit = bit
        self.devices: dict[int, Device] = {}  # the open ones
        self.by_room = [LazyHeap() for _ in range(spec.slots + 1)]
        self._room: dict[int, int] = {}
        self._by_drain: dict[int, LazyHeap] = {}
        self._by_price: dict[int, LazyHeap] = {}

    def touch(self, device: Device) -> int:
        """Bring the indexes up to date with the device; return by how much its unheld free slots grew."""
        slots, memory_mb = device.room(device.holds.values())
        before = self._room.get(device.order, 0)
        self.by_room[before].discard(device.order)
        self.by_room[slots].push((-memory_mb, device.order))
        self.devices[device.order] = device
        self._room[device.order] = slots
        for width, index in self._by_drain.items():
            index.push((*device.free_at(width), device.order))
        for width, index in self._by_price.items():
            self._price(device, width, index)
        return slots - before

    def forget(self, device: Device) -> int:
        """Take a device out of all indexes: nothing may start there. Return its unheld free slots."""
        slots = self._room.pop(device.order)
        del self.devices[device.order]
        for index in (self.by_room[slots], *self._by_drain.values(), *self._by_price.values()):
            index.discard(device.order)
        return slots

    def find(self, width: int, memory_mb: int, place: str) -> Device | None:
        """Return the emptiest ("spread") or fullest ("pack") device with so much unheld room."""
        rooms = range(width, self.spec.slots + 1)
        for slots in rooms if place == "pack" else reversed(rooms):
            roomiest = self.by_room[slots].first()
            if roomiest is not None and -roomiest[0] >= memory_mb:
                return self.devices[roomiest[-1]]
        return None

    def room(self) -> tuple[int, float]:
        """The most unheld slots of one device, and the most unheld memory of a device with any unheld slot."""
        most, memory_mb = 0, -1.0
        for slots in range(1, self.spec.slots + 1):
            roomiest = self.by_room[slots].first()
            if roomiest is not None:
                most, memory_mb = slots, max(memory_mb, -roomiest[0])
        return most, memory_mb

    def soonest(self, width: int) -> tuple[float, Device] | None:
        """Return the device that will have `width` free slots soonest of itself, and when."""
        if width not in self._by_drain:
            index = self._by_drain[width] = LazyHeap()
            for device in self.devices.values():
                index.push((*device.free_at(width), device.order))
        first = self._by_drain[width].first()
        return (first[0], self.devices[first[-1]]) if first else None

    def cheapest(self, width: int, n: int) -> Iterator[tuple[float, Device]]:
        """Yield up to `n` devices on which making others yield for `width` slots costs least, with the dearest key."""
        for key, _, order in self._prices(width).smallest(n):
            yield key, self.devices[order]

    def lowest_price(self, width: int) -> float:
        """Return the least key of which `width` slots can be had by making others yield; infinite if they cannot."""
        first = self._prices(width).first()
        return first[0] if first else math.inf

    def _prices(self, width: int) -> LazyHeap:
        if width not in self._by_price:
            index = self._by_price[width] = LazyHeap()
            for device in self.devices.values():
                self._price(device, width, index)
        return self._by_price[width]

    @staticmethod
    def _price(device: Device, width: int, index: LazyHeap) -> None:
        victims = device.victims(width, 0)
        if victims:
            index.push((victims[-1].key, -victims[-1].started, device.order))
        else:
            index.discard(device.order)


class Fleet:
    """The devices of all nodes. `free` counts the free slots that are open to anybody."""

    def __init__(self) -> None:
        self.kinds: dict[KindKey, Kind] = {}  # ever seen or declared; never forgotten
        self.nodes: dict[str, list[Device]] = {}
        self.free = 0
        self.slots = 0  # of open devices
        self.given_back: dict[int, Device] = {}  # devices with an asked hold where room came free
        self._made = 0

    def know(self, specs: Sequence[DeviceSpec]) -> bool:
        """Take note of the kinds of these devices; return whether one is new."""
        before = len(self.kinds)
        for spec in specs:
            if _key(spec) not in self.kinds:
                self.kinds[_key(spec)] = Kind(spec, 1 << len(self.kinds))
        return len(self.kinds) > before

    def add_node(self, node: str, specs: Sequence[DeviceSpec]) -> None:
        """Add a node whose kinds of device are known."""
        if node in self.nodes:
            raise BadInput("node", node, "is already there", "Remove the old one first.")
        self.nodes[node] = []
        for spec in specs:
            device = Device(node, spec, self._made)
            self._made += 1
            self.nodes[node].append(device)
            self.slots += spec.slots
            self.free += self.kind_of(device).touch(device)

    def close_node(self, node: str) -> None:
        """Let nothing new start on the node."""
        for device in self.nodes[node]:
            if device.open:
                device.open = False
                self.slots -= device.spec.slots
                self.free -= self.kind_of(device).forget(device)

    def remove_node(self, node: str) -> list[Attempt]:
        """Take the node out; return the attempts that ran there, which now run nowhere."""
        self.close_node(node)
        lost = [attempt for device in self.nodes.pop(node) for attempt in device.attempts.values()]
        for attempt in lost:
            attempt.device = None
        return lost

    def kind_of(self, device: Device) -> Kind:
        """Return the kind of a device."""
        return self.kinds[_key(device.spec)]

    def fitting(self, request: Request) -> tuple[int, int]:
        """Return the kinds that the job can run on, as a bit mask, and the fewest slots that it takes on one."""
        kinds, least = 0, 0
        for kind in self.kinds.values():
            if width := kind.spec.width(request):
                kinds, least = kinds | kind.bit, min(width, least or width)
        return kinds, least

    def open_kinds(self, kinds: int = -1) -> list[Kind]:
        """Return the kinds in the mask of which there is an open device."""
        return [kind for kind in self.kinds.values() if kind.bit & kinds and kind.devices]

    def touch(self, device: Device) -> None:
        """Bring the indexes up to date after any change to a device."""
        if device.open:
            self.free += self.kind_of(device).touch(device)

    def start(self, attempt: Attempt) -> None:
        """Enter an attempt into the books of its device."""
        device = attempt.device
        assert device is not None
        device.attempts[attempt.request.id] = attempt
        self.touch(device)

    def end(self, attempt: Attempt) -> None:
        """Free what an attempt had, if its node is still there."""
        device = attempt.device
        if device is not None:
            device.give_back(attempt)
            self.touch(device)
            self._note_room(device)

    def hold(self, hold: Hold) -> None:
        """Keep a share of a device for the hold's owner."""
        hold.device.holds[hold.owner] = hold
        self.touch(hold.device)

    def release(self, hold: Hold) -> None:
        """Give a held share back to everybody."""
        del hold.device.holds[hold.owner]
        self.touch(hold.device)
        self._note_room(hold.device)

    def _note_room(self, device: Device) -> None:
        if any(hold.asked for hold in device.holds.values()):
            self.given_back[device.order] = device

    def find(self, request: Request, kinds: int, place: str) -> Device | None:
        """Return the device on which the job should start now, in unheld room, or None."""
        best: tuple[float, Device] | None = None
        for kind in self.open_kinds(kinds):
            device = kind.find(kind.spec.width(request), request.memory, place)
            if device is None:
                continue
            free = len(device.free) / device.spec.slots
            score = free if place == "pack" else -free
            if best is None or score < best[0]:
                best = (score, device)
        return best[1] if best else None

    def soonest(self, request: Request, kinds: int) -> tuple[float, Device] | None:
        """Return the device that will have the slots for the job soonest, and when (infinite: unknown)."""
        offers = [
            offer for kind in self.open_kinds(kinds) if (offer := kind.soonest(kind.spec.width(request))) is not None
        ]
        return min(offers, key=lambda offer: offer[0], default=None)

    def room(self) -> tuple[int, float]:
        """The most unheld slots of one device, and the most unheld memory of a device with an unheld slot."""
        rooms = [kind.room() for kind in self.open_kinds()]
        return max((slots for slots, _ in rooms), default=0), max((memory for _, memory in rooms), default=-1.0)

    @property
    def widest(self) -> int:
        """The most slots of any open device."""
        return max((kind.spec.slots for kind in self.open_kinds()), default=0)

    def devices(self) -> Iterator[Device]:
        """Yield all devices."""
        for devices in self.nodes.values():
            yield from devices

    def check(self) -> None:
        """Raise InvariantBroken unless all devices' books balance and the indexes agree with them."""
        free = slots = 0
        for device in self.devices():
            device.check()
            kind = self.kind_of(device)
            unheld, memory_mb = device.room(device.holds.values())
            listed = [n for n, index in enumerate(kind.by_room) if device.order in index]
            if listed != ([unheld] if device.open else []):
                raise InvariantBroken(f"{device}: {unheld} unheld slots, but listed under {listed}")
            if device.open:
                free, slots = free + unheld, slots + device.spec.slots
                if kind.by_room[unheld].entry(device.order) != (-memory_mb, device.order):
                    raise InvariantBroken(f"{device}: its unheld memory is not what the index says")
                _check_measures(kind, device)
        if (free, slots) != (self.free, self.slots):
            raise InvariantBroken(f"{self.free} of {self.slots} slots free by the counters, {free} of {slots} by count")


def _check_measures(kind: Kind, device: Device) -> None:
    for width, index in kind._by_price.items():
        victims = device.victims(width, 0)
        wanted = (victims[-1].key, -victims[-1].started, device.order) if victims else None
        if index.entry(device.order) != wanted:
            raise InvariantBroken(f"{device}: the price of {width} slots is not what the index says")
    for index in kind._by_drain.values():
        if device.order not in index:
            raise InvariantBroken(f"{device}: missing among the devices that drain")


def _key(spec: DeviceSpec) -> KindKey:
    return spec.slots, spec.cores_per_slot, spec.memory_mb
