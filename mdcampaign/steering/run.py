"""Run a campaign from its first process to its last, and end it whatever happens."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from parsl.config import Config

from mdcampaign.errors import TaskServerLost
from mdcampaign.steering.queues import CampaignQueues
from mdcampaign.steering.task_server import CampaignTaskServer
from mdcampaign.steering.thinker import CampaignThinker

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=CampaignThinker)

_TICK_S = 0.1
_SERVER_S = 25.0  # beyond `drain_s`: Parsl ends, the last results leave; 60 s in all with the default
_AGENTS_S = 5.0  # how long agents have once everything has been delivered
_HURRY_S = 1.0  # the same after a second Ctrl-C


class Interrupts:
    """Counts SIGINT and SIGTERM instead of being ended by them; only where signals can be handled at all."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.signal = self.signal or number


def run_campaign(
    thinker_class: type[T],
    parameters: dict[str, Any],
    queues: CampaignQueues,
    parsl_config: Config,
    campaign_dir: str | Path,
    *,
    methods: Sequence[Any] = (),
    method_defaults: dict[str, dict[str, Any]] | None = None,
    drain_s: float = 30.0,
    prepare: Callable[[T], None] | None = None,
    **server_options: Any,
) -> tuple[T, int]:
    """Run a campaign to its end and return its Thinker and an exit status.

    Call it from the main thread of a process without other threads or sockets: the task server is forked first.
    Ctrl-C (or SIGTERM) once: running jobs save their state, at the latest after `drain_s`, and it returns within 60 s.
    Twice: it returns within 5 s, and jobs go back to their last checkpoint.

    Args:
        thinker_class: made as `thinker_class(queues, **parameters)`.
        parameters: keyword arguments of the Thinker.
        queues: made for this campaign; a Thinker may ask for topics of its own.
        parsl_config: with a SlotExecutor among its executors.
        campaign_dir: where the jobs' directories are.
        methods: Colmena methods beside MDJobs.
        method_defaults: resource specifications by method name.
        drain_s: how long running jobs may take to save their state at the end.
        prepare: called with the Thinker before it starts, for a display.
        server_options: further arguments of `CampaignTaskServer`.

    Returns:
        The Thinker, with `jobs`, `outcomes` and `failures`, and 0; 1 when an agent, a handler or the task server
        failed; 130 or 143 after SIGINT or SIGTERM. That a job failed is an outcome and no failure of the campaign.

    Raises:
        BadInput: an argument is refused, before anything is started.
    """
    server = CampaignTaskServer(
        methods,
        queues,
        parsl_config,
        campaign_dir=str(campaign_dir),
        method_defaults=method_defaults,
        drain_s=drain_s,
        ignore_interrupt=True,
        **server_options,
    )
    server.start()
    with Interrupts() as interrupts:
        try:
            thinker = thinker_class(queues, **parameters)
            thinker.watch(server)
            if prepare is not None:
                prepare(thinker)
            thinker.start()
        except BaseException:
            _end_server(server, queues, interrupts)
            raise
        _attend(thinker, interrupts)
        _end_server(server, queues, interrupts)
        _end_thinker(thinker, interrupts)
    _flush(queues)
    return thinker, _status(thinker, server, interrupts)


def _attend(thinker: CampaignThinker, interrupts: Interrupts) -> None:
    """Wait until the campaign is over: `done`, and no task of a plain method is left that is worth waiting for."""
    while not thinker.done.wait(_TICK_S):
        if interrupts.count:
            logger.warning("interrupted: running jobs save their state; once more ends them at once")
            thinker.done.set()
    while thinker.is_alive() and not (interrupts.count or thinker.failures or thinker.active_jobs):
        if not thinker.queues.active_count:
            return
        thinker.join(_TICK_S)


def _end_server(server: CampaignTaskServer, queues: CampaignQueues, interrupts: Interrupts) -> None:
    """End the task server: by the kill signal, by SIGKILL at the limit or at the second interrupt."""
    try:
        queues.send_kill_signal()  # type: ignore[no-untyped-call]
    except (TaskServerLost, ConnectionError):
        logger.info("the kill signal could not be sent", exc_info=True)
        server.terminate()
    end = time.monotonic() + server.drain_s + _SERVER_S
    while server.is_alive():
        server.join(_TICK_S)
        if interrupts.count > 1 or time.monotonic() > end:
            logger.error("the task server is killed, as %s", "asked" if interrupts.count > 1 else "it does not end")
            server.kill()
            server.join(_HURRY_S)
            return


def _end_thinker(thinker: CampaignThinker, interrupts: Interrupts) -> None:
    """Let the agents handle what has arrived; name those that do not end."""
    end = time.monotonic() + _AGENTS_S
    while thinker.is_alive():
        thinker.join(_TICK_S)
        if time.monotonic() > (end if interrupts.count < 2 else end - _AGENTS_S + _HURRY_S):
            thinker.give_up()
            thinker.join(_HURRY_S)
            logger.error("agents that did not end: %s", ", ".join(thinker.stuck))
            return


def _flush(queues: CampaignQueues) -> None:
    try:
        queues.flush()  # type: ignore[no-untyped-call]
    except ConnectionError:
        logger.info("the queues could not be emptied", exc_info=True)


def _status(thinker: CampaignThinker, server: CampaignTaskServer, interrupts: Interrupts) -> int:
    if thinker.failures:
        return 1
    if interrupts.count:
        return 128 + interrupts.signal
    return 1 if server.exitcode or thinker.stuck else 0
