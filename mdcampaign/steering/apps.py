"""What the task server sends into slots. Runners import this module, so it imports next to nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_job(job: dict[str, Any], campaign_dir: str) -> dict[str, Any]:
    """Run an MDJob (as JSON values) in the slot of this process; return `Outcome.as_dict()`."""
    from mdcampaign.engines.drive import run_md

    return run_md(job, campaign_dir)


class WithoutSpecification:
    """A function that is not shown the resource specification.

    Parsl leaves `parsl_resource_specification` among the arguments of an app, and a function that never heard of
    slots would refuse it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__ = str(getattr(function, "__name__", function))

    def __call__(self, *args: Any, parsl_resource_specification: Any = None, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)
