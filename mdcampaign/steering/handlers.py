"""Decorators that make a method of a Thinker a handler of progress or of results, and how handlers are called.

::

    class Watch(CampaignThinker):
        @on_progress(group="replicas", every=10)
        def look(self, job: str, progress: Progress, info: ReportInfo) -> None: ...

        @on_result
        def harvest(self, job: str, outcome: Outcome, result: Result) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from mdcampaign.errors import BadInput

Method = TypeVar("Method", bound=Callable[..., Any])
Kind = Literal["progress", "result"]


@dataclass(frozen=True)
class ReportInfo:
    """What a progress report says beside the progress.

    `seq` counts the reports of this attempt of the job. `skipped` counts the reports since the last one that was
    delivered which a newer one replaced, because the handlers were busy. `sent_s` is the Unix time of the report.
    """

    attempt: int
    seq: int
    skipped: int
    sent_s: float


@dataclass
class Handler:
    """A decorated method and its filters."""

    name: str
    kind: Kind
    group: str | None = None
    every: int = 1
    _counts: dict[str, int] = field(default_factory=dict)

    def wants(self, job: str, reports: int = 1) -> bool:
        """Tell whether the handler is to be called for this job, `reports` reports after the last time asked.

        With `every=n` that is at the n-th, the 2n-th report of each job and so on, or at the next one that comes
        where that one was skipped. Results count per group: every n-th of those that pass the filter.
        """
        if self.group is not None and job.partition("/")[0] != self.group:
            return False
        if self.every == 1:
            return True
        key = job if self.kind == "progress" else ""
        before = self._counts.get(key, 0)
        self._counts[key] = before + reports
        return (before + reports) // self.every > before // self.every


def on_progress(method: Method | None = None, *, group: str | None = None, every: int = 1) -> Any:
    """Have the method called as `method(job, progress, info)` with the progress of running jobs.

    Args:
        method: the method, where the decorator is used without arguments.
        group: only jobs of this group.
        every: only every n-th report of each job.

    Raises:
        BadInput: `every` is not a whole number of at least 1, or `group` is not a name.
    """
    return _marking("progress", method, group, every)


def on_result(method: Method | None = None, *, group: str | None = None, every: int = 1) -> Any:
    """Have the method called as `method(job, outcome, result)` when a job has ended, however it did.

    Args and errors as for `on_progress`. `job` is "group/name", `result` is Colmena's `Result`.
    """
    return _marking("result", method, group, every)


def _marking(kind: Kind, method: Method | None, group: str | None, every: int) -> Any:
    if method is not None and not callable(method):
        raise BadInput(
            "on_" + kind, method, "is not a method", f"Name the arguments: @on_{kind}(group=..., every=...)."
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise BadInput("every", every, "must be a whole number of at least 1")
    if group is not None and not isinstance(group, str):
        raise BadInput("group", group, "must be the name of a group")

    def mark(function: Method) -> Method:
        marks = [*getattr(function, "_mdcampaign_handlers", ()), (kind, group, every)]
        function._mdcampaign_handlers = marks  # type: ignore[attr-defined]
        return function

    return mark if method is None else mark(method)


def handlers_of(cls: type, kind: Kind) -> list[Handler]:
    """Return the handlers of a Thinker class, those of its base classes first, in the order of their definition."""
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update(dict.fromkeys(vars(base)))
    return [
        Handler(name, kind, group, every)
        for name in names
        for of_kind, group, every in getattr(getattr(cls, name), "_mdcampaign_handlers", ())
        if of_kind == kind
    ]
