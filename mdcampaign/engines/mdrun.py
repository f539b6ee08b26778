"""One `gmx mdrun` process: its command, its environment, what it writes, how it is ended."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mdcampaign.engines.gmx_files import Build, Tpr, no_program
from mdcampaign.engines.mdrun_log import MdrunLog
from mdcampaign.jobs import Slot

STEM = "md"
CHECKPOINT_MIN = 5
"""Minutes between periodic checkpoints where `mdrun_args` do not say: what a kill costs at most."""


class Mdrun:
    """One mdrun in an attempt directory.

    `-noappend` numbers its outputs by simulation part, so that a run neither needs nor touches those of the run
    that it continues; the newest checkpoint is `md.cpt`, the one before `md_prev.cpt`.
    """

    def __init__(self, workdir: Path, *, tpr: Path, part: int, first_step: int, target_step: int) -> None:
        self.workdir, self.tpr, self.part = workdir, tpr, part
        self.first_step, self.target_step = first_step, target_step
        self.log = MdrunLog(self.output("log"), self.output("screen"))
        self.killed = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def checkpoint(self) -> Path:
        """Where mdrun keeps its newest checkpoint."""
        return self.workdir / f"{STEM}.cpt"

    def outputs(self) -> dict[str, Path]:
        """Return the outputs that are there, by role; "structure" is written at the target only."""
        roles = {"trajectory": "xtc", "full_precision": "trr", "energies": "edr", "log": "log", "structure": "gro"}
        return {role: path for role, suffix in roles.items() if (path := self.output(suffix)).is_file()}

    def output(self, suffix: str) -> Path:
        """Return where mdrun writes its output of a kind."""
        return self.workdir / f"{STEM}.part{self.part:04d}.{suffix}"

    def start(self, command: Sequence[str], threads: int) -> None:
        """Start the process, in the process group of its runner, its words going to `md.partNNNN.screen`.

        Raises:
            InputFailed: the program cannot be started.
        """
        with self.output("screen").open("wb") as screen:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=self.workdir,
                    env=_environment(threads),
                    stdin=subprocess.DEVNULL,
                    stdout=screen,
                    stderr=subprocess.STDOUT,
                )
            except OSError as exc:
                raise no_program(command[0], exc) from None

    def ended(self, within_s: float) -> bool:
        """Wait for the end, at most `within_s` seconds; notice it at once where the kernel has pidfds (5.3)."""
        process = self._running()
        try:
            pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(within_s)
            return process.poll() is not None
        try:
            waiter = select.poll()
            waiter.register(pidfd, select.POLLIN)
            waiter.poll(within_s * 1000)
        finally:
            os.close(pidfd)
        return process.poll() is not None

    def end(self, grace_s: float) -> None:
        """Send one TERM (two would end mdrun early), wait for the checkpoint that it writes, then kill."""
        process = self._running()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            if not self.ended(grace_s):
                self.killed = True
                process.kill()
                process.wait()

    @property
    def exit_code(self) -> int:
        """The exit code; minus the number of a signal, also where a wrapping shell reported 128 + signal."""
        code = self._running().returncode
        return 128 - code if 128 < code < 128 + signal.NSIG else code

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process, "mdrun was not started"
        return self._process


def command(
    run: Mdrun,
    build: Build,
    tpr: Tpr,
    slot: Slot,
    gmx: str,
    arguments: Sequence[str],
    report_steps: int,
    cpi: Path | None,
) -> list[str]:
    """Return the command line of a run, as a list.

    What the slot owns (ranks, threads, cores, device) is always said; cores are set from outside, so `-pin off`.
    The device mask is in the environment, so the one visible GPU has number 0.
    """
    line = [gmx, "-nobackup", "mdrun", "-s", str(run.tpr), "-deffnm", STEM, "-noappend", "-pin", "off"]
    line += ["-ntmpi", "1"] if build.mpi == "thread_mpi" else []
    line += ["-ntomp", str(max(slot.threads, 1))]
    line += ["-cpi", str(cpi)] if cpi else []
    line += [] if "-cpt" in arguments else ["-cpt", str(CHECKPOINT_MIN)]
    if build.has_gpu:
        line += ["-gpu_id", "0"] if slot.kind != "cpu" else []
        line += [] if "-nb" in arguments else ["-nb", "cpu" if slot.kind == "cpu" else "gpu"]
    if not 0 < tpr.nstlog <= report_steps and not tpr.minimises:  # the log alone would be too sparse
        line += ["-stepout", str(report_steps)] + ([] if "-v" in arguments else ["-v"])
    return [*line, *arguments]


def _environment(threads: int) -> dict[str, str]:
    """Return this process's environment without what would contradict the command line or litter the directory."""
    own = {"GMX_MAXBACKUP": "-1", "GMX_SUPPRESS_DUMP": "1", "OMP_NUM_THREADS": str(max(threads, 1))}
    return {**os.environ, **own}


def keep(checkpoint: Path, to: Path) -> None:
    """Give a checkpoint a second name that mdrun does not know: it replaces its own by renaming.

    Raises:
        FileNotFoundError: mdrun is just replacing it.
    """
    to.unlink(missing_ok=True)
    try:
        os.link(checkpoint, to)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(checkpoint, to)
