"""The campaign directory: everything of a campaign in one place, held by one process at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mdcampaign import atomic, layout
from mdcampaign.control import Inbox
from mdcampaign.errors import CampaignError
from mdcampaign.layout import job_directory
from mdcampaign.lock import Lock, Owner, holder
from mdcampaign.state import CampaignState

__all__ = ["Campaign", "job_directory"]


class Campaign:
    """A campaign that this process holds, from `with Campaign(directory)` or `acquire` until `release`.

    Args:
        directory: made, with its layout, if it is new; see docs/campaign-directory.md.
        tell: is given one line when a stale lock is taken over.
        on_lost: is called when another process has taken the campaign away: stop everything.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tell: Callable[[str], None] = print,
        on_lost: Callable[[Owner | None], None] | None = None,
    ) -> None:
        self.directory = directory.absolute()
        self.events = self.directory / layout.EVENTS
        self._lock = Lock(self.directory / layout.LOCK, tell=tell, on_lost=on_lost)
        self._jobs = layout.Allocator(self.directory)

    def acquire(self, *, take_over: bool = False) -> Campaign:
        """Make the layout and take the lock.

        Raises:
            CampaignLocked: a process holds the campaign; at once, naming its host and pid.
            CampaignError: the directory is there and is no campaign's, or cannot be made.
        """
        self._make_layout()
        self._lock.acquire(take_over=take_over)
        return self

    def release(self) -> None:
        """Give the campaign back."""
        self._lock.release()

    def __enter__(self) -> Campaign:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()

    def owner(self) -> Owner | None:
        """Return who holds the campaign, or None where no living process does."""
        return holder(self.directory / layout.LOCK)

    def inbox(self) -> Inbox:
        """Open the control inbox; requests from before now are refused."""
        return Inbox(self.directory)

    def state(self) -> CampaignState:
        """Return what the log says of the jobs; raises LedgerCorrupt."""
        return CampaignState.replay(self.directory)

    def job_dir(self, group: str, name: str) -> Path:
        """Return the directory of a job, made if it is new; call it when the job is submitted.

        Afterwards `job_directory` finds it from any process and node.
        """
        return self._jobs.make(group, name)

    def record(self, text: str) -> None:
        """Keep the campaign file as it is run, as `campaign.yaml`."""
        atomic.replace(self.directory / layout.CAMPAIGN_FILE, text.encode())

    def _make_layout(self) -> None:
        try:
            if self.directory.is_dir() and any(self.directory.iterdir()) and not self.events.is_dir():
                raise CampaignError(f"{self.directory} holds other things than a campaign; give a directory of its own")
            for part in (layout.EVENTS, layout.JOBS, layout.CONTROL):
                (self.directory / part).mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise CampaignError(f"cannot make the campaign directory {self.directory}: {exc}") from exc
