"""What a node has to share: its GPUs by UUID, or else its CPU cores.

NVML is asked in a process of its own, with a deadline: on a sick card its calls may block for ever.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from mdcampaign.node.protocol import DeviceReport

logger = logging.getLogger(__name__)

NVML_LIMIT_S = 60.0
"""Without persistence mode NVML wakes every card when it starts, seconds each."""


def discover(environ: Mapping[str, str] = os.environ) -> list[DeviceReport]:
    """Return the node's GPUs, restricted to CUDA_VISIBLE_DEVICES; where there is none, its cores as one device.

    The reports have no slots yet. Call it while this process has one thread: it forks.
    """
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [] if mask is not None and not mask.strip() else _gpus(mask)
    return gpus or [cpu_device(environ)]


def cpu_device(environ: Mapping[str, str] = os.environ) -> DeviceReport:
    """Return the node's cores as a device; its memory is the node's, or PARSL_MEMORY_GB as in HTEX."""
    limit_gb = environ.get("PARSL_MEMORY_GB")
    memory_mb = int(float(limit_gb) * 1024) if limit_gb else psutil.virtual_memory().total >> 20
    return DeviceReport(
        uuid=f"cpu:{platform.node()}", kind="cpu", slot_cores=[], memory_mb=memory_mb, model=platform.machine()
    )


def visible(mask: str | None, uuids: Sequence[str]) -> list[str]:
    """Return which devices a CUDA_VISIBLE_DEVICES names; all where it is unset.

    `uuids` are those of NVML, in its order. Entries are numbers in that order, UUIDs, beginnings of a UUID, or
    MIG instances ("MIG-..."), which stand for themselves. The list ends at the first entry that names
    nothing, as in CUDA.
    """
    if mask is None:
        return list(uuids)
    found: list[str] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.startswith("MIG-"):
            named = [entry]
        elif entry.isdecimal():
            named = list(uuids[int(entry) : int(entry) + 1])
        else:
            named = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if len(named) != 1:
            logger.warning("CUDA_VISIBLE_DEVICES=%s: %r names no device here; it and the rest are ignored", mask, entry)
            break
        found += [uuid for uuid in named if uuid not in found]
    return found


def _gpus(mask: str | None) -> list[DeviceReport]:
    answer = _in_child(lambda: _ask_nvml(mask), NVML_LIMIT_S)
    if answer is None:
        logger.error("NVML did not answer within %.0f s; the node's cores are its only device", NVML_LIMIT_S)
        return []
    for line in answer["log"]:
        logger.warning("%s", line)
    return [DeviceReport.model_validate(device) for device in answer["devices"]]


def _ask_nvml(mask: str | None) -> dict[str, Any]:
    """Return {"devices": [...], "log": [...]}; one bad card does not hide the others."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as exc:  # no driver, another module of that name, a version that does not match
        masked = f", although CUDA_VISIBLE_DEVICES is {mask}" if mask else ""
        return {"devices": [], "log": [f"no GPU: NVML says {exc}{masked}"]}
    log: list[str] = []
    uuids: list[str] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError as exc:
            uuids.append("")  # keeps the numbers of the others
            log.append(f"GPU number {index} is left out: NVML says {exc}")
    devices = []
    for uuid in filter(None, visible(mask, uuids)):
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            memory_mb = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) >> 20
            model = str(pynvml.nvmlDeviceGetName(handle))
        except pynvml.NVMLError as exc:
            log.append(f"device {uuid} is left out: NVML says {exc}")
            continue
        kind = "mig" if uuid.startswith("MIG-") else "gpu"
        devices.append({"uuid": uuid, "kind": kind, "slot_cores": [], "memory_mb": memory_mb, "model": model})
    return {"devices": devices, "log": log}


def _in_child(work: Callable[[], dict[str, Any]], limit_s: float) -> dict[str, Any] | None:
    """Return what `work` returns in a forked process, or None when it fails or takes longer than `limit_s`."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.write(writing, json.dumps(work()).encode())  # at most 64 kB, so it cannot block
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    try:
        answer = _read_until(reading, time.monotonic() + limit_s)
    finally:
        os.close(reading)
    if answer is None:
        os.kill(pid, signal.SIGKILL)  # it may hang in the driver; the agent reaps it if ever it ends
        return None
    os.waitpid(pid, 0)
    return json.loads(answer) if answer else None


def _read_until(fd: int, deadline: float) -> bytes | None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    answer = b""
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        part = os.read(fd, 65536)
        if not part:
            return answer
        answer += part
    return None
