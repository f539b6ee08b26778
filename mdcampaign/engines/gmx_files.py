"""What `gmx` tells of itself, of a run input file (tpr) and of a checkpoint (cpt).

Everything is asked of the program, so that no binary format of GROMACS is known here.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from mdcampaign.errors import CheckpointError, InputFailed

TIME_LIMIT_S = 120.0
"""For one question to `gmx`: a guard against a hung file system; answers take milliseconds to seconds."""

HEAD_LINES = 1000
"""Lines of a dump that are kept."""

MINIMISERS = frozenset({"steep", "cg", "l-bfgs"})


@dataclass(frozen=True)
class Build:
    """A build of GROMACS, in the words of `gmx --version`. `gpu` is "disabled", "CUDA", "SYCL", ..."""

    version: str
    precision: str = "mixed"
    mpi: str = "thread_mpi"
    gpu: str = "disabled"
    simd: str = ""

    @property
    def has_gpu(self) -> bool:
        """Whether this build can use GPUs at all."""
        return self.gpu != "disabled"


@dataclass(frozen=True)
class Tpr:
    """What a run input file says of the run; periods (`nst...`) are in steps, 0 for never."""

    integrator: str
    dt_ps: float
    steps: int
    init_step: int
    first_time_ps: float
    part: int
    atoms: int
    nstlog: int
    nstenergy: int
    nstxout: int
    nstxout_compressed: int
    ld_seed: int
    tcoupl: str
    pcoupl: str
    ref_t_k: str

    @property
    def minimises(self) -> bool:
        """Whether this is a minimisation: atomic, without checkpoints, ended by convergence."""
        return self.integrator in MINIMISERS

    @property
    def frame_steps(self) -> int:
        """Steps between two frames of the trajectory, which is the xtc."""
        return 0 if self.minimises else self.nstxout_compressed

    def steering(self) -> dict[str, str | float]:
        """Return what a checkpoint must share with the tpr it is continued under; mdrun compares none of it."""
        return {key: getattr(self, key) for key in ("integrator", "dt_ps", "tcoupl", "ref_t_k", "pcoupl")}


@dataclass(frozen=True)
class Cpt:
    """What a checkpoint says of itself; the run that continues it writes simulation part `part + 1`."""

    step: int
    part: int


def read_build(gmx: str) -> Build:
    """Return what `gmx --version` says.

    Raises:
        InputFailed: there is no such program, or it is not GROMACS.
    """
    answer = _run(gmx, "--version", quiet=False)
    said = dict(re.findall(r"^(\w[\w ]*?): +(\S.*?) *$", answer.stdout, re.MULTILINE))
    if answer.returncode or "GROMACS version" not in said:
        raise InputFailed(f"engine.gmx: {gmx!r} does not answer --version as GROMACS does: {_why(answer.stderr)}")
    names = {"precision": "Precision", "mpi": "MPI library", "gpu": "GPU support", "simd": "SIMD instructions"}
    return Build(said["GROMACS version"], **{key: said[name] for key, name in names.items() if name in said})


def read_tpr(gmx: str, path: Path) -> Tpr:
    """Return the facts of a run input file, reading no more of the dump than its head.

    Raises:
        InputFailed: the file is missing, no tpr, damaged, or of a newer GROMACS.
    """
    head, error = _dump(gmx, "-s", path, until="topology:")
    said = dict(re.findall(r"^ *([\w-]+?)(?: *= *|: +)(.*?) *$", head, re.MULTILINE))
    try:
        return Tpr(
            integrator=said["integrator"],
            dt_ps=float(said["dt"]),
            steps=int(said["nsteps"]),
            init_step=int(said["init-step"]),
            first_time_ps=float(said["tinit"]),
            part=int(said["simulation-part"]),
            atoms=int(said["natoms"]),
            nstlog=int(said["nstlog"]),
            nstenergy=int(said["nstenergy"]),
            nstxout=int(said["nstxout"]),
            nstxout_compressed=int(said["nstxout-compressed"]),
            ld_seed=int(said["ld-seed"]),
            tcoupl=said["tcoupl"],
            pcoupl=said["pcoupl"],
            ref_t_k=" ".join(said["ref-t"].split()),
        )
    except (KeyError, ValueError) as exc:
        reason = _why(error) or f"its dump gives no {exc}"
        raise InputFailed(f"engine.tpr: {path} cannot be read as a run input file: {reason}") from None


def read_checkpoint(gmx: str, path: Path) -> Cpt:
    """Return the head of a checkpoint after reading the whole of it.

    Raises:
        CheckpointError: the file is missing, truncated, or no checkpoint.
    """
    try:
        head, error = _dump(gmx, "-cp", path)
    except InputFailed as exc:
        raise CheckpointError(str(exc)) from None
    step = re.search(r"^step = (\d+)$", head, re.MULTILINE)
    part = re.search(r"^simulation part # = (\d+)$", head, re.MULTILINE)
    if error or not step or not part:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {_why(error) or 'no step in it'}")
    return Cpt(int(step[1]), int(part[1]))


def set_length(gmx: str, tpr: Path, steps: int, to: Path) -> None:
    """Write a copy of a tpr with another length (`mdrun -nsteps` is deprecated, and counts from the checkpoint)."""
    answer = _run(gmx, "convert-tpr", "-s", str(tpr), "-nsteps", str(steps), "-o", str(to))
    if answer.returncode or not to.is_file():
        raise InputFailed(f"engine.tpr: convert-tpr cannot set the length of {tpr}: {_why(answer.stderr)}")


def check_energies(gmx: str, path: Path) -> str:
    """Return what is wrong with an energy file, or ""."""
    answer = _run(gmx, "check", "-e", str(path))
    return f"{path.name} cannot be read: {_why(answer.stderr)}" if answer.returncode else ""


def _run(gmx: str, *arguments: str, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    command = [gmx, *(("-quiet", "-nobackup") if quiet else ()), *arguments]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=TIME_LIMIT_S
        )
    except OSError as exc:
        raise no_program(gmx, exc) from None
    except subprocess.TimeoutExpired:
        raise InputFailed(f"`{' '.join(command)}` gave no answer in {TIME_LIMIT_S:g} s") from None


def _dump(gmx: str, option: str, path: Path, until: str | None = None) -> tuple[str, str]:
    """Return the head of a dump, and what it said on stderr if it failed.

    With `until`, the dump is ended at that line; without, it is read to its end but only its head is kept: a dump
    of a million atoms is hundreds of megabytes.
    """
    command = [gmx, "-quiet", "dump", option, str(path)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as exc:
        raise no_program(gmx, exc) from None
    guard = Timer(TIME_LIMIT_S, process.kill)
    guard.daemon = True
    guard.start()
    head: list[str] = []
    try:
        with process:
            assert process.stdout and process.stderr
            for line in process.stdout:
                if until and line.startswith(until):
                    process.kill()
                    return "".join(head), ""
                if len(head) < HEAD_LINES:
                    head.append(line)
            error = process.stderr.read(100_000)
    finally:
        guard.cancel()
    return "".join(head), (error or f"exit code {process.returncode}") if process.returncode else ""


def no_program(gmx: str, exc: OSError) -> InputFailed:
    """Return the error of a program that cannot be started."""
    return InputFailed(
        f"engine.gmx: cannot run {gmx!r} ({exc.strerror}). Load the GROMACS module on the node, or give its path."
    )


def _why(stderr: str) -> str:
    """Return the sentence in GROMACS's error box, or the last lines of what it said."""
    return error_box(stderr) or " / ".join(line.strip() for line in stderr.splitlines()[-3:] if line.strip())


def error_box(text: str) -> str:
    """Return the message of GROMACS's last error box in one line, or ""."""
    boxes = re.findall(r"^Program: .*?\n\s*\n(.*?)\n\s*\nFor more information", text, re.DOTALL | re.MULTILINE)
    return " ".join(boxes[-1].split()) if boxes else ""
