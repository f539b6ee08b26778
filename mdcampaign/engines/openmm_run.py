"""One attempt of an OpenMM job: start or resume, iterate, save, finish."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import openmm as mm

from mdcampaign.engines import openmm_checkpoint, openmm_system, stitch
from mdcampaign.engines.base import Iterations
from mdcampaign.engines.inputs import OpenMM
from mdcampaign.engines.manifest import Manifest, Part, attempt_number
from mdcampaign.engines.openmm_output import Output, Sample, measure
from mdcampaign.errors import FAILURES, EngineFailed, InputFailed, JobFailed, Unstable
from mdcampaign.jobs import MDJob, Outcome, Progress, Slot

CHECKPOINT_S = 10.0
"""Wall time between two checkpoints at most, unless one takes more than a twentieth of that."""
CHECKPOINT_SHARE = 0.02
"""Saving at each iteration is cheap while it takes no more than this share of the time."""


class Run:
    """A job in a slot, from its first or last saved step to a later one."""

    def __init__(self, job: MDJob, slot: Slot, workdir: Path) -> None:
        assert isinstance(job.engine, OpenMM)
        self._job, self._inputs, self._slot, self._workdir = job, job.engine, slot, workdir
        self._job_dir = workdir.parent
        self._manifest = Manifest.open(job, workdir)
        self._notes: list[str] = []
        self._step = self._saved_step = self._manifest.accepted_step
        self._rate: float | None = None
        self._save_cost_s = 0.0
        self._output: Output | None = None

    def iterate(self) -> Iterations:
        """Run to the target; a report at each multiple of the job's `iteration_steps` and at the target."""
        try:
            return (yield from self._iterate())
        except JobFailed as exc:
            return self._failed(exc)
        except mm.OpenMMException as exc:
            return self._failed(self._translated(exc))
        finally:
            if self._output:
                self._output.close()

    def _iterate(self) -> Iterations:
        self._start()
        began, first = time.perf_counter(), self._step
        while True:
            sample = self._advance()
            if (elapsed := time.perf_counter() - began) > 0 and self._step > first:
                self._rate = (self._step - first) * self._inputs.dt_ps / 1000 / elapsed * 86400
            if self._step >= self._manifest.target_step or self._is_due():
                self._save()
            directive = yield self._progress(sample)
            if directive.kind == "extend":
                self._extend(directive.target_step or 0)
            if self._step >= self._manifest.target_step:
                return self._finish("done", sample)
            if directive.kind == "yield":
                return self._finish("interrupted", sample)
            if directive.kind == "stop":
                return self._finish("stopped", sample)

    # ------------------------------------------------------------ start

    def _start(self) -> None:
        job, manifest = self._job, self._manifest
        if self._inputs.trajectory == "xtc" and manifest.target_step >= 2**31:
            raise InputFailed(f"engine.trajectory: XTC counts no more than 2**31 steps (got {job.steps}). Use 'dcd'.")
        model = self._model = openmm_system.load(job)
        self._seeds = {purpose: job.random_seed(purpose) for purpose in ("velocities", "integrator", "barostat")}
        self._context = openmm_system.make_context(model, self._inputs, self._slot, self._seeds["integrator"])
        facts, exact = openmm_system.facts(model, self._inputs), openmm_system.exact_facts(self._context)
        self._facts = facts | exact
        fresh = not manifest.parts
        if fresh:
            openmm_system.prepare(model, self._inputs, self._slot, self._context, self._seeds["velocities"])
            manifest.seeds = dict(self._seeds)
            self._step = self._saved_step = 0
        else:
            restorer = openmm_checkpoint.Restorer(job, self._job_dir, facts, exact)
            try:
                self._step = self._saved_step = restorer.restore(self._context, manifest)
            finally:
                self._note(*restorer.notes)
        self._begin_part(fresh)

    def _begin_part(self, fresh: bool) -> None:
        every, step, attempt = self._inputs.frame_steps, self._step, attempt_number(self._workdir)
        self._output = Output(self._workdir, self._model, self._inputs, 0 if fresh else (step // every + 1) * every)
        files = self._output.files(self._job_dir)
        self._manifest.parts.append(Part(attempt, step, step, every, files))
        self._manifest.facts |= {f"{attempt}": self._facts}
        self._manifest.state = "running"
        if fresh:
            self._sample(write=True)
            self._save()
        else:
            self._manifest.save(self._job_dir)
            self._last_save = time.perf_counter()

    # ------------------------------------------------------------ the loop

    def _advance(self) -> Sample:
        """Step to the end of the iteration, writing frames on their grid; return what is measured there."""
        size, every = self._job.iteration_steps, self._inputs.frame_steps
        boundary = min((self._step // size + 1) * size, self._manifest.target_step)
        sample = None
        while self._step < boundary:
            stop = min(boundary, (self._step // every + 1) * every)
            self._context.getIntegrator().step(stop - self._step)
            self._step = stop
            on_grid = stop % every == 0
            if on_grid or stop == boundary:
                sample = self._sample(write=on_grid)
        return sample or self._sample(write=False)

    def _sample(self, write: bool) -> Sample:
        assert self._output
        sample = measure(self._context, self._model, self._inputs, self._step)
        sample.check()
        if write:
            self._output.write(sample)
        return sample

    def _progress(self, sample: Sample) -> Progress:
        target = self._manifest.target_step
        left_ns = (target - self._step) * self._inputs.dt_ps / 1000
        remaining_s = left_ns / self._rate * 86400 if self._rate else None
        return Progress(
            self._step, target, self._saved_step, sample.time_ps, self._rate, remaining_s, dict(sample.observables)
        )

    def _extend(self, target_step: int) -> None:
        if target_step > self._manifest.target_step:
            self._manifest.target_step = target_step
            self._manifest.save(self._job_dir)
        else:
            self._note(f"extend to step {target_step} changes nothing: the target is {self._manifest.target_step}")

    def _is_due(self) -> bool:
        """Tell whether to save now: at once where that is cheap, else after a bounded time."""
        cost = self._save_cost_s
        wait_s = min(cost / CHECKPOINT_SHARE, max(CHECKPOINT_S, 20 * cost))
        return time.perf_counter() - self._last_save >= wait_s

    def _save(self) -> None:
        """Accept everything up to this step. The order matters: outputs, saved state, manifest, then the removal."""
        assert self._output
        began = time.perf_counter()
        self._output.sync()
        self._manifest.advance(openmm_checkpoint.save(self._context, self._workdir, self._step, self._facts))
        self._manifest.save(self._job_dir)
        openmm_checkpoint.forget(self._manifest.checkpoints, self._workdir)
        self._saved_step = self._step
        self._last_save = time.perf_counter()
        self._save_cost_s = self._last_save - began

    # ------------------------------------------------------------ the end

    def _finish(self, kind: Literal["done", "stopped", "interrupted"], sample: Sample) -> Outcome:
        if self._saved_step != self._step:
            self._save()
        if kind != "interrupted":
            for role in ("trajectory", "energies"):
                expected, found = stitch.verify(self._job_dir, role)
                if found != expected:
                    raise EngineFailed(f"{self._job_dir}: {role} has {found} of {expected} frames")
        outcome = Outcome(
            kind,
            step=self._step,
            target_step=self._manifest.target_step,
            message="; ".join(self._notes),
            rate_ns_per_day=self._rate,
            observables=dict(sample.observables),
            **self._accepted(),
        )
        return self._manifest.end(outcome, self._job_dir)

    def _accepted(self) -> dict[str, Any]:
        """Return what of the whole job is accepted, in an outcome's fields."""
        ns = self._manifest.accepted_step * self._inputs.dt_ps / 1000
        return {"ns": ns, "frames": len(stitch.expected_steps(self._manifest))}

    def _translated(self, exc: mm.OpenMMException) -> JobFailed:
        kind = openmm_system.failure_kind(str(exc))
        if kind == "unstable":
            return Unstable(f"{exc} Seen after step {self._step}, within {self._inputs.frame_steps} steps.")
        return FAILURES[kind](str(exc))

    def _failed(self, exc: JobFailed) -> Outcome:
        """Keep what is accepted, and say what happened in the manifest and in the outcome."""
        saved = f" (last checkpoint: step {self._manifest.accepted_step})" if self._manifest.parts else ""
        self._note(f"{exc}{saved}")
        outcome = Outcome(
            "failed",
            step=self._step,
            target_step=self._manifest.target_step,
            message="; ".join(self._notes),
            failure=exc.kind,
            **self._accepted(),
        )
        return self._manifest.end(outcome, self._job_dir)

    def _note(self, *lines: str) -> None:
        """Tell the user: in the manifest's events and in the outcome's message."""
        self._notes += lines
        self._manifest.events += [f"attempt {attempt_number(self._workdir)}: {line}" for line in lines]
