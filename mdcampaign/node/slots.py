"""The slots of a node: how many each device has, which cores they own, and what a process in one sees."""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Mapping

import psutil

from mdcampaign.errors import ProtocolError
from mdcampaign.jobs import Slot
from mdcampaign.node import cores
from mdcampaign.node.options import Options
from mdcampaign.node.protocol import DeviceReport, Place

logger = logging.getLogger(__name__)

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENMM_CPU_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def equip(found: list[DeviceReport], options: Options, environ: Mapping[str, str] = os.environ) -> list[DeviceReport]:
    """Return the devices with their slots.

    A GPU has `slots_per_device` slots, else its part of `max_workers_per_node`, else one. The cores of a node have
    `slots_per_device`, else as many as HTEX would start workers. Cores are divided over all slots of the node.

    Raises:
        BadInput: `cpu_affinity` does not fit.
    """
    usable = cores.allowed(environ)
    if found[0].kind == "cpu":
        counts = [options.slots_per_device or _workers(options, environ, usable)]
    else:
        most = options.max_workers_per_node
        if not options.slots_per_device and most < len(found):
            found = found[: int(most)]
        counts = [options.slots_per_device or (1 if math.isinf(most) else int(most) // len(found))] * len(found)
    total = sum(counts)
    blocks = cores.divide(usable, total, options.cpu_affinity)
    if cores.are_shared(blocks):
        logger.warning("%d slots but %d cores: the slots share the cores, one thread each", total, len(usable))
    elif total * len(blocks[0]) < len(usable) and not options.cpu_affinity.startswith("list"):
        logger.info("%d of %d cores stay idle", len(usable) - total * len(blocks[0]), len(usable))
    rest = iter(blocks)
    return [
        device.model_copy(update={"slot_cores": [next(rest) for _ in range(n)]}) for device, n in zip(found, counts)
    ]


def _workers(options: Options, environ: Mapping[str, str], usable: list[int]) -> int:
    """Return how many workers HTEX would start on the cores of this node, but at least one."""
    count = int(environ.get("PARSL_CORES") or len(usable))
    most = min(options.max_workers_per_node, count // options.cores_per_worker)
    if options.mem_per_worker:
        memory_gb = float(environ.get("PARSL_MEMORY_GB") or psutil.virtual_memory().available / 2**30)
        most = min(most, memory_gb // options.mem_per_worker)
    return max(1, int(most))


class SlotTable:
    """What the broker calls a slot (device and numbers), and what it is on this node."""

    def __init__(self, devices: list[DeviceReport], options: Options) -> None:
        self.devices = {device.uuid: device for device in devices}
        self.total = sum(len(device.slot_cores) for device in devices)
        self._options = options
        self._shared = cores.are_shared([block for device in devices for block in device.slot_cores])
        self._first: dict[str, int] = {}
        rank = 0
        for device in devices:
            self._first[device.uuid] = rank
            rank += len(device.slot_cores)

    def slot(self, place: Place) -> Slot:
        """Return the slot that a placement names.

        Raises:
            ProtocolError: there is no such device or slot.
        """
        device = self.devices.get(place.device)
        if device is None:
            raise ProtocolError(f"no device {place.device} here, only {', '.join(self.devices)}")
        index = tuple(sorted(set(place.index)))
        if not index or not 0 <= index[0] <= index[-1] < len(device.slot_cores):
            raise ProtocolError(
                f"device {place.device} has {len(device.slot_cores)} slots; {place.index} is not among them"
            )
        owned = tuple(sorted({core for i in index for core in device.slot_cores[i]}))
        return Slot(
            node=platform.node(),
            device=device.uuid,
            index=index,
            kind=device.kind,
            cores=owned,
            threads=min(len(index), len(owned)) if self._shared else len(owned),
            memory_mb=place.memory_mb,
            gpus=() if device.kind == "cpu" else (device.uuid,),
            exclusive=place.exclusive,
        )

    def ranks(self, slot: Slot) -> list[int]:
        """Return the numbers of these slots among all of the node."""
        return [self._first[slot.device] + i for i in slot.index]

    def environment(self, slot: Slot, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return what the environment of a process in this slot has beside, or instead of, the agent's own.

        The mask is empty on purpose where the slot has no GPU. Thread counts that the user set stay.
        """
        threads = {name: str(slot.threads) for name in THREAD_VARIABLES if not environ.get(name)}
        return threads | {
            "CUDA_VISIBLE_DEVICES": ",".join(slot.gpus),
            "PARSL_WORKER_RANK": str(self.ranks(slot)[0]),
            "PARSL_WORKER_COUNT": str(self.total),
            "PARSL_WORKER_POOL_ID": self._options.uid,
            "PARSL_WORKER_BLOCK_ID": str(self._options.block_id),
        }
