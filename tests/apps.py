"""Functions that tests run in slots; importable, as functions of a real campaign are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mdcampaign.slot import current

Spec = dict[str, Any] | None
"""Parsl leaves the resource specification in the arguments of the app."""


def double(x: int, parsl_resource_specification: Spec = None) -> int:
    return 2 * x


def nap(seconds: float, parsl_resource_specification: Spec = None) -> float:
    time.sleep(seconds)
    return seconds


def stamp(seconds: float, parsl_resource_specification: Spec = None) -> tuple[float, float]:
    """Sleep, and return when it began and ended (one clock for all processes of a machine)."""
    began = time.monotonic()
    time.sleep(seconds)
    return began, time.monotonic()


def seat(parsl_resource_specification: Spec = None) -> dict[str, Any]:
    """Return what a job sees of its slot."""
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "OPENMM_CPU_THREADS", "PARSL_WORKER_RANK")
    here = current()
    return {
        "pid": os.getpid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "slot": list(here.slot.index),
        "attempt": here.attempt,
        "name": here.name,
        **{name: os.environ.get(name) for name in names},
    }


def steps(n_steps: int, step_s: float, save: str, parsl_resource_specification: Spec = None) -> dict[str, Any]:
    """A simulation in miniature: counts steps, reports each, saves on yield and goes on from what is saved."""
    here = current()
    saved = Path(save)
    first = step = int(saved.read_text()) if saved.exists() else 0
    while step < n_steps:
        time.sleep(step_s)
        step += 1
        saved.write_text(str(step))
        remaining_s = (n_steps - step) * step_s
        directive = here.report(step=step, target_step=n_steps, saved_step=step, remaining_s=remaining_s)
        if directive.kind == "extend":
            n_steps = max(n_steps, directive.target_step or 0)
        elif directive.kind == "stop":
            break
        elif directive.kind == "yield":
            return here.interrupted(step=step).as_dict()
    return {"first": first, "last": step, "attempt": here.attempt, "pid": os.getpid()}


def silent_family(pids: str) -> None:
    """Start a shell, its child and a grandchild in a session of its own; write their pids, and wait for ever."""
    code = (
        "import os, subprocess, time; os.setsid(); p = subprocess.Popen(['sleep', '1000']);"
        "print(p.pid, flush=True); time.sleep(1000)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    Path(pids + ".new").write_text(f"{os.getpid()} {child.pid} {grandchild}")
    Path(pids + ".new").rename(pids)
    child.wait()


def segfault(parsl_resource_specification: Spec = None) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def leave(code: int, parsl_resource_specification: Spec = None) -> None:
    os._exit(code)


def complain(text: str) -> None:
    raise ValueError(text)
