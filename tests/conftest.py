"""Fixtures shared by all tests."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import parsl
import pytest
from parsl.config import Config
from parsl.errors import NoDataFlowKernelError
from parsl.providers import LocalProvider

from mdcampaign.executor import SlotExecutor, retry_handler
from mdcampaign.scheduling.policy import Policy

GUARD_S = 60.0
"""How long a test waits for something that should happen soon; a guard against hanging, never a speed."""


def wait_until(condition: Callable[[], Any], what: str, guard_s: float = GUARD_S) -> Any:
    """Wait for a condition that no event announces (another process's state), and return its value."""
    deadline = time.monotonic() + guard_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {guard_s:.0f} s in vain for {what}")
        time.sleep(0.02)
    return value


Start = Callable[..., SlotExecutor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a DataFlowKernel with one SlotExecutor of two slots; arguments go to the executor."""

    def begin(retries: int = 0, **arguments: Any) -> SlotExecutor:
        defaults: dict[str, Any] = {
            "label": "slots",
            "provider": LocalProvider(init_blocks=1, max_blocks=1),
            "slots_per_device": 2,
            "address": "127.0.0.1",
            "encrypted": False,
            "heartbeat_period": 1,
            "heartbeat_threshold": 4,
            "policy": Policy(),
        }
        executor = SlotExecutor(**{**defaults, **arguments})
        config = Config(
            executors=[executor],
            run_dir=str(tmp_path / "runinfo"),
            strategy="none",
            strategy_period=0.2,
            retries=retries,
            retry_handler=retry_handler,
        )
        parsl.load(config)
        return executor

    yield begin
    with contextlib.suppress(NoDataFlowKernelError):  # a test may have cleaned up itself
        parsl.dfk().cleanup()
        parsl.clear()


@pytest.fixture
def events(start: Start) -> Callable[[SlotExecutor], list[dict[str, Any]]]:
    """Return a function that collects an executor's events into a list from now on."""

    def collect(executor: SlotExecutor) -> list[dict[str, Any]]:
        collected: list[dict[str, Any]] = []
        executor.subscribe(collected.append)
        return collected

    return collect
