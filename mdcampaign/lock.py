"""The lock of a campaign directory: one driver at a time, on any node of the file system.

The file `lock` is created whole and exclusively and says who holds the campaign. On the same host its holder is
looked up in /proc: a process that is gone, or another one under the same number, holds nothing. On another host
only the file's age can tell: the holder touches it every `BEAT_S`; ages are compared on the file system's own clock.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from mdcampaign import atomic
from mdcampaign.errors import CampaignLocked

BEAT_S = 15.0
SILENT_S = 300.0
"""A holder on another host that has not touched its lock for so long is taken for gone."""

_TRIES = 5

Standing = Literal["alive", "dead", "silent"]


@dataclass(frozen=True)
class Owner:
    """Who holds a campaign. `start_ticks`, `boot` and `pid_space` tell a process from a later one of the same pid."""

    id: str
    host: str
    pid: int
    user: str
    since_s: float
    start_ticks: int
    boot: str
    pid_space: str

    @classmethod
    def me(cls) -> Owner:
        """Return this process as an owner, with a fresh id."""
        return cls(
            id=uuid.uuid4().hex,
            host=platform.node(),
            pid=os.getpid(),
            user=_user(),
            since_s=time.time(),
            start_ticks=_start_ticks(os.getpid()) or 0,
            boot=_boot(),
            pid_space=_pid_space(),
        )

    @classmethod
    def read(cls, path: Path) -> Owner | None:
        """Return the owner that a lock file names; None where there is no such file or it cannot be understood."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def standing(self, path: Path, silent_s: float = SILENT_S) -> Standing:
        """Return whether the owner lives; "silent" is one that cannot be looked up and has left its lock untouched."""
        if self.host == platform.node() and self.pid_space == _pid_space():
            alive = self.boot == _boot() and _start_ticks(self.pid) == self.start_ticks
            return "alive" if alive else "dead"
        return "alive" if _untouched_s(path) < silent_s else "silent"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"process {self.pid} of {self.user} on {self.host} since {since}"


class Lock:
    """Holds a campaign directory from `acquire` to `release`.

    Args:
        path: the lock file.
        tell: is given one line when a stale lock is taken over.
        on_lost: is called, in the lock's own thread, when another process has taken the lock away.
    """

    def __init__(
        self,
        path: Path,
        *,
        tell: Callable[[str], None] = print,
        on_lost: Callable[[Owner | None], None] | None = None,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self.path = path
        self.owner: Owner | None = None
        self._tell, self._on_lost = tell, on_lost
        self._beat_s, self._silent_s = beat_s, silent_s
        self._released = threading.Event()

    def acquire(self, *, take_over: bool = False) -> Owner:
        """Take the lock and keep it fresh; a stale one is taken over. Never waits for its holder.

        Raises:
            CampaignLocked: another process holds it, or was faster; with `take_over` only if it lives on this host.
        """
        me = Owner.me()
        mine = json.dumps(asdict(me), indent=1).encode()
        for _ in range(_TRIES):
            try:
                if atomic.create(self.path, mine) or self._take_over(mine, take_over):
                    break
            except FileNotFoundError:  # its holder has just given it back
                continue
        else:
            raise CampaignLocked(f"{self.path} changes hands at every look; several processes start the campaign")
        self.owner = me
        self._released.clear()
        threading.Thread(target=self._beat, args=(me,), name="campaign-lock", daemon=True).start()
        return me

    def release(self) -> None:
        """Give the campaign back, if this very process still holds it (a forked child does not)."""
        if self.owner is None or self.owner.pid != os.getpid():
            return
        self._released.set()
        if Owner.read(self.path) == self.owner:
            self.path.unlink(missing_ok=True)
        self.owner = None

    def _take_over(self, mine: bytes, by_force: bool) -> bool:
        """Replace a stale lock; of any number of processes that try, one wins. False where there is none any more."""
        old = Owner.read(self.path)
        if old is None and not self.path.exists():
            return False
        self._refuse_living(self.path, old, by_force)
        claims = self._claim(self.path, old, mine)
        try:
            # Whoever judged the same lock stale and was faster has replaced it: look again under the claim.
            if (now := Owner.read(self.path)) != old or not self.path.exists():
                raise CampaignLocked(f"{self.path.parent} has just been taken by {now or 'another process'}")
            atomic.replace(self.path, mine)
            self._tell(f"taking {self.path.parent} over from {old or 'an unreadable lock'}")
            return True
        finally:
            for claim in claims:
                claim.unlink(missing_ok=True)

    def _claim(self, held: Path, holder: Owner | None, mine: bytes) -> list[Path]:
        """Claim the right to replace `held`, also from claimants that died in the act; return the claim files."""
        claim = self.path.with_name(f"{self.path.name}.claim-{holder.id if holder else 'unreadable'}")
        if atomic.create(claim, mine):
            return [claim]
        claimant = Owner.read(claim)
        if claimant == holder:
            raise CampaignLocked(f"{held.parent} is being taken over by another process")
        self._refuse_living(claim, claimant, by_force=False)
        return [claim, *self._claim(claim, claimant, mine)]

    def _refuse_living(self, path: Path, owner: Owner | None, by_force: bool) -> None:
        """Raise CampaignLocked unless what `path` says is stale, or is taken by force."""
        if owner is None:
            if path.exists() and _untouched_s(path) < self._silent_s and not by_force:
                raise CampaignLocked(f"{path} is not readable as a lock; remove it if no campaign runs there")
            return
        here = owner.host == platform.node() and owner.pid_space == _pid_space()
        if owner.standing(path, self._silent_s) == "alive" and (here or not by_force):
            mend = "" if here else " If that process is gone for certain, start with --take-over."
            raise CampaignLocked(f"{self.path.parent} is in use by {owner}.{mend}")

    def _beat(self, me: Owner) -> None:
        while not self._released.wait(self._beat_s):
            try:
                holder = Owner.read(self.path)
                if holder == me:
                    os.utime(self.path)
                    continue
            except OSError:  # a file system that hiccups; the next beat tries again
                continue
            if not self._released.is_set() and self._on_lost:
                self._on_lost(holder)
            return


def holder(path: Path, silent_s: float = SILENT_S) -> Owner | None:
    """Return the living owner of a lock file, or None where nobody holds it."""
    owner = Owner.read(path)
    try:
        return owner if owner and owner.standing(path, silent_s) == "alive" else None
    except FileNotFoundError:
        return None


def _untouched_s(path: Path) -> float:
    """Return the age of a file's last touch by the clock of its file system (those of two hosts differ)."""
    probe = path.with_name(f".clock.{platform.node()}.{os.getpid()}.{threading.get_ident()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except PermissionError:  # a reader who may not write here
        return time.time() - path.stat().st_mtime
    finally:
        try:
            probe.unlink(missing_ok=True)
        except PermissionError:
            pass


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None where it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_space() -> str:
    """Return the name of the PID namespace: a container sees other processes than its host."""
    return str(Path("/proc/self/ns/pid").readlink())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name, as in containers
        return str(os.getuid())
