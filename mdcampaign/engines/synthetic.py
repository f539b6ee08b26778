"""The synthetic engine: takes time and memory, keeps a checkpoint, and fails on request. For trials and tests."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

from mdcampaign import atomic
from mdcampaign.engines.base import Capabilities, Iterations
from mdcampaign.engines.inputs import Synthetic
from mdcampaign.engines.manifest import Checkpoint, Manifest, Part, Stamp, attempt_number
from mdcampaign.errors import CheckpointError, EngineFailed, FailureKind
from mdcampaign.jobs import MDJob, Outcome, OutcomeKind, Progress, Slot
from mdcampaign.slot import current


class SyntheticEngine:
    """No MD: each step takes a chosen time; an iteration ends with a small file as its checkpoint."""

    def probe(self) -> Capabilities:
        """Return that it runs anywhere."""
        return Capabilities("synthetic", version="1", platforms=("CPU",))

    def run(self, job: MDJob, slot: Slot, workdir: Path) -> Iterations:
        """Run the job; see `mdcampaign.engines.base.Engine`."""
        return _Attempt(job, workdir).run()


class _Attempt:
    def __init__(self, job: MDJob, workdir: Path) -> None:
        assert isinstance(job.engine, Synthetic)
        self._job, self._inputs, self._workdir = job, job.engine, workdir
        self._manifest = Manifest.open(job, workdir)
        self._fails = self._inputs.fail is not None and current().attempt <= self._inputs.fail_attempts
        self._memory = b""

    def run(self) -> Iterations:
        manifest, inputs = self._manifest, self._inputs
        self._memory = b"\1" * (inputs.allocate_mb << 20)
        step = self._resume()
        while True:
            step, bad = self._advance(step)
            if bad and inputs.fail == "no progress":
                return (yield from self._stall(step))
            if bad:
                return self._fail(step)
            self._save(step)
            directive = yield self._progress(step)
            if directive.kind == "extend":
                manifest.target_step = max(manifest.target_step, directive.target_step or 0)
            if step >= manifest.target_step:
                return self._end("done", step)
            if directive.kind in ("yield", "stop"):
                return self._end("interrupted" if directive.kind == "yield" else "stopped", step)

    def _resume(self) -> int:
        """Return the step to go on from: the newest good checkpoint's, 0 for a job that has none."""
        manifest, job_dir = self._manifest, self._workdir.parent
        step = 0
        for checkpoint in reversed(manifest.checkpoints):
            try:
                step = json.loads(checkpoint.verify(job_dir, {})["checkpoint"].read_text())["step"]
                break
            except CheckpointError as exc:
                manifest.events.append(f"{self._workdir.name}: checkpoint of step {checkpoint.step} refused: {exc}")
        else:
            if manifest.checkpoints:
                manifest.save(job_dir)
                raise EngineFailed(f"no checkpoint of {job_dir} can be used; remove it to begin again from step 0")
        manifest.rewind(step)
        manifest.state = "running"
        manifest.parts.append(Part(attempt_number(self._workdir), step, step, 0))
        return int(step)

    def _advance(self, step: int) -> tuple[int, bool]:
        """Take the time of an iteration, or up to the step that fails; return the step reached and whether it fails."""
        size = self._job.iteration_steps
        stop = min((step // size + 1) * size, self._manifest.target_step)
        bad = self._fails and step < self._inputs.fail_step <= stop
        if bad:
            stop = self._inputs.fail_step
        self._take(max(stop - step, 0) * self._inputs.step_s)
        return max(stop, step), bad

    def _take(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        if self._inputs.burn:
            while time.monotonic() < end:
                pass
        else:
            time.sleep(seconds)

    def _save(self, step: int) -> None:
        path = self._workdir / f"checkpoint-{step}.json"
        atomic.replace(path, json.dumps({"step": step}).encode())
        job_dir = self._workdir.parent
        self._manifest.advance(Checkpoint(attempt_number(self._workdir), step, {"checkpoint": Stamp.of(job_dir, path)}))
        self._manifest.save(job_dir)
        kept = {Path(stamp.path).name for c in self._manifest.checkpoints for stamp in c.files.values()}
        for old in self._workdir.glob("checkpoint-*.json"):
            if old.name not in kept:
                old.unlink()

    def _progress(self, step: int) -> Progress:
        target = self._manifest.target_step
        remaining_s = (target - step) * self._inputs.step_s
        return Progress(step, target, self._manifest.accepted_step, remaining_s=remaining_s)

    def _stall(self, step: int) -> Iterations:
        """Report the same step, an iteration's time apart, until told to end."""
        while True:
            directive = yield self._progress(step)
            if directive.kind == "yield":
                return self._end("interrupted", step)
            if directive.kind == "stop":
                self._save(step)
                return self._end("stopped", step)
            self._take(self._job.iteration_steps * self._inputs.step_s)

    def _fail(self, step: int) -> Outcome:
        kind = self._inputs.fail
        if kind == "crashed":
            _die_by_signal()
        if kind == "exit":
            os._exit(3)
        assert kind is not None
        message = f"asked to fail at step {step}: {kind}"
        self._manifest.events.append(f"{self._workdir.name}: {message}")
        return self._end("failed", step, message, kind)

    def _end(self, kind: OutcomeKind, step: int, message: str = "", failure: FailureKind | None = None) -> Outcome:
        outcome = Outcome(kind, step=step, target_step=self._manifest.target_step, message=message, failure=failure)
        return self._manifest.end(outcome, self._workdir.parent)


def _die_by_signal() -> NoReturn:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("SIGSEGV did not end the process")
