"""The demo mode: a workload and a fleet from words on the command line, and the simulator's figures as tables."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mdcampaign.errors import BadWorkload, nearest
from mdcampaign.scheduling import workload
from mdcampaign.scheduling.policy import Policy
from mdcampaign.scheduling.simulator import compare, fleet_of
from mdcampaign.scheduling.workload import Job

WORKLOADS = ("tutorial",)
LENGTHS = ("known", "unknown")


def simulate(
    named: str | None = None,
    jobs: str | None = None,
    durations: str | None = None,
    seed: str = "42",
    csv: str | None = None,
    devices: str = "1",
    slots: str = "2",
    aging: str | None = None,
    lengths: str = "known",
) -> dict[str, Any]:
    """Return the figures of all policies for what the words describe; the same words give the same figures.

    Raises:
        BadWorkload: a word that is not understood, or a workload that the fleet cannot run.
    """
    _one_of("lengths", lengths, LENGTHS)
    policy = Policy() if aging is None else Policy(aging=_number("aging", aging, float))
    fleet = fleet_of(_number("devices", devices, int), _number("slots", slots, int))
    return compare(_jobs(named, jobs, durations, seed, csv), fleet, policy, known=lengths == "known")


def _jobs(named: str | None, count: str | None, durations: str | None, seed: str, csv: str | None) -> list[Job]:
    described = {"workload": named, "jobs": count, "durations": durations}
    given = {field: value for field, value in described.items() if value is not None}
    if csv is not None:
        for field, value in given.items():
            raise BadWorkload(field, value, "the CSV file already says this", f"Leave out --{field} or --csv.")
        return workload.read_csv(_lines(csv))
    if named is not None:
        _one_of("workload", named, WORKLOADS)
    dice = random.Random(_number("seed", seed, int))
    make = workload.tutorial if named or not given else workload.drawn
    return make(dice, _number("jobs", count or "8", int), durations or "uniform:2,12")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        problem = exc.strerror if isinstance(exc, OSError) and exc.strerror else "not a text file in UTF-8"
        raise BadWorkload("csv", path, problem, "Give the path of a CSV file.") from None


def _number(field: str, text: str, kind: Callable[[str], Any]) -> Any:
    """Read an argument as `int` or `float`, or refuse it in words."""
    try:
        return kind(text)
    except ValueError:
        word = "a whole number" if kind is int else "a number"
        raise BadWorkload(field, text, f"is not {word}", f"Give {word}.") from None


def _one_of(field: str, word: str, allowed: tuple[str, ...]) -> None:
    if word not in allowed:
        raise BadWorkload(field, word, "unknown", f"{nearest(word, allowed)}Known: {', '.join(allowed)}.")


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the figures as tables: totals, waits by priority, and the three longest waits."""
    bound_s = figures["lower_bound_s"]
    devices = "1 device" if figures["devices"] == 1 else f"{figures['devices']} devices"
    console.print(f"{figures['jobs']} jobs, {figures['slots']} slots on {devices}")
    console.print(f"lower bound {bound_s:.2f} s = max(longest job, work / slots): no order can end before")
    totals = Table("policy", "makespan s", "x bound", "idle %", "mean wait s", "longest wait s")
    waits = Table("policy", "priority", "jobs", "mean wait s", "longest wait s")
    longest = Table("policy", "job", "priority", "wait s", "effective priority", title="longest waits")
    for name, policy in figures["policies"].items():
        makespan_s, idle_percent = policy["makespan_s"], 100 * policy["idle_fraction"]
        row = (makespan_s, makespan_s / bound_s, idle_percent, policy["mean_wait_s"], policy["max_wait_s"])
        totals.add_row(name, *(f"{value:.2f}" for value in row))
        for priority, some in policy["waits_by_priority"].items():
            waits.add_row(name, priority, f"{some['jobs']}", f"{some['mean_s']:.2f}", f"{some['max_s']:.2f}")
        for wait in policy["top_waits"]:
            effective = f"{wait['effective_priority']:.4f}"
            longest.add_row(name, wait["job"], f"{wait['priority']:g}", f"{wait['wait_s']:.2f}", effective)
    for table in (totals, waits, longest):
        for column in table.columns[1:]:
            column.justify = "right"
        console.print(table)
    console.print("continuous: refill at once, by priority and age; the longest job early where the end would wait")
    console.print("fifo: refill at once, in order of submission")
    console.print("static: batches of as many jobs as slots, each until its slowest ends")
