"""What mdrun says while it runs and when it ends: steps, energies, and the evidence of how it went.

mdrun's exit code proves little: it is 1 for a graceful stop and for a fatal error alike. So the log and the screen
output are read as they grow, and kept only as far as they matter.
"""

from __future__ import annotations

import math
import re
from collections import deque
from pathlib import Path
from typing import Literal

from mdcampaign.engines.gmx_files import error_box

Evidence = Literal["checkpoint", "disk", "memory", "device", "unstable", "input"]

_SIGNS: tuple[tuple[Evidence, str], ...] = (
    # Before "disk": mdrun guesses "or maybe you are out of disk space?" at each checkpoint that it cannot read.
    (
        "checkpoint",
        r"checkpoint file .*(corrupted|truncated)|magic number mismatch, checkpoint|not a checkpoint file"
        r"|output files listed in the checkpoint",
    ),
    ("disk", r"out of disk space|no space left on device|disk quota exceeded"),
    ("memory", r"cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA.*out of memory|CL_MEM_OBJECT_ALLOCATION_FAILURE"),
    (
        "device",
        r"cuda ?error|hipError|illegal memory access|unspecified launch failure|ECC error|clEnqueue\w+ failed"
        r"|because no GPU is detected",
    ),
    (
        "unstable",
        r"LINCS WARNING|too many LINCS|SHAKE.*did not converge|can not be settled|is not finite|non-finite"
        r"|not converge.*constraint|moved further than|communicated to PME rank|interaction.*beyond.*table"
        r"|Pressure scaling more than",
    ),
    (
        "input",
        r"error in user input|inconsistency in user input|no domain decomposition|without GPU support"
        r"|can ?not read file|reading tpx file|is no longer supported",
    ),
)
SIGNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _SIGNS}
"""Signs of each kind, looked for in this order."""

BLOCK = 1 << 20
"""Bytes read at one look, so that a flood of warnings cannot hold up the reports."""


class Tail:
    """Whole lines that were added to a file since the last look; carriage returns end lines too."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = ""

    def lines(self) -> list[str]:
        """Return the next whole lines, at most `BLOCK` bytes of them; none while there is no file."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(BLOCK)
        except FileNotFoundError:
            return []
        self._offset += len(data)
        text = self._rest + data.decode(errors="replace")
        *lines, self._rest = re.split(r"[\r\n]", text)
        return lines


class MdrunLog:
    """The log and the screen output of one mdrun, read as they grow.

    `step` is the last one that either of them names, -1 before the first. `energies` are those of the last block of
    the log by GROMACS's names, in its units (kJ/mol, K, bar). `evidence` holds the first line of each kind of sign.
    """

    def __init__(self, log: Path, screen: Path) -> None:
        self.step = -1
        self.energies: dict[str, float] = {}
        self.nan_step: int | None = None
        self.signalled = False
        self.finished = False
        self.notes: list[str] = []
        self.performance: float | None = None
        self.evidence: dict[Evidence, str] = {}
        self._log, self._screen = Tail(log), Tail(screen)
        self._last: deque[str] = deque(maxlen=400)
        self._expect: Literal["", "step", "names", "values"] = ""
        self._names: list[str] = []
        self._averages = False

    def read(self) -> bool:
        """Take in what was added since the last look; return whether there was anything."""
        from_log, from_screen = self._log.lines(), self._screen.lines()
        for line in from_log:
            self._take_log(line)
        for line in from_screen:
            self._take_screen(line)
        return bool(from_log or from_screen)

    def read_all(self) -> None:
        """Take in the rest of both files, once mdrun has ended."""
        while self.read():
            pass

    def strongest(self) -> Evidence | None:
        """Return the kind of evidence that counts most."""
        kind = next((kind for kind in SIGNS if kind in self.evidence), None)
        if kind == "disk" and "unstable" in self.evidence and self.evidence["disk"].startswith("XTC error"):
            return "unstable"  # mdrun: "you are out of disk space, or a simulation with major instabilities"
        return kind

    def quote(self, kind: Evidence | None = None) -> str:
        """Return the lines that matter: mdrun's own error, else the first sign of a kind, else the last lines."""
        if box := error_box("\n".join(self._last)):
            return box
        if kind in self.evidence:
            return self.evidence[kind]
        return " / ".join(line.strip() for line in list(self._last)[-10:] if line.strip())[-1000:]

    def _look(self, line: str) -> None:
        for kind, pattern in SIGNS.items():
            if kind not in self.evidence and pattern.search(line):
                self.evidence[kind] = line.strip()

    def _take_screen(self, line: str) -> None:
        if found := re.match(r"(?:imb .*)?step (\d+)(?:, (?:remaining|will)|$)", line):
            self.step = max(self.step, int(found[1]))
        self._last.append(line)
        self._look(line)

    def _take_log(self, line: str) -> None:
        if self._expect in ("names", "values"):
            self._take_energies(line)
        elif self._expect == "step":
            self._expect = ""
            if found := re.match(r"\s*(\d+)\s", line):
                self.step = max(self.step, int(found[1]))
        elif re.fullmatch(r"\s+Step\s+Time\s*", line):
            self._expect = "step"
        elif line.startswith("   Energies (kJ/mol)") and not self._averages:
            self._expect = "names"
        elif "A V E R A G E S" in line:  # what follows looks like the energies of a step
            self._averages = True
        else:
            self._take_words(line)

    def _take_energies(self, line: str) -> None:
        """Take a line of names or of values, 15 characters a column, up to an empty line."""
        columns = [line[i : i + 15].strip() for i in range(0, len(line.rstrip()), 15)]
        if not columns:
            self._expect = ""
        elif self._expect == "names":
            self._names, self._expect = columns, "values"
        else:
            self._expect = "names"
            for name, value in zip(self._names, columns):
                try:
                    self.energies[name] = float(value)
                except ValueError:
                    continue
            if self.nan_step is None and not all(map(math.isfinite, self.energies.values())):
                self.nan_step = max(self.step, 0)

    def _take_words(self, line: str) -> None:
        if re.match(r"\s*Received the \w+ signal", line):
            self.signalled = True
        elif line.startswith("Finished mdrun"):
            self.finished = True
        elif found := re.match(r"Performance:\s+([\d.]+)", line):
            self.performance = float(found[1])
        elif re.search(r"\bconverged? to .* in \d+ steps", line):
            self.notes.append(line.strip())
        self._look(line)
