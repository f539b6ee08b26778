"""Workloads for the simulator: drawn from a distribution, read from a CSV file, or the teaching example."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mdcampaign.errors import BadInput, BadWorkload, nearest
from mdcampaign.scheduling.device import DeviceSpec
from mdcampaign.scheduling.request import Request

TUTORIAL_SEED = 42
COLUMNS = ("duration_s", "name", "priority", "submitted_s", "slots", "exclusive", "memory_mb", "cores")
"""Columns of a CSV workload; all but the first may be missing or empty."""

DISTRIBUTIONS = ("uniform:LOW,HIGH", "lognormal:MEAN,CV", "constant:X")


class Dice(Protocol):
    """What a workload needs of `random.Random`, which the caller seeds: this package draws no numbers of its own."""

    def uniform(self, a: float, b: float, /) -> float: ...
    def lognormvariate(self, mu: float, sigma: float, /) -> float: ...


@dataclass(frozen=True)
class Job:
    """A job of a workload: what it needs, and how long it will run once it has its slots."""

    name: str
    duration_s: float
    priority: float = 0.0
    submitted_s: float = 0.0
    slots: int = 1
    exclusive: bool = False
    memory_mb: int | None = None
    cores: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < math.inf:
            raise BadWorkload("duration_s", self.duration_s, "is not a time above 0", "Give seconds.")
        self.request(0, known=True)

    def request(self, id: int, *, known: bool) -> Request:
        """Return what the scheduler is told; `known` says whether it is told the length."""
        try:
            return Request(
                id,
                self.submitted_s,
                self.priority,
                self.slots,
                self.exclusive,
                self.memory_mb,
                self.cores,
                expected_s=self.duration_s if known else None,
                name=self.name,
            )
        except BadInput as exc:
            raise BadWorkload(exc.field, exc.value, exc.problem, exc.mend) from None


def tutorial(dice: Dice, count: int = 8, durations: str = "uniform:2,12") -> list[Job]:
    """The teaching example: jobs of 2 to 12 s, the first two of them urgent (priority 5)."""
    return drawn(dice, count, durations, urgent=2)


def drawn(dice: Dice, count: int, durations: str, urgent: int = 0) -> list[Job]:
    """Return `count` jobs with lengths drawn from `durations`; the first `urgent` have priority 5.

    Raises:
        BadWorkload: fewer than one job, or a distribution that cannot be understood.
    """
    if count < 1:
        raise BadWorkload("jobs", count, "must be at least 1", "Give the number of jobs.")
    draw = distribution(durations, dice)
    return [Job(f"job-{n}", draw(), priority=5.0 if n <= urgent else 0.0) for n in range(1, count + 1)]


def distribution(text: str, dice: Dice) -> Callable[[], float]:
    """Return what draws one length in seconds; see `DISTRIBUTIONS`."""
    name, _, rest = text.partition(":")
    allowed = f"Use one of {', '.join(DISTRIBUTIONS)}, in seconds."
    kinds = {known.partition(":")[0]: known.count(",") + 1 for known in DISTRIBUTIONS}
    if name not in kinds:
        raise BadWorkload("durations", text, "unknown distribution", f"{nearest(name, kinds)}{allowed}")
    numbers = [_number(part, text, allowed) for part in rest.split(",")]
    if len(numbers) != kinds[name]:
        raise BadWorkload("durations", text, f"{name} takes {kinds[name]} numbers", allowed)
    if numbers[0] <= 0 or (name == "uniform" and numbers[0] > numbers[1]) or numbers[-1] < 0:
        mend = (
            "Lengths are above 0 and LOW is at most HIGH."
            if name == "uniform"
            else "Lengths are above 0, CV is not below."
        )
        raise BadWorkload("durations", text, "impossible numbers", mend)
    if name == "constant":
        return lambda: numbers[0]
    low, high = numbers
    if name == "uniform":
        return lambda: dice.uniform(low, high)
    sigma = math.sqrt(math.log1p(high * high))  # of a lognormal with mean `low` and coefficient of variation `high`
    return lambda: dice.lognormvariate(math.log(low) - sigma * sigma / 2, sigma)


def _number(part: str, text: str, allowed: str) -> float:
    try:
        number = float(part)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadWorkload("durations", text, f"{part!r} is not a number", allowed)
    return number


def read_csv(lines: Iterable[str]) -> list[Job]:
    """Return the jobs of a CSV file with a header line; `COLUMNS` names what may be in it.

    Raises:
        BadWorkload: an unknown or missing column, or a value that cannot be, with its line.
    """
    reader = csv.DictReader((line for line in lines if line.strip()), restkey="", skipinitialspace=True)
    try:
        header = list(reader.fieldnames or [])
        rows = [(row, reader.line_num) for row in reader]
    except csv.Error as exc:
        raise BadWorkload("csv", f"line {reader.line_num}", str(exc), "Write plain comma-separated values.") from None
    known = f"Known columns: {', '.join(COLUMNS)}."
    for column in header:
        if column not in COLUMNS:
            raise BadWorkload("column", column, "unknown column", f"{nearest(column, COLUMNS)}{known}")
    if COLUMNS[0] not in header:
        raise BadWorkload("column", ", ".join(header), f"the column {COLUMNS[0]} is missing", known)
    jobs = [_job(row, line) for row, line in rows]
    if not jobs:
        raise BadWorkload("csv", "no lines after the header", "has no jobs", "Give one line for each job.")
    return jobs


def _job(row: dict[str, str], line: int) -> Job:
    """Turn one line into a job; empty values take their defaults."""
    if "" in row:
        raise BadWorkload(f"line {line}", row[""], "has more values than the header has columns", "Remove them.")
    values = {column: _value(column, text, line) for column, text in row.items() if text}
    try:
        return Job(**({"name": f"line-{line}", "duration_s": math.nan} | values))  # type: ignore[arg-type]
    except BadInput as exc:
        raise BadWorkload(f"{exc.field} in line {line}", exc.value, exc.problem, exc.mend) from None


def _value(column: str, text: str, line: int) -> str | float | int | bool:
    if column == "name":
        return text
    if column == "exclusive":
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if text.lower() not in words:
            raise BadWorkload(f"exclusive in line {line}", text, "is neither yes nor no", "Write true or false.")
        return words[text.lower()]
    try:
        return float(text) if column in ("duration_s", "priority", "submitted_s") else int(text)
    except ValueError:
        raise BadWorkload(f"{column} in line {line}", text, "is not a number", "Give a number.") from None


def lower_bound_s(jobs: Iterable[Job], devices: Sequence[DeviceSpec]) -> float:
    """No schedule ends sooner: max(longest job, total work / slots)."""
    longest_s = work_s = 0.0
    for job in jobs:
        request = job.request(0, known=False)
        width = min((width for device in devices if (width := device.width(request))), default=0)
        longest_s, work_s = max(longest_s, job.duration_s), work_s + width * job.duration_s
    return max(longest_s, work_s / sum(device.slots for device in devices))
