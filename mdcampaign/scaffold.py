"""`mdcampaign init`: a campaign file, and the script that it names, from a folder of run input files."""

from __future__ import annotations

import re
from pathlib import Path

from mdcampaign.engines.gmx_files import read_tpr
from mdcampaign.errors import CampaignError

SCRIPT = '''\
"""Runs every run input file beside this script to its own length. Change it as you like: it is an ordinary Thinker."""

from pathlib import Path

from colmena.thinker import agent

from mdcampaign.engines.inputs import GROMACS
from mdcampaign.jobs import MDJob
from mdcampaign.steering.thinker import CampaignThinker

HERE = Path(__file__).resolve().parent

STEPS = {{
{steps}
}}
"""Target lengths in steps, as the files themselves say."""


class Campaign(CampaignThinker):
    @agent(startup=True)
    def begin(self):
        self.submit(
            [
                MDJob(name=Path(tpr).stem, engine=GROMACS(tpr=HERE / tpr), steps=steps)
                for tpr, steps in STEPS.items()
            ]
        )
'''

CAMPAIGN = """\
# Run it, or go on with it, with:   mdcampaign run {file}
name: {name}
thinker: campaign.py:Campaign
executor:
  slots_per_device: 1         # simulations that share a GPU; on a machine without one: that share its cores
# config: site.py             # under executor: a Parsl Config of your own, for Slurm; then alone there
"""


def init(directory: Path) -> list[Path]:
    """Write campaign.yaml and campaign.py into a folder of tpr files; return what was written.

    Raises:
        CampaignError: no tpr files, files that cannot be read, names that repeat, or a campaign that is there already.
    """
    if not directory.is_dir():
        raise CampaignError(f"{directory} is no directory; give the folder with your .tpr files")
    inputs = sorted(directory.glob("*.tpr"))
    if not inputs:
        raise CampaignError(f"{directory} has no .tpr files; make them with gmx grompp")
    script, campaign = directory / "campaign.py", directory / "campaign.yaml"
    for path in (script, campaign):
        if path.exists():
            raise CampaignError(f"{path} is there already; remove it to begin anew")
    steps = {path.name: read_tpr("gmx", path).steps for path in inputs}
    lines = "\n".join(f"    {name!r}: {count}," for name, count in steps.items())
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", directory.resolve().name).strip("-.") or "campaign"
    script.write_text(SCRIPT.format(steps=lines))
    campaign.write_text(CAMPAIGN.format(file=campaign, name=name))
    return [campaign, script]
