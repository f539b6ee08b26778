"""Which options of `gmx mdrun` a job may set, and why it may not set the others."""

from __future__ import annotations

from collections.abc import Iterable

from mdcampaign.errors import nearest

_THREADS = "the slot gives ranks and threads; give the job more cores instead"
_CORES = "the slot's cores are set from outside"
_DEVICE = "the slot's device is the only one that mdrun sees"
_OUTPUT = "outputs have names of their own in each attempt's directory"
_INPUT = "mdrun reads the job's tpr and the last good checkpoint"
_LENGTH = "the length is the job's `steps`, and a run is ended with a checkpoint when its slot is wanted"
_GANG = "several simulations that run as one are not supported"
_SIDE_FILES = "side files such as HILLS are not carried from one attempt to the next"

OWNED: dict[str, str] = {
    **dict.fromkeys(("nt", "ntmpi", "ntomp", "ntomp_pme"), _THREADS),
    **dict.fromkeys(("pin", "pinoffset", "pinstride"), _CORES),
    **dict.fromkeys(("gpu_id", "gputasks"), _DEVICE),
    **dict.fromkeys(("deffnm", "o", "x", "cpo", "c", "e", "g", "append", "confout", "cpnum", "stepout"), _OUTPUT),
    **dict.fromkeys(("dhdl", "field", "tpi", "tpid", "eo", "px", "pf", "ro", "ra", "rs", "rt", "mtx", "if"), _OUTPUT),
    **dict.fromkeys(("s", "cpi", "rerun", "swap"), _INPUT),
    **dict.fromkeys(("nsteps", "maxh"), _LENGTH),
    **dict.fromkeys(("multidir", "replex", "nex", "reseed"), _GANG),
    **dict.fromkeys(("plumed", "ei", "membed"), _SIDE_FILES),
}
"""Options that a job may not set, and why; flags without their "no"."""

FREE = (
    *("awh", "bonded", "cpt", "dd", "ddcheck", "ddorder", "dds", "dlb", "hrex", "mn", "mp", "nb", "npme", "nstlist"),
    *("pforce", "pme", "pmefft", "rcon", "rdd", "reprod", "resethway", "resetstep", "table", "tableb", "tablep"),
    *("tunepme", "update", "v", "xvg"),
)
"""Options that a job may set, as far as they are known: others are left to mdrun, unless they look like a slip."""


def problem(arguments: Iterable[str]) -> str:
    """Return what is wrong with a job's own arguments of mdrun, with the mend, or ""."""
    known = {*FREE, *OWNED, *(f"no{flag}" for flag in (*FREE, *OWNED))}
    for option in (word[1:] for word in arguments if word.startswith("-") and word[1:2].isalpha()):
        if why := OWNED.get(option) or OWNED.get(option.removeprefix("no")):
            return f"-{option} cannot be set: {why}"
        if option not in known and (guess := nearest(f"-{option}", [f"-{name}" for name in known])):
            return f"mdrun has no option -{option}. {guess}".rstrip()
    return ""
