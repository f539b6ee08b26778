"""Which CPU cores belong to which slot."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from mdcampaign.errors import BadInput, nearest

ORDERS = ("none", "block", "block-reverse", "alternating")


def allowed(environ: Mapping[str, str] = os.environ) -> list[int]:
    """Return the cores that this process may use, no more of them than PARSL_CORES says (as in HTEX)."""
    cores = sorted(os.sched_getaffinity(0))
    limit = environ.get("PARSL_CORES")
    return cores[: int(limit)] if limit else cores


def divide(cores: Sequence[int], slots: int, affinity: str = "none") -> list[list[int]]:
    """Return the cores of each slot: disjoint sets of equal size, what does not divide stays idle.

    With more slots than cores every slot gets all of them (see `are_shared`). `affinity` takes HTEX's values: "block",
    "block-reverse" and "alternating" choose the order, "list:0,1:2-3" names the cores of each slot. A slot owns its
    cores whether or not anybody asked, so "none" (HTEX: not bound) is "block" here.

    Raises:
        BadInput: an unknown value, or a list with too few entries, unknown cores or one core twice.
    """
    if affinity.startswith("list"):
        return _listed(cores, slots, affinity)
    if affinity not in ORDERS:
        raise BadInput("cpu_affinity", affinity, "unknown value", f"{nearest(affinity, ORDERS)}Use one of {ORDERS}.")
    each = len(cores) // slots
    if each == 0:
        return [list(cores) for _ in range(slots)]
    if affinity == "alternating":
        return [list(cores[slot::slots][:each]) for slot in range(slots)]
    blocks = [list(cores[each * slot : each * (slot + 1)]) for slot in range(slots)]
    return blocks[::-1] if affinity == "block-reverse" else blocks


def are_shared(blocks: Sequence[Sequence[int]]) -> bool:
    """Tell whether some core belongs to more than one slot; then a slot should run one thread only."""
    flat = [core for block in blocks for core in block]
    return len(set(flat)) < len(flat)


def _listed(cores: Sequence[int], slots: int, affinity: str) -> list[list[int]]:
    entries = affinity.split(":")[1:]
    if len(entries) != slots:
        raise BadInput("cpu_affinity", affinity, f"{len(entries)} lists for {slots} slots", "Give one list for each.")
    try:
        blocks = [[core for part in entry.split(",") for core in _range(part)] for entry in entries]
    except ValueError:
        raise BadInput("cpu_affinity", affinity, "not a list of cores", "Write it like 'list:0,1:2-3'.") from None
    unknown = sorted({core for block in blocks for core in block} - set(cores))
    if unknown:
        raise BadInput("cpu_affinity", affinity, f"cores {unknown} are not ours", f"Use those of {list(cores)}.")
    if are_shared(blocks):
        raise BadInput("cpu_affinity", affinity, "a core is listed twice", "Give every slot cores of its own.")
    return blocks


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)
