"""The frames of an XTC file: step, time and place of each, from the headers alone.

OpenMM and GROMACS write one format. Nothing is decompressed, so that frames can be copied as they are; light readers
on PyPI decode every frame or bring a toolkit with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC, MAGIC_LARGE = 1995, 2023
"""2023: GROMACS 2023 and later for systems of more than 298 million atoms; the size of the data has 64 bits."""
_UNCOMPRESSED = 9
"""Up to so many atoms are stored as plain floats."""


class XTCFrame(NamedTuple):
    """One frame: `step` as written (32 bits), time in ps, and its bytes in the file."""

    step: int
    time_ps: float
    offset: int
    size: int


def frames(path: Path) -> Iterator[XTCFrame]:
    """Yield the whole frames of a file; ends at the first that is cut short or is no frame."""
    end = path.stat().st_size
    offset = 0
    with path.open("rb") as file:
        while True:
            file.seek(offset)
            head = file.read(100)
            size = _frame_size(head)
            if size is None or offset + size > end:
                return
            step, time_ps = struct.unpack_from(">if", head, 8)
            yield XTCFrame(step, time_ps, offset, size)
            offset += size


def _frame_size(head: bytes) -> int | None:
    """Return the size of the frame that begins with `head`, or None when no frame does.

    Layout, big-endian: magic, atoms, step, time, box (9 floats), atoms again; then floats, or precision, minima (3),
    maxima (3), small index, size of the data, data padded to four bytes.
    """
    if len(head) < 56:
        return None
    magic, n_atoms = struct.unpack_from(">2i", head)
    if magic not in (MAGIC, MAGIC_LARGE):
        return None
    if n_atoms <= _UNCOMPRESSED:
        return int(56 + 12 * n_atoms)
    large = magic == MAGIC_LARGE
    data_at = 96 if large else 92
    if len(head) < data_at:
        return None
    data: int = struct.unpack_from(">q" if large else ">i", head, 88)[0]
    return data_at + data + -data % 4
