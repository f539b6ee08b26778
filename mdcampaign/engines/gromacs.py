"""GROMACS: `gmx mdrun` from a run input file (tpr), on the generator contract.

Iterations are seen, not made: mdrun runs on its own while its log is read, and a directive is answered within about
a second. Yield and stop are one TERM, at which mdrun writes a checkpoint and ends; a longer target is reached by a
second mdrun, in the same attempt, from the end of the first.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from mdcampaign.engines import stitch
from mdcampaign.engines.base import Capabilities, Iterations
from mdcampaign.engines.gmx_files import check_energies, read_build, read_tpr, set_length
from mdcampaign.engines.inputs import GROMACS
from mdcampaign.engines.manifest import Checkpoint, Manifest, attempt_number
from mdcampaign.engines.mdrun import Mdrun, command
from mdcampaign.engines.mdrun_checkpoints import Checkpoints
from mdcampaign.errors import EngineFailed, FailureKind, InputFailed, JobFailed
from mdcampaign.jobs import CONTINUE, Directive, DirectiveKind, MDJob, Outcome, Progress, Slot, file_sha256

POLL_S = 0.25
"""How often the log is looked at; the end of mdrun is noticed at once."""
REPORT_S = 0.75
"""A report is due this long after the last one even within an iteration, so that directives are seen in a second."""
CHECKPOINT_POLL_S = 1.0
"""How often to look for a new periodic checkpoint."""
NS_PER_DAY = 86400 / 1000
"""ns/day in one ps/s."""

OBSERVABLES = {
    "Potential": "potential_kj_mol",
    "Total Energy": "total_energy_kj_mol",
    "Temperature": "temperature_k",
    "Pressure (bar)": "pressure_bar",
    "Density": "density_kg_m3",
}
"""GROMACS's names of the energies that are reported, and ours."""

Ending = Literal["done", "stopped", "interrupted", "failed"]

FROM_OUTSIDE = frozenset({-signal.SIGHUP, -signal.SIGINT, -signal.SIGKILL, -signal.SIGTERM})
"""Exit codes that mean that somebody ended mdrun: it sends itself none of these signals."""


class GROMACSEngine:
    """Runs `MDJob(engine=GROMACS(...))`.

    Args:
        gmx: the program that `probe` asks; `run` takes the job's own.
        grace_s: how long mdrun may take to write its last checkpoint before it is killed.
    """

    def __init__(self, gmx: str = "gmx", *, grace_s: float = 60.0) -> None:
        self.gmx = gmx
        self.grace_s = grace_s

    def probe(self) -> Capabilities:
        """Return what `gmx --version` says. Never raises."""
        try:
            build = read_build(self.gmx)
        except InputFailed as exc:
            return Capabilities("gromacs", problem=str(exc))
        platforms = (build.gpu, "CPU") if build.has_gpu else ("CPU",)
        facts = {"precision": build.precision, "mpi": build.mpi, "simd": build.simd}
        return Capabilities("gromacs", build.version, platforms, build.has_gpu, facts=facts)

    def run(self, job: MDJob, slot: Slot, workdir: Path) -> Iterations:
        """Run the job in a fresh attempt directory; closing the generator ends mdrun as a yield would."""
        attempt = _Attempt(job, slot, workdir, self.grace_s)
        try:
            return (yield from attempt.run())
        except JobFailed as exc:
            return attempt.ended("failed", str(exc), exc.kind)


class _Attempt:
    """One attempt: mdrun begun, watched and judged."""

    def __init__(self, job: MDJob, slot: Slot, workdir: Path, grace_s: float) -> None:
        assert isinstance(job.engine, GROMACS), "the driver gives each engine its own jobs"
        self.job, self.slot, self.workdir, self.grace_s = job, slot, workdir, grace_s
        self.inputs = job.engine
        self.number = attempt_number(workdir)
        self.manifest = Manifest.open(job, workdir)
        self.notes: list[str] = []
        self.dt_ps = 0.0
        self.rate: float | None = None
        self.observables: dict[str, float] = {}

    def run(self) -> Iterations:
        self.checkpoints = self._look_around()
        if self.manifest.accepted_step >= self.manifest.target_step:  # mdrun would only write the last frame again
            return self.ended("done", f"step {self.manifest.accepted_step} was reached before")
        self.manifest.state = "running"
        while True:
            mdrun = self._begin(self.checkpoints.start())
            try:
                wish = yield from self._watch(mdrun)
            finally:
                if mdrun.alive:  # closed from outside, or an error of ours
                    mdrun.end(self.grace_s)
                    self.checkpoints.accept(mdrun)
            if outcome := self._judge(mdrun, wish):
                return outcome

    # ------------------------------------------------------------ before mdrun

    def _look_around(self) -> Checkpoints:
        """Ask for the build and the tpr, refuse what cannot run, and record what was found."""
        if left := next(self.workdir.glob("md.*"), None):
            raise EngineFailed(f"{left} is there already: an attempt needs a directory of its own")
        gmx, path = self.inputs.gmx, self.inputs.tpr
        self.build = build = read_build(gmx)
        if self.slot.kind != "cpu" and not build.has_gpu:
            raise InputFailed(
                f"engine.gmx: {gmx!r} (GROMACS {build.version}) was built without GPU support, and the slot is on a "
                "GPU. Load a GPU build, or submit to CPU slots."
            )
        self.tpr = tpr = read_tpr(gmx, path)
        if tpr.init_step:
            raise InputFailed(
                f"engine.tpr: init-step is {tpr.init_step}, but a job counts its steps from 0. Set init-step = 0."
            )
        self.dt_ps = 0.0 if tpr.minimises else tpr.dt_ps
        facts = {**tpr.steering(), "tpr_sha256": file_sha256(path)}
        checkpoints = Checkpoints(
            self.manifest, self.workdir, gmx=gmx, build=build, tpr=tpr, facts=facts, note=self.note
        )
        self.manifest.seeds = {"ld-seed": tpr.ld_seed}
        self.manifest.facts |= {"tpr": asdict(tpr), "gromacs": asdict(build), **facts}
        if (self.job.replica or self.job.seed) and not self.manifest.parts:
            self.note(
                f"replica={self.job.replica} and seed={self.job.seed} change nothing: a tpr holds its own velocities "
                f"and seeds (ld-seed {tpr.ld_seed}); make one tpr per replica"
            )
        return checkpoints

    def _begin(self, start: Checkpoint | None) -> Mdrun:
        """Start mdrun from a checkpoint, or from the tpr, with a tpr of the target length."""
        gmx, tpr, target = self.inputs.gmx, self.inputs.tpr, self.manifest.target_step
        if self.tpr.steps != target:
            tpr = self.workdir / f"length-{target}.tpr"
            set_length(gmx, self.inputs.tpr, target, tpr)
        part, first = (int(start.facts["part"]) + 1, start.step) if start else (self.tpr.part, 0)
        mdrun = Mdrun(self.workdir, tpr=tpr, part=part, first_step=first, target_step=target)
        cpi = self.workdir.parent / start.files["checkpoint"].path if start else None
        line = command(
            mdrun, self.build, self.tpr, self.slot, gmx, self.inputs.mdrun_args, self.job.iteration_steps, cpi
        )
        self.manifest.facts.setdefault("runs", []).append(
            {"attempt": self.number, "version": self.build.version, "tpr_sha256": file_sha256(tpr), "command": line}
        )
        self.manifest.save(self.workdir.parent)
        self.first_seen: tuple[int, float] | None = None
        mdrun.start(line, self.slot.threads)
        return mdrun

    # ------------------------------------------------------------ while it runs

    def _watch(self, mdrun: Mdrun) -> Generator[Progress, Directive, DirectiveKind]:
        """Report until mdrun ends; return the directive that ended it, or "continue"."""
        reported, reported_at = mdrun.first_step, time.monotonic()
        looked_at = reported_at
        while not mdrun.ended(POLL_S):
            mdrun.log.read()
            now, step = time.monotonic(), max(mdrun.log.step, mdrun.first_step)
            if mdrun.log.nan_step is not None:
                mdrun.end(self.grace_s)
                break
            if now - looked_at >= CHECKPOINT_POLL_S:
                looked_at = now
                self.checkpoints.accept(mdrun)
            if step - reported < self.job.iteration_steps and now - reported_at < REPORT_S:
                continue
            reported, reported_at = step, now
            directive = (yield self._progress(mdrun, step, now)) or CONTINUE
            if directive.kind in ("yield", "stop"):
                mdrun.end(self.grace_s)
                mdrun.log.read_all()
                return directive.kind
            if directive.kind == "extend":
                self._extend(directive.target_step or 0)
        mdrun.log.read_all()
        return "continue"

    def _extend(self, target_step: int) -> None:
        """Take a longer target; the next mdrun goes on to it."""
        if target_step > self.manifest.target_step and not self.tpr.minimises:
            self.manifest.target_step = target_step
            self.manifest.save(self.workdir.parent)
        else:
            self.note(f"extend to step {target_step} changes nothing: the target is {self.manifest.target_step}")

    def _progress(self, mdrun: Mdrun, step: int, now: float) -> Progress:
        """Return a report; the rate is taken from the first step that was seen, so without the start-up of mdrun."""
        energies, remaining_s = mdrun.log.energies, None
        self.observables = {ours: energies[theirs] for theirs, ours in OBSERVABLES.items() if theirs in energies}
        if step > mdrun.first_step and not self.tpr.minimises:
            first, then = self.first_seen = self.first_seen or (step, now)
            if step > first:
                steps_per_s = (step - first) / (now - then)
                self.rate = steps_per_s * self.tpr.dt_ps * NS_PER_DAY
                remaining_s = (self.manifest.target_step - step) / steps_per_s
        return Progress(
            step,
            self.manifest.target_step,
            self.manifest.accepted_step,
            time_ps=None if self.tpr.minimises else self.tpr.first_time_ps + step * self.tpr.dt_ps,
            rate_ns_per_day=self.rate,
            remaining_s=remaining_s,
            observables=self.observables,
        )

    # ------------------------------------------------------------ when it has ended

    def _judge(self, mdrun: Mdrun, wish: DirectiveKind) -> Outcome | None:
        """Return how the attempt ended, by content; None where it goes on to a longer target."""
        log, code = mdrun.log, mdrun.exit_code
        step = max(log.step, mdrun.first_step)
        if log.nan_step is not None:
            return self.ended("failed", f"energies are not finite at step {log.nan_step}; {log.quote()}", "unstable")
        complete = log.finished and code == 0 and (step >= mdrun.target_step or self.tpr.minimises)
        problem = self._incomplete(mdrun) if complete else ""
        if complete and not problem:
            return self._done(mdrun)
        self.checkpoints.accept(mdrun)
        how = "was killed after its grace time" if mdrun.killed else f"ended at step {step}"
        if (log.signalled and log.finished) or code in FROM_OUTSIDE:
            words = {"yield": "yielded", "stop": "stopped"}.get(wish, "ended from outside")
            return self.ended("stopped" if wish == "stop" else "interrupted", f"{words}; mdrun {how}")
        if code == 0:
            short = f"mdrun ended without an error, but {problem or f'at step {step} of {mdrun.target_step}'}"
            if self.manifest.accepted_step > mdrun.first_step:
                return self.ended("interrupted", short)
            return self.ended("failed", f"{short}; {log.quote()}", "engine")
        return self._failed(mdrun, step)

    def _incomplete(self, mdrun: Mdrun) -> str:
        """Return what a run that says it has finished lacks, or ""."""
        outputs = mdrun.outputs()
        if absent := {"log", "energies", "structure"} - outputs.keys():
            return f"without {', '.join(sorted(absent))}"
        return (
            self.checkpoints.missing(mdrun, mdrun.target_step)
            or check_energies(self.inputs.gmx, outputs["energies"])
            or ("" if outputs["structure"].stat().st_size else f"{outputs['structure'].name} is empty")
        )

    def _done(self, mdrun: Mdrun) -> Outcome | None:
        """Accept everything up to the target; return None where the target has moved meanwhile."""
        self.checkpoints.accept_target(mdrun)
        if self.manifest.target_step > mdrun.target_step:
            return None
        self.rate = mdrun.log.performance or self.rate
        return self.ended("done", "; ".join(mdrun.log.notes))

    def _failed(self, mdrun: Mdrun, step: int) -> Outcome:
        """Return the failure that the evidence speaks for."""
        code, evidence = mdrun.exit_code, mdrun.log.strongest()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = f"mdrun ended by {how} after step {step}: {mdrun.log.quote(evidence)}"
        if evidence == "disk":
            return self.ended("interrupted", f"disk full; {text}")
        if evidence is None or evidence == "checkpoint":
            return self.ended("failed", text, "crashed" if code < 0 else "engine")
        return self.ended("failed", text, evidence)

    def ended(self, kind: Ending, message: str, failure: FailureKind | None = None) -> Outcome:
        """Record the end of the attempt; return its outcome, which counts what is accepted of the whole job."""
        manifest = self.manifest
        if kind == "failed":
            manifest.events.append(f"attempt {self.number}: failed; {message}")
        outcome = Outcome(
            kind,
            manifest.accepted_step,
            manifest.target_step,
            "; ".join(filter(None, [*self.notes, message])),
            failure,
            ns=manifest.accepted_step * self.dt_ps / 1000,
            frames=len(stitch.expected_steps(manifest)),
            rate_ns_per_day=self.rate,
            observables=self.observables,
        )
        return manifest.end(outcome, self.workdir.parent)

    def note(self, event: str) -> None:
        """Tell the user: in the manifest's events and in the outcome's message."""
        self.notes.append(event)
        self.manifest.events.append(f"attempt {self.number}: {event}")
