"""The agent's command line: HTEX's names where HTEX has them."""

from __future__ import annotations

import argparse
import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PROBE_S = 30.0


@dataclass(frozen=True)
class Options:
    """What an agent is told; times in seconds, memory in GB."""

    addresses: str
    port: int
    cert_dir: str | None = None
    logdir: str = "process_worker_pool_logs"
    block_id: str | None = None
    uid: str = ""
    hb_period: float = 30.0
    hb_threshold: float = 120.0
    drain_period: float | None = None
    slots_per_device: int | None = None
    cores_per_worker: float = 1.0
    max_workers_per_node: float = math.inf
    mem_per_worker: float | None = None
    cpu_affinity: str = "none"
    address_probe_timeout: float = PROBE_S
    debug: bool = False

    @property
    def directory(self) -> Path:
        """Where the logs of this agent and the output of its runners lie."""
        return Path(self.logdir).absolute() / f"block-{self.block_id}" / self.uid


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line (of this process by default); exits as argparse does when it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m mdcampaign.node.agent", description="The agent of one node.")
    add = parser.add_argument
    add("-a", "--addresses", required=True, help="where the broker may be reached, separated by commas")
    add("-P", "--port", required=True, type=int, help="the broker's port for agents")
    add("--cert_dir", type=_or_none(str), help="directory of the CurveZMQ certificates; None: not encrypted")
    add("-l", "--logdir", default=Options.logdir, help="where logs and output go")
    add("-b", "--block_id", help="Parsl's name of the block that this node belongs to")
    add("-u", "--uid", default=uuid.uuid4().hex[:12], help="the agent's name")
    add("--hb_period", type=_positive, default=Options.hb_period, help="seconds between heartbeats")
    add("--hb_threshold", type=_positive, default=Options.hb_threshold, help="seconds of silence that end it")
    add("--drain_period", type=_or_none(_positive), help="take no more work after this many seconds")
    add("--slots_per_device", type=_or_none(_count), help="slots of each GPU, or of the node's cores")
    add("-c", "--cores_per_worker", type=_positive, default=Options.cores_per_worker, help="cores of a slot")
    add("--max_workers_per_node", type=_count_or_inf, default=math.inf, help="no more slots than this")
    add("-m", "--mem_per_worker", type=_or_none(_positive), help="memory of a slot, GB")
    add("--cpu-affinity", type=str.lower, default=Options.cpu_affinity, help="how cores are given to slots")
    add("--address_probe_timeout", type=_or_none(_positive), help="seconds to look for the broker")
    add("-d", "--debug", action="store_true", help="log at level DEBUG")
    given = vars(parser.parse_args(arguments))
    given["address_probe_timeout"] = given["address_probe_timeout"] or PROBE_S
    return Options(**{field.name: given[field.name] for field in fields(Options)})


def _or_none(kind: Callable[[str], T]) -> Callable[[str], T | None]:
    """Parse like `kind`, but take the word None, which Parsl writes, for what it says."""

    def parse_or_none(text: str) -> T | None:
        return None if text == "None" else kind(text)

    parse_or_none.__name__ = kind.__name__.strip("_")  # argparse puts it in its messages
    return parse_or_none


def _positive(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise ValueError(text)
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _count_or_inf(text: str) -> float:
    return math.inf if text == "inf" else _count(text)
