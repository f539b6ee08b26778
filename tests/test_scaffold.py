"""`mdcampaign init` on a folder of real run input files, and the campaign that it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mdcampaign.errors import CampaignError
from mdcampaign.scaffold import init

WORKFLOWS = Path(__file__).resolve().parent.parent / "workflows"


@pytest.fixture(scope="module")
def tpr_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(WORKFLOWS))
    import water

    sys.path.remove(str(WORKFLOWS))
    folder = tmp_path_factory.mktemp("runs")
    for n in range(2):
        water.run_input(folder, n, seed=n + 1, steps=200)
    return folder


def test_init_writes_a_campaign_that_runs(tpr_folder: Path, tmp_path: Path) -> None:
    assert [path.name for path in init(tpr_folder)] == ["campaign.yaml", "campaign.py"]
    command = [sys.executable, "-m", "mdcampaign.cli", "run", str(tpr_folder / "campaign.yaml"), "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["jobs"], told["done"]) == (2, 2)
    assert told["ns"] == pytest.approx(2 * 200 * 0.002 / 1000)
    with pytest.raises(CampaignError, match="is there already"):
        init(tpr_folder)


@pytest.mark.parametrize("prepare", ["missing", "empty", "garbage"])
def test_init_says_what_is_wrong(tmp_path: Path, prepare: str) -> None:
    folder = tmp_path / "runs"
    if prepare != "missing":
        folder.mkdir()
    if prepare == "garbage":
        (folder / "a.tpr").write_bytes(b"not a tpr")
    with pytest.raises(Exception, match=r"no directory|no \.tpr files|a\.tpr"):
        init(folder)
    assert not list(folder.glob("campaign.*"))
