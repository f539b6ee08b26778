"""One rule for the frames of all parts: each once, in order, evenly spaced, or an error that says what is missing."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mdcampaign.engines import dcd, stitch, xtc
from mdcampaign.engines.manifest import Manifest, Part
from mdcampaign.errors import CampaignError

EVERY = 10
DT_PS = 0.002
N_ATOMS = 12


def positions(step: int, attempt: int = 0) -> np.ndarray:
    """Return positions that tell the step and the attempt apart."""
    return np.full((N_ATOMS, 3), step / 1000 + attempt, dtype=np.float32)


def write_part(job_dir: Path, kind: str, attempt: int, steps: list[int], tail: bytes = b"") -> str:
    """Write a part's file with frames at these steps, then `tail`, as a killed writer leaves it."""
    path = job_dir / f"attempt-{attempt}" / f"trajectory.{kind}"
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "dcd":
        header = dcd.Header(N_ATOMS, steps[0] if steps else 0, EVERY, DT_PS, periodic=False)
        data = header.pack() + b"".join(dcd.frame(positions(step, attempt), None) for step in steps)
        path.write_bytes(data + tail)
    elif kind == "csv":
        rows = [f"{step},{step * DT_PS:.6g},{attempt}.5\n" for step in steps]
        path.write_bytes(("step,time_ps,x\n" + "".join(rows)).encode() + tail)
    else:
        path.touch()
        for step in steps:
            write_xtc_frame(path, step, step * DT_PS, attempt)
        with path.open("ab") as file:
            file.write(tail)
    return str(path.relative_to(job_dir))


def write_xtc_frame(path: Path, step: int, time_ps: float, attempt: int = 0) -> None:
    from openmm.app.internal.xtc_utils import xtc_write_frame

    box = np.zeros((3, 3), dtype=np.float32)
    xtc_write_frame(str(path).encode(), positions(step, attempt), box, np.float32(time_ps), np.int32(step))


def save_manifest(job_dir: Path, parts: list[Part]) -> None:
    Manifest("j", "id", "test", 1000, parts=parts).save(job_dir)


def killed_and_resumed(job_dir: Path, kind: str) -> None:
    """Make a job whose first attempt was killed beyond its checkpoint at step 45, amid a frame."""
    tails = {"dcd": b"\0" * 17, "csv": b"80,0.16", "xtc": struct.pack(">2i", 1995, N_ATOMS) + b"\0" * 9}
    first = write_part(job_dir, kind, 1, [0, 10, 20, 30, 40, 50, 60, 70], tails[kind])
    second = write_part(job_dir, kind, 2, [50, 60, 70, 80])
    save_manifest(
        job_dir,
        [Part(1, 0, 45, EVERY, {"trajectory": first}), Part(2, 45, 80, EVERY, {"trajectory": second})],
    )


@pytest.mark.parametrize("kind", ["dcd", "xtc", "csv"])
def test_frames_beyond_a_checkpoint_come_from_the_next_part(tmp_path: Path, kind: str) -> None:
    """W9: frames == steps / interval, from step 0, each once."""
    killed_and_resumed(tmp_path, kind)

    found = stitch.frames(tmp_path)

    assert [frame.step for frame in found] == list(range(0, 81, 10))
    assert [frame.path.parent.name for frame in found] == ["attempt-1"] * 5 + ["attempt-2"] * 4
    assert [frame.time_ps for frame in found] == pytest.approx([step * DT_PS for step in range(0, 81, 10)])
    assert stitch.verify(tmp_path) == (9, 9)


@pytest.mark.parametrize("kind", ["dcd", "xtc", "csv"])
def test_a_stitched_file_equals_one_that_was_never_interrupted(tmp_path: Path, kind: str) -> None:
    steps = list(range(0, 81, 10))
    whole = write_part(tmp_path / "whole", kind, 0, steps)
    save_manifest(tmp_path / "whole", [Part(0, 0, 80, EVERY, {"trajectory": whole})])
    parts = []
    for first, last in ((0, 30), (30, 50), (50, 80)):
        directory = tmp_path / "parts" / f"attempt-{first}"
        directory.mkdir(parents=True)
        path = directory / f"trajectory.{kind}"
        own = write_part(tmp_path / "x", kind, 0, [s for s in steps if first < s or s == 0 == first])
        path.write_bytes((tmp_path / "x" / own).read_bytes())
        parts.append(Part(first, first, last, EVERY, {"trajectory": str(path.relative_to(tmp_path / "parts"))}))
    save_manifest(tmp_path / "parts", parts)

    for name in ("whole", "parts"):
        assert stitch.write(tmp_path / name, tmp_path / f"{name}.{kind}") == 9

    assert (tmp_path / f"whole.{kind}").read_bytes() == (tmp_path / f"parts.{kind}").read_bytes()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["csv", "dcd"]))
def test_any_way_of_interrupting_gives_the_grid(
    data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Attempts that end anywhere, and write any number of frames beyond what is accepted of them."""
    job_dir = tmp_path_factory.mktemp("job")
    parts, at = [], 0
    for attempt in range(1, data.draw(st.integers(1, 6)) + 1):
        accepted = at + data.draw(st.integers(0, 45))
        beyond = data.draw(st.integers(0, 3)) * EVERY
        start = 0 if attempt == 1 else (at // EVERY + 1) * EVERY
        steps = list(range(start, accepted + beyond + 1, EVERY))
        path = write_part(job_dir, kind, attempt, steps, tail=b"5" if beyond else b"")
        parts.append(Part(attempt, at, accepted, EVERY, {"trajectory": path}))
        at = accepted
    save_manifest(job_dir, parts)

    assert [frame.step for frame in stitch.frames(job_dir)] == list(range(0, at + 1, EVERY))


def test_rows_off_the_grid_and_repeated_rows_are_left_out(tmp_path: Path) -> None:
    """A yield writes one off the grid; resuming a finished run repeats its last."""
    first = write_part(tmp_path, "csv", 1, [0, 10, 20, 25])
    second = write_part(tmp_path, "csv", 2, [20, 25, 30, 30, 40])
    save_manifest(tmp_path, [Part(1, 0, 25, EVERY, {"e": first}), Part(2, 25, 40, EVERY, {"e": second})])

    assert stitch.read_csv(tmp_path, "e")["step"] == [0, 10, 20, 30, 40]
    assert stitch.read_csv(tmp_path, "e")["x"] == [1.5, 1.5, 1.5, 2.5, 2.5]


@pytest.mark.parametrize("kind", ["dcd", "xtc", "csv"])
def test_a_gap_is_an_error_that_names_the_step(tmp_path: Path, kind: str) -> None:
    first = write_part(tmp_path, kind, 1, [0, 10])
    second = write_part(tmp_path, kind, 2, [40, 50])
    save_manifest(
        tmp_path, [Part(1, 0, 30, EVERY, {"trajectory": first}), Part(2, 30, 50, EVERY, {"trajectory": second})]
    )

    with pytest.raises(CampaignError, match=r"the frame of step 20 is missing; .*attempt-2.* goes on at 40"):
        stitch.frames(tmp_path)
    assert stitch.verify(tmp_path) == (6, 4)


def test_missing_last_frames_a_missing_file_and_a_foreign_file_are_errors(tmp_path: Path) -> None:
    path = write_part(tmp_path, "dcd", 1, [0, 10])
    save_manifest(tmp_path, [Part(1, 0, 30, EVERY, {"trajectory": path})])
    with pytest.raises(CampaignError, match="trajectory has 2 of 4 frames"):
        stitch.frames(tmp_path)

    (tmp_path / path).write_bytes(b"this is no trajectory" * 10)
    assert stitch.verify(tmp_path) == (4, 0)
    (tmp_path / path).unlink()
    assert stitch.verify(tmp_path) == (4, 0)


def test_uneven_times_are_an_error(tmp_path: Path) -> None:
    """Steps alone do not show a changed time step."""
    (tmp_path / "attempt-1").mkdir()
    path = tmp_path / "attempt-1" / "t.xtc"
    for step, time_ps in ((0, 0.0), (10, 0.02), (20, 0.05), (30, 0.06)):
        write_xtc_frame(path, step, time_ps)
    save_manifest(tmp_path, [Part(1, 0, 30, EVERY, {"trajectory": "attempt-1/t.xtc"})])

    with pytest.raises(CampaignError, match=r"time 0.05.* ps at step 20"):
        stitch.frames(tmp_path)


def test_a_job_without_frames_has_none_to_miss(tmp_path: Path) -> None:
    with pytest.raises(CampaignError, match="no manifest"):
        stitch.frames(tmp_path)
    save_manifest(tmp_path, [Part(1, 0, 30, 0)])

    assert stitch.verify(tmp_path) == (0, 0)
    with pytest.raises(CampaignError, match="no accepted trajectory"):
        stitch.frames(tmp_path)


def test_other_formats_are_refused_in_words(tmp_path: Path) -> None:
    save_manifest(tmp_path, [Part(1, 0, 30, EVERY, {"trajectory": "attempt-1/t.nc"})])

    with pytest.raises(CampaignError, match=r"cannot stitch '.nc' files, only .dcd, .xtc, .csv"):
        stitch.frames(tmp_path)


def test_xtc_steps_beyond_32_bits_are_counted_on(tmp_path: Path) -> None:
    (tmp_path / "attempt-1").mkdir()
    start, every = 2**31 - 10**9, 10**9
    path = tmp_path / "attempt-1" / "t.xtc"
    for n in range(4):
        wrapped = (start + n * every + 2**31) % 2**32 - 2**31
        write_xtc_frame(path, wrapped, float(n))

    part = Part(1, start - every, start + 3 * every, every)

    assert [f.step for f in stitch.READERS[".xtc"](path, part)] == [start + n * every for n in range(4)]


@pytest.mark.parametrize("n_atoms", [3, 9, 10, 50])
def test_xtc_frames_are_found_as_openmm_reads_them(tmp_path: Path, n_atoms: int) -> None:
    """Up to nine atoms are stored as plain floats."""
    from openmm.app.internal.xtc_utils import read_xtc, xtc_write_frame

    path = tmp_path / "t.xtc"
    random = np.random.default_rng(1)
    for n in range(5):
        xyz = random.normal(size=(n_atoms, 3)).astype(np.float32)
        box = np.eye(3, dtype=np.float32)
        xtc_write_frame(str(path).encode(), xyz, box, np.float32(n * 0.5), np.int32(n * 7))

    _, _, times, steps = read_xtc(str(path).encode())
    found = list(xtc.frames(path))
    assert [f.step for f in found] == list(steps)
    assert [f.time_ps for f in found] == list(times)
    assert found[-1].offset + found[-1].size == path.stat().st_size


@pytest.mark.parametrize("box", [None, np.eye(3) * 2.5, np.array([[3, 0, 0], [0.5, 2.5, 0], [-0.7, 0.4, 2]])])
def test_dcd_is_what_openmm_writes_but_for_the_time_of_day(tmp_path: Path, box: np.ndarray | None) -> None:
    from openmm import Vec3, app, unit

    topology = app.Topology()
    residue = topology.addResidue("", topology.addChain())
    for _ in range(N_ATOMS):
        topology.addAtom("", None, residue)
    vectors = None if box is None else [Vec3(*map(float, row)) for row in box] * unit.nanometer
    topology.setPeriodicBoxVectors(vectors)
    xyz = np.random.default_rng(2).normal(size=(N_ATOMS, 3))
    with (tmp_path / "theirs.dcd").open("w+b") as file:
        theirs = app.DCDFile(file, topology, 0.002, 20, 10)
        for n in range(3):
            theirs.writeModel(xyz + n, periodicBoxVectors=vectors)

    ours = dcd.Writer(tmp_path / "ours.dcd", dcd.Header(N_ATOMS, 20, 10, 0.002, periodic=box is not None))
    for n in range(3):
        ours.write(xyz + n, box)
    ours.flush()
    ours.close()

    a, b = (tmp_path / "ours.dcd").read_bytes(), (tmp_path / "theirs.dcd").read_bytes()
    assert a[:100] + a[260:276] == b[:100] + b[260:276]
    floats = [np.frombuffer(x[276:], dtype="<f4") for x in (a, b)]
    assert len(a) == len(b)
    if box is None:
        assert (floats[0] == floats[1]).all()
    else:
        assert_frames_agree(a[276:], b[276:])


def assert_frames_agree(ours: bytes, theirs: bytes) -> None:
    """Compare periodic frames: the cosines of the box differ by rounding."""
    size = dcd.Header(N_ATOMS, 0, 1, 0.002, periodic=True).frame_bytes
    for at in range(0, len(ours), size):
        boxes = [struct.unpack_from("<6d", data, at + 4) for data in (ours, theirs)]
        assert boxes[0] == pytest.approx(boxes[1], abs=1e-12)
        assert ours[at + 56 : at + size] == theirs[at + 56 : at + size]


def test_dcd_counts_in_frames_beyond_32_bits(tmp_path: Path) -> None:
    first, every = 3 * 10**9, 10**6
    writer = dcd.Writer(tmp_path / "t.dcd", dcd.Header(N_ATOMS, first, every, 0.002, periodic=False))
    for n in range(2):
        writer.write(positions(n), None)
    writer.flush()
    writer.close()

    index = dcd.index(tmp_path / "t.dcd", every)
    assert (index.header.first_step, index.header.interval, index.n_frames) == (first, every, 2)
    assert index.header.dt_ps == pytest.approx(0.002)
