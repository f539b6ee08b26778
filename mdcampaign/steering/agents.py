"""Colmena's Thinker, with agents that cannot keep the program from ending, and failures that are not lost."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from colmena.thinker import BaseThinker

from mdcampaign.errors import TaskServerLost

_TICK_S = 0.1
_WAKE_S = 2.0  # how long after `done` an agent has to notice by itself
_OURS = frozenset({"done", "submitters_done"})


class AgentThinker(BaseThinker):
    """`BaseThinker` as Colmena documents it; different is how its agents end.

    * An agent that raises is a failure: its traceback is shown on stderr, `failures` keeps it, and `done` is set.
    * `done` reaches agents that wait: after two seconds barriers are broken, and the public `threading.Event`
      attributes of the Thinker are set, so that `self.some_event.wait()` returns. Look at `self.done` after a wait.
    * Agents are daemon threads. One that still does not end is named in `stuck` when `give_up()` is called, and does
      not keep the process alive.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.failures: list[tuple[str, BaseException]] = []
        self.stuck: list[str] = []
        self._given_up = threading.Event()
        self._running: Counter[str] = Counter()
        self._counting = threading.Lock()
        self.has_starting_agents = any(self._is_starting(function) for function in self.list_agents())

    @staticmethod
    def _is_starting(function: Callable[..., Any]) -> bool:
        """Tell whether this is an agent of the user that runs at the start and may end before the campaign does."""
        return getattr(function, "_colmena_startup", False) and not function.__name__.startswith("_")

    @property
    def starting_agents(self) -> int:
        """The number of agents marked `startup=True` that have not ended."""
        return self._running["starting"]

    def fail(self, name: str, error: BaseException) -> None:
        """Record and show a failure, and end the campaign."""
        if isinstance(error, TaskServerLost) and self.done.is_set():
            return  # it was asked to end, or its loss is recorded already
        self.failures.append((name, error))
        print(f"{type(self).__name__}: {name} failed", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
        log = self.make_logger(name)
        if log.hasHandlers():  # else logging would show it on stderr once more
            log.error("%s failed", name, exc_info=error)
        self.done.set()

    def give_up(self) -> None:
        """Have `run` return soon, whatever its agents do; `stuck` then names those that have not ended."""
        self._given_up.set()

    def run(self) -> None:
        """Run all agents until they end, as Colmena's Thinker does."""
        functions: list[Any] = self.list_agents()
        events = Counter(f._event_name for f in functions if f._colmena_agent_type == "event_responder")
        self.barriers = {name: threading.Barrier(count) for name, count in events.items()}
        for function in functions:
            self._running.update(self._kinds(function))
        if not self._running["submitting"]:
            self.submitters_done.set()
        self.logger.info("%s started with %d agents. Process id: %d", type(self).__name__, len(functions), os.getpid())
        threads = [threading.Thread(target=self._run_agent, args=(f,), name=f.__name__, daemon=True) for f in functions]
        for thread in threads:
            thread.start()
        self._attend(threads)
        self.logger.info("%s completed", type(self).__name__)

    def _kinds(self, function: Callable[..., Any]) -> list[str]:
        submitting = getattr(function, "_colmena_agent_type", "") == "task_submitter"
        return ["starting"] * self._is_starting(function) + ["submitting"] * submitting

    def _run_agent(self, function: Callable[..., Any]) -> None:
        """Run one agent; end the campaign when it fails, or ends without being one that only starts things."""
        name = function.__name__
        self.local_details.name, self.local_details.logger = name, self.make_logger(name)
        try:
            self.prepare_agent()  # type: ignore[no-untyped-call]
            function(self)
        except threading.BrokenBarrierError as exc:
            if not self.done.is_set():
                self.fail(name, exc)
        except BaseException as exc:
            self.fail(name, exc)
        else:
            if not getattr(function, "_colmena_startup", False):
                self.done.set()
        finally:
            self.tear_down_agent()  # type: ignore[no-untyped-call]
            with self._counting:
                self._running.subtract(self._kinds(function))
                if not self._running["submitting"]:
                    self.submitters_done.set()

    def _attend(self, threads: list[threading.Thread]) -> None:
        """Wait for the agents; wake those that sleep through the end."""
        waking_at = None
        while alive := [thread for thread in threads if thread.is_alive()]:
            alive[0].join(_TICK_S)
            if self.done.is_set() and waking_at is None:
                waking_at = time.monotonic() + _WAKE_S
            elif waking_at is not None and time.monotonic() > waking_at:
                self._wake()
                waking_at += _WAKE_S
            if self._given_up.is_set():
                self.stuck = [thread.name for thread in threads if thread.is_alive()]
                return

    def _wake(self) -> None:
        for barrier in self.barriers.values():
            barrier.abort()
        attributes = {name: value for base in reversed(type(self).__mro__) for name, value in vars(base).items()}
        for name, value in (attributes | vars(self)).items():
            if isinstance(value, threading.Event) and not name.startswith("_") and name not in _OURS:
                value.set()
