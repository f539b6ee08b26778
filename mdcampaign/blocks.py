"""What becomes of a campaign whose blocks (pilots) end: one that ends is replaced, ones that never begin are given up.

Parsl's own handler fails every task as soon as all blocks have failed, so with `init_blocks=1` the first lost node
ends a campaign. A lost or expired pilot is normal; pilots that never register are not.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from parsl.executors.status_handling import BlockProviderExecutor
from parsl.jobs.errors import TooManyJobFailuresError
from parsl.jobs.states import TERMINAL_STATES, JobState, JobStatus

if TYPE_CHECKING:
    from mdcampaign.executor import SlotExecutor

logger = logging.getLogger(__name__)

MAX_STILLBORN = 3
"""Blocks in a row that fail before any agent of theirs has registered, after which no more are asked for."""


def replace_or_give_up(executor: BlockProviderExecutor, status: dict[str, JobStatus]) -> None:
    """Ask for a new block when none is left and tasks wait; fail all tasks when blocks do not even begin."""
    if not status or executor.outstanding() == 0 or executor.bad_state_is_set:
        return
    registered = set(cast("SlotExecutor", executor).connected_blocks())
    newest = sorted(status, key=int, reverse=True)[:MAX_STILLBORN]
    stillborn = [block for block in newest if block not in registered and _failed(status[block])]
    if len(stillborn) == MAX_STILLBORN:
        executor.set_bad_state_and_fail_all(TooManyJobFailuresError(_story(stillborn, status)))
    elif all(state.state in TERMINAL_STATES for state in status.values()):
        logger.warning("No block is left and %d tasks wait: asking for another", executor.outstanding())
        executor.scale_out_facade(1)


def _failed(status: JobStatus) -> bool:
    return status.state in (JobState.FAILED, JobState.MISSING, JobState.TIMEOUT)


def _story(blocks: list[str], status: dict[str, JobStatus]) -> str:
    """Return what the batch system and the pilots themselves said, newest first."""
    lines = [f"{len(blocks)} blocks in a row ended before an agent registered"]
    for block in blocks:
        state = status[block]
        lines.append(f"block {block}: {state.state.name}, exit code {state.exit_code}, {state.message or ''}")
        lines.append((state.stderr_summary or "").strip())
    return "\n".join(line for line in lines if line)
