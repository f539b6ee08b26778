"""The accepted frames of a job, across its parts, by one rule.

Of each part: the frames after the step that it started from, up to its accepted step, on the grid of the output; from
the first part also step 0; each once. So what a killed attempt wrote beyond its last checkpoint (the next attempt
writes it again), what a yield wrote off the grid and what a resumed run repeats are left out, in every format alike.
Formats: dcd, xtc and csv (a first column `step`), told by the ending of the file's name.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from mdcampaign.engines import dcd, xtc
from mdcampaign.engines.manifest import Manifest, Part
from mdcampaign.errors import CampaignError


@dataclass(frozen=True)
class Frame:
    """One frame (or row): its step from the start of the job, its time in ps, and its bytes in a file."""

    step: int
    time_ps: float
    path: Path
    offset: int
    size: int


def frames(job_dir: Path | str, role: str = "trajectory") -> list[Frame]:
    """Return the accepted frames of a job, one every `frame_steps` from step 0, none missing.

    Raises:
        CampaignError: the job has no manifest or no such files, a frame is missing, or times are uneven.
    """
    job_dir = Path(job_dir)
    manifest = _manifest(job_dir)
    expected = expected_steps(manifest, role)
    if not expected:
        raise CampaignError(f"{job_dir}: no accepted {role}")
    found = list(_accepted(job_dir, manifest, role))
    for step, frame in zip(expected, found):
        if frame.step != step:
            raise CampaignError(f"{job_dir}: the frame of step {step} is missing; {frame.path} goes on at {frame.step}")
    if len(found) != len(expected):
        raise CampaignError(f"{job_dir}: {role} has {len(found)} of {len(expected)} frames")
    _check_times(job_dir, found)
    return found


def verify(job_dir: Path | str, role: str = "trajectory") -> tuple[int, int]:
    """Return how many frames the accepted steps call for, and how many are there; (0, 0) if the job writes none."""
    job_dir = Path(job_dir)
    manifest = _manifest(job_dir)
    expected = expected_steps(manifest, role)
    wanted = set(expected)
    return len(expected), sum(frame.step in wanted for frame in _accepted(job_dir, manifest, role))


def expected_steps(manifest: Manifest, role: str = "trajectory") -> range:
    """Return the steps at which the accepted part of a job has frames; empty where it writes none."""
    if not any(role in part.files and part.frame_steps for part in manifest.parts):
        return range(0)
    return range(0, manifest.accepted_step + 1, manifest.parts[-1].frame_steps)


def write(job_dir: Path | str, out: Path | str, role: str = "trajectory") -> int:
    """Write the accepted frames as one file of the same format; return their number.

    Frames are copied as they are: coordinates, boxes and periodic images stay those that the engine wrote.

    Raises:
        CampaignError: as `frames`.
    """
    accepted = frames(job_dir, role)
    kinds = {frame.path.suffix for frame in accepted}
    if len(kinds) > 1:
        raise CampaignError(f"{job_dir}: parts of several formats ({', '.join(sorted(kinds))}) cannot be one file")
    with Path(out).open("wb") as file:
        file.write(_head(accepted[0], _manifest(Path(job_dir)).parts[-1].frame_steps, len(accepted)))
        for chunk in _chunks(accepted):
            file.write(chunk)
    return len(accepted)


def read_csv(job_dir: Path | str, role: str = "energies") -> dict[str, list[float]]:
    """Return the accepted rows of a csv role as columns.

    Raises:
        CampaignError: as `frames`.
    """
    accepted = frames(job_dir, role)
    names = next(csv.reader([_csv_head(accepted[0].path).decode()]))
    rows = [[float(value) for value in chunk.split(b",")] for chunk in _chunks(accepted)]
    return {name: list(column) for name, column in zip(names, zip(*rows))}


def _manifest(job_dir: Path) -> Manifest:
    manifest = Manifest.load(job_dir)
    if manifest is None:
        raise CampaignError(f"{job_dir} has no manifest: no part of the job is accepted yet")
    return manifest


def _accepted(job_dir: Path, manifest: Manifest, role: str) -> Iterator[Frame]:
    """Yield what the rule accepts of each part, strictly increasing."""
    last = -1
    for number, part in enumerate(manifest.parts):
        if role not in part.files or not part.frame_steps:
            continue
        path = job_dir / part.files[role]
        first = -1 if number == 0 and part.first_step == 0 else part.first_step
        for frame in _read(path, part):
            if first < frame.step <= part.accepted_step and frame.step % part.frame_steps == 0 and frame.step > last:
                last = frame.step
                yield frame


def _read(path: Path, part: Part) -> Iterable[Frame]:
    """Return every frame of a file; none of a file that is missing or is not what its name says."""
    try:
        reader = READERS[path.suffix]
    except KeyError:
        raise CampaignError(f"{path}: cannot stitch {path.suffix!r} files, only {', '.join(READERS)}") from None
    try:
        return list(reader(path, part))
    except (FileNotFoundError, ValueError):
        return ()


def _read_dcd(path: Path, part: Part) -> Iterator[Frame]:
    index = dcd.index(path, part.frame_steps)
    header = index.header
    for n in range(index.n_frames):
        step = header.first_step + n * header.interval
        yield Frame(step, step * header.dt_ps, path, index.offset + n * header.frame_bytes, header.frame_bytes)


def _read_xtc(path: Path, part: Part) -> Iterator[Frame]:
    step = part.first_step
    for frame in xtc.frames(path):
        step += (frame.step - step + 2**31) % 2**32 - 2**31  # 32 bits on disk; frames are nearer than 2**31 steps
        yield Frame(step, frame.time_ps, path, frame.offset, frame.size)


def _read_csv(path: Path, part: Part) -> Iterator[Frame]:
    with path.open("rb") as file:
        names = file.readline().decode().strip().split(",")
        time_at = names.index("time_ps") if "time_ps" in names else None
        offset = file.tell()
        for line in file:
            if not line.endswith(b"\n"):
                return
            values = line.split(b",")
            yield Frame(int(values[0]), float(values[time_at]) if time_at else 0.0, path, offset, len(line))
            offset += len(line)


READERS: dict[str, Callable[[Path, Part], Iterator[Frame]]] = {".dcd": _read_dcd, ".xtc": _read_xtc, ".csv": _read_csv}


def _check_times(job_dir: Path, accepted: list[Frame]) -> None:
    """Raise where time does not grow evenly with the step; files store it as a 32-bit float."""
    if len(accepted) < 2:
        return
    start, spacing = accepted[0].time_ps, (accepted[-1].time_ps - accepted[0].time_ps) / (len(accepted) - 1)
    for n, frame in enumerate(accepted):
        if abs(frame.time_ps - start - n * spacing) > 1e-3 * spacing + 2.5e-7 * abs(accepted[-1].time_ps):
            raise CampaignError(
                f"{job_dir}: {frame.path} has time {frame.time_ps} ps at step {frame.step}, "
                f"where frames {spacing} ps apart call for {start + n * spacing}"
            )


def _head(first: Frame, frame_steps: int, n_frames: int) -> bytes:
    """Return what stands before the frames of a stitched file."""
    if first.path.suffix == ".csv":
        return _csv_head(first.path)
    if first.path.suffix == ".dcd":
        return replace(dcd.index(first.path, frame_steps).header, first_step=first.step).pack(n_frames)
    return b""


def _csv_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _chunks(accepted: list[Frame]) -> Iterator[bytes]:
    """Yield the bytes of each frame, with one open file at a time."""
    path, file = None, None
    try:
        for frame in accepted:
            if frame.path != path:
                if file:
                    file.close()
                path, file = frame.path, frame.path.open("rb")
            assert file is not None
            file.seek(frame.offset)
            yield file.read(frame.size)
    finally:
        if file:
            file.close()
