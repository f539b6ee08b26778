"""DCD files: written with a header that depends on content alone, and indexed without being read.

The CHARMM flavour, little-endian, as OpenMM and NAMD write it: Angstrom, one record each for x, y and z. OpenMM's own
writer stamps the time of day into the header, so two equal trajectories differ; this one does not.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

AKMA_PS = 0.04888821
"""CHARMM's unit of time in picoseconds, in which the header gives the time step."""
REMARK = b"mdcampaign"
_INT_MAX = 2**31 - 1
_FRAMES_AT = 8
"""Offset of the number of frames in the header."""


@dataclass(frozen=True)
class Header:
    """What a DCD file says of itself. Steps count from the start of the job."""

    n_atoms: int
    first_step: int
    interval: int
    dt_ps: float
    periodic: bool

    @property
    def frame_bytes(self) -> int:
        """The size of one frame."""
        return 3 * (4 * self.n_atoms + 8) + (56 if self.periodic else 0)

    def pack(self, n_frames: int = 0) -> bytes:
        """Return the header as bytes. Steps beyond 32 bits are counted in frames, as OpenMM does."""
        first, interval, dt = self.first_step, self.interval, self.dt_ps / AKMA_PS
        if first + n_frames * interval > _INT_MAX:
            first, interval, dt = first // interval, 1, dt * interval
        last = first + max(n_frames - 1, 0) * interval
        return b"".join(
            (
                struct.pack("<i4s9if", 84, b"CORD", n_frames, first, interval, last, 0, 0, 0, 0, 0, dt),
                struct.pack("<13i", self.periodic, 0, 0, 0, 0, 0, 0, 0, 0, 24, 84, 164, 2),
                struct.pack("<80s80s", REMARK, b""),
                struct.pack("<4i", 164, 4, self.n_atoms, 4),
            )
        )


def frame(positions_nm: NDArray[Any], box_nm: NDArray[Any] | None) -> bytes:
    """Return a frame as bytes, from positions (n, 3) and, where periodic, box vectors (3, 3), in nanometres."""
    import numpy as np

    length = struct.pack("<i", 4 * len(positions_nm))
    records = [] if box_nm is None else [_box_record(np.asarray(box_nm, dtype=float))]
    for axis in (10.0 * np.asarray(positions_nm, dtype=float)).T.astype("<f4"):
        records += [length, axis.tobytes(), length]
    return b"".join(records)


def _box_record(box_nm: NDArray[Any]) -> bytes:
    """Return lengths (Angstrom) and cosines in CHARMM's order: a, cos gamma, b, cos beta, cos alpha, c."""
    import numpy as np

    a, b, c = np.linalg.norm(box_nm, axis=1)
    cos_alpha, cos_beta, cos_gamma = (
        box_nm[1] @ box_nm[2] / (b * c),
        box_nm[0] @ box_nm[2] / (a * c),
        box_nm[0] @ box_nm[1] / (a * b),
    )
    return struct.pack("<i6di", 48, 10 * a, cos_gamma, 10 * b, cos_beta, cos_alpha, 10 * c, 48)


class Writer:
    """Appends frames to a new DCD file; `sync` puts them, and their number, on the disk."""

    def __init__(self, path: Path, header: Header) -> None:
        self._file = path.open("xb")
        self._header = header
        self._n_frames = 0
        self._file.write(header.pack())

    def write(self, positions_nm: NDArray[Any], box_nm: NDArray[Any] | None) -> None:
        """Append one frame."""
        self._file.write(frame(positions_nm, box_nm if self._header.periodic else None))
        self._n_frames += 1

    def flush(self) -> int:
        """Hand everything to the system and return the file's descriptor, to be synced."""
        self._file.seek(0)
        self._file.write(self._header.pack(self._n_frames))
        self._file.seek(0, 2)
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class Index:
    """A DCD file's header, where its frames begin, and how many whole ones there are by its size."""

    header: Header
    offset: int
    n_frames: int


def index(path: Path, frame_steps: int) -> Index:
    """Return the index of a file whose frames are `frame_steps` apart.

    The number of frames comes from the size: the header's is that of the last sync.

    Raises:
        ValueError: this is no little-endian DCD file, or one that says another distance of frames.
    """
    head = _head(path)
    if head[:8] != struct.pack("<i4s", 84, b"CORD") or len(head) < 96:
        raise ValueError(f"{path} is no DCD file")
    _, first, interval = struct.unpack_from("<3i", head, _FRAMES_AT)
    (dt,) = struct.unpack_from("<f", head, 44)
    (periodic,) = struct.unpack_from("<i", head, 48)
    offset = 112 + struct.unpack_from("<i", head, 92)[0]
    if len(head) < offset:
        raise ValueError(f"{path} ends within its header")
    (n_atoms,) = struct.unpack_from("<i", head, offset - 8)
    if interval == 1 < frame_steps:  # counted in frames
        first, interval, dt = first * frame_steps, frame_steps, dt / frame_steps
    if interval != frame_steps:
        raise ValueError(f"{path} has a frame every {interval} steps instead of {frame_steps}")
    header = Header(n_atoms, first, interval, dt * AKMA_PS, bool(periodic))
    return Index(header, offset, (path.stat().st_size - offset) // header.frame_bytes)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)
