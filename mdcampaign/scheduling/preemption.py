"""Whom a waiting job may make yield, and what that costs."""

from __future__ import annotations

import math

from mdcampaign.scheduling.device import Attempt, Device
from mdcampaign.scheduling.fleet import Fleet
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.queue import LazyHeap
from mdcampaign.scheduling.request import Request

_DEVICES_TRIED = 8
"""Prices are indexed by slots only; where memory refuses the cheapest device, so many of the next are tried."""


class Preemption:
    """The running attempts that may be made to yield.

    An attempt becomes a victim when its job is preemptible, has reported progress (else it would never hear the
    directive), has run for `min_runtime_s` and has not been told to yield `max_preemptions` times.
    """

    def __init__(self, policy: Policy, fleet: Fleet) -> None:
        self._policy, self._fleet = policy, fleet
        self._young = LazyHeap()
        self._told: dict[int, int] = {}  # job -> how often it yielded to another

    @property
    def on(self) -> bool:
        """Whether the policy allows any preemption."""
        return self._policy.preempt_gap is not None

    def consider(self, attempt: Attempt, now: float) -> bool:
        """Take note that the attempt has reported; return whether it became a victim by that."""
        if not self.on or attempt.victim or self.refusal(attempt):
            return False
        mature = attempt.started + self._policy.min_runtime_s
        if mature > now:
            self._young.push((mature, attempt.request.id))
            return False
        return self._make_victim(attempt)

    def grow_up(self, now: float, attempts: dict[int, Attempt]) -> bool:
        """Make victims of the attempts that have now run long enough; return whether there were any."""
        grown = False
        while (youngest := self._young.first()) is not None and youngest[0] <= now:
            self._young.discard(youngest[-1])
            grown |= self._make_victim(attempts[youngest[-1]])
        return grown

    def _make_victim(self, attempt: Attempt) -> bool:
        attempt.victim = True
        if attempt.device is not None:
            self._fleet.touch(attempt.device)
        return True

    def refusal(self, attempt: Attempt) -> str:
        """Say in a clause why a running job cannot be made to yield, whatever asks, or ""."""
        told = self._told.get(attempt.request.id, 0)
        if not attempt.request.preemptible:
            return "it is not preemptible"
        if not attempt.reported:
            return "it has never reported progress, so it would not hear of it"
        if told >= self._policy.max_preemptions:
            return f"it has yielded {told} times, which is as often as the policy allows"
        return ""

    def ended(self, attempt: Attempt, *, waits_again: bool) -> None:
        """Forget the attempt; count it as a preemption if it had been told to yield and its job goes on waiting."""
        id = attempt.request.id
        self._young.discard(id)
        if not waits_again:
            self._told.pop(id, None)
        elif attempt.yields_to is not None:
            self._told[id] = self._told.get(id, 0) + 1

    def forget(self, id: int) -> None:
        """Forget a job that was cancelled while it waited."""
        self._told.pop(id, None)

    def least_key(self, width: int) -> float:
        """The least key with which a waiting job can make others yield for `width` slots; infinite if it cannot."""
        if self._policy.preempt_gap is None:
            return math.inf
        kinds = (kind for kind in self._fleet.open_kinds() if kind.spec.slots >= width)
        return min((kind.lowest_price(width) for kind in kinds), default=math.inf) + self._policy.preempt_gap

    def victims(self, request: Request, kinds: int) -> tuple[Device, list[Attempt]] | None:
        """Return the device and attempts that the job may clear at least cost, or None.

        Raises nothing and changes nothing. Enough victims are on one device, for a job of several slots too.
        """
        gap = self._policy.preempt_gap
        if gap is None:
            return None
        best: tuple[Device, list[Attempt]] | None = None
        price = (self._policy.key(request) - gap, math.inf)  # the dearest that it may pay
        for kind in self._fleet.open_kinds(kinds):
            width = kind.spec.width(request)
            for lowest, device in kind.cheapest(width, _DEVICES_TRIED):
                if lowest > price[0]:
                    break
                chosen = device.victims(width, request.memory)
                if chosen and _price(chosen) < price:
                    best, price = (device, chosen), _price(chosen)
        return best


def _price(victims: list[Attempt]) -> tuple[float, float]:
    dearest = max(victims, key=lambda attempt: attempt.key)
    return dearest.key, -dearest.started
