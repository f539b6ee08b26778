"""The accepted checkpoints and parts of a GROMACS job: which one to start from, which ones to add.

mdrun continues any checkpoint under any tpr without a word, and replaces its own as it goes. So each one is accepted
into the manifest under a name of its own, with its checksum and with what steers the dynamics, after the trajectory
up to it was found whole; all of that is compared before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from mdcampaign.engines import xtc
from mdcampaign.engines.gmx_files import Build, Cpt, Tpr, read_checkpoint
from mdcampaign.engines.manifest import Checkpoint, Manifest, Part, Stamp, attempt_number
from mdcampaign.engines.mdrun import Mdrun, keep
from mdcampaign.errors import CheckpointError, EngineFailed, InputFailed


class Checkpoints:
    """What one attempt reads from, and adds to, the manifest of its job."""

    def __init__(
        self,
        manifest: Manifest,
        workdir: Path,
        *,
        gmx: str,
        build: Build,
        tpr: Tpr,
        facts: Mapping[str, str | float],
        note: Callable[[str], None],
    ) -> None:
        self.manifest, self.workdir, self.job_dir = manifest, workdir, workdir.parent
        self.number = attempt_number(workdir)
        self.gmx, self.build, self.tpr, self.facts, self.note = gmx, build, tpr, dict(facts), note
        self._parts_before = len(manifest.parts)
        self._seen = (0, 0)

    # ------------------------------------------------------------ to start from

    def start(self) -> Checkpoint | None:
        """Return the newest checkpoint that can be used, None for the beginning; never the beginning for want of one.

        Raises:
            InputFailed: the checkpoints belong to another simulation.
            EngineFailed: the checkpoints are damaged.
        """
        self._seen = (0, 0)
        chosen = None if self.tpr.minimises else self._newest()  # a minimisation is atomic: begun again
        if chosen is None:
            self.manifest.parts, self.manifest.checkpoints = [], []
        self._parts_before = len(self.manifest.parts)
        return chosen

    def _newest(self) -> Checkpoint | None:
        problems: list[str] = []
        for checkpoint in reversed(self.manifest.checkpoints):
            try:
                path = checkpoint.verify(self.job_dir, self.facts)["checkpoint"]
                if (found := read_checkpoint(self.gmx, path)).step != checkpoint.step:
                    raise CheckpointError(f"{path} is of step {found.step}, not {checkpoint.step}")
                self._check_parts(checkpoint.step)
            except CheckpointError as exc:
                problems.append(str(exc))
                continue
            if problems or checkpoint.step < self.manifest.accepted_step:
                lost = self.manifest.accepted_step - checkpoint.step
                why = "; ".join(problems) or "none was kept since"
                self.note(f"checkpoint fall-back to step {checkpoint.step}, {lost} steps are made again: {why}")
            self.manifest.rewind(checkpoint.step)
            if (version := checkpoint.facts.get("version")) != self.build.version:
                self.note(f"a checkpoint of GROMACS {version} is continued by {self.build.version}: not bitwise")
            return checkpoint
        if not problems and not self.manifest.accepted_step:
            return None
        foreign = any(c.facts.get(key) != fact for c in self.manifest.checkpoints for key, fact in self.facts.items())
        raise (InputFailed if foreign else EngineFailed)(
            f"{self.manifest.accepted_step} steps are done, but no checkpoint can be used: "
            f"{'; '.join(problems) or 'none was kept'}. Nothing was started from step 0; for that, submit the job "
            "under another name."
        )

    def _check_parts(self, step: int) -> None:
        """Raise CheckpointError where the parts before a checkpoint have lost frames that were accepted."""
        for part in self.manifest.parts:
            if part.first_step < step and part.frame_steps:
                path = self.job_dir / part.files["trajectory"]
                missing = missing_frames(path, part.first_step, min(part.accepted_step, step), part.frame_steps)
                if missing:
                    raise CheckpointError(f"the checkpoint at step {step} goes on from what is lost: {missing}")

    # ------------------------------------------------------------ to add

    def accept(self, mdrun: Mdrun, final: bool = False) -> None:
        """Accept the newest checkpoint of a run, where it is new and whole and the trajectory up to it is there.

        The one at the target is accepted only as `final`, when all outputs have been looked at.
        """
        aside = self.workdir / "checkpoint-new.cpt"
        try:
            status = mdrun.checkpoint.stat()
            if self._seen == (seen := (status.st_ino, status.st_mtime_ns)) or mdrun.log.nan_step is not None:
                return
            keep(mdrun.checkpoint, aside)
        except FileNotFoundError:  # there is none yet, or it is just being replaced
            return
        try:
            found = read_checkpoint(self.gmx, aside)
            if found.step >= mdrun.target_step and not final:
                return
            self._seen = seen
            if found.step > max(self.manifest.accepted_step, mdrun.first_step):
                if missing := self.missing(mdrun, found.step):
                    raise CheckpointError(missing)
                self._add(mdrun, found, aside)
        except CheckpointError as exc:
            self._seen = seen
            self.note(f"a new checkpoint was not accepted: {exc}")
        finally:
            aside.unlink(missing_ok=True)

    def _add(self, mdrun: Mdrun, found: Cpt, aside: Path) -> None:
        path = aside.rename(self.workdir / f"checkpoint-{found.step}.cpt")
        facts = {**self.facts, "version": self.build.version, "precision": self.build.precision, "part": found.part}
        before = self.manifest.checkpoints
        self._part(mdrun, found.step)
        self.manifest.advance(Checkpoint(self.number, found.step, {"checkpoint": Stamp.of(self.job_dir, path)}, facts))
        self.manifest.save(self.job_dir)
        for checkpoint in before:
            if checkpoint.attempt == self.number and checkpoint not in self.manifest.checkpoints:
                (self.job_dir / checkpoint.files["checkpoint"].path).unlink(missing_ok=True)

    def accept_target(self, mdrun: Mdrun) -> None:
        """Accept a run that has reached its target, with all that it wrote; to be called when that has been judged."""
        self.accept(mdrun, final=True)
        self._part(mdrun, mdrun.target_step)
        self.manifest.save(self.job_dir)

    def _part(self, mdrun: Mdrun, step: int) -> None:
        files = {role: str(path.relative_to(self.job_dir)) for role, path in mdrun.outputs().items()}
        part = Part(self.number, mdrun.first_step, step, self.tpr.frame_steps, files)
        self.manifest.parts[self._parts_before :] = [part]

    def missing(self, mdrun: Mdrun, step: int) -> str:
        """Return what the trajectory of a run lacks up to a step, or ""."""
        if not (every := self.tpr.frame_steps):
            return ""
        return missing_frames(mdrun.output("xtc"), mdrun.first_step, step, every)


def missing_frames(path: Path, after: int, step: int, every: int) -> str:
    """Return what an xtc lacks of the frames after one step (from 0: with the frame of step 0) up to another, or ""."""
    if not path.is_file():
        return f"{path} is missing"
    there = {frame.step % 2**32 for frame in xtc.frames(path)}  # 32 bits on disk
    wanted = range(after // every * every + every if after else 0, step + 1, every)
    missing = [step for step in wanted if step % 2**32 not in there]
    return f"{path} lacks {len(missing)} of {len(wanted)} frames, the first at step {missing[0]}" if missing else ""
