"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

from mdcampaign.campaign_file import CampaignFile

README = (Path(__file__).resolve().parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_parsl_example_runs(tmp_path: Path) -> None:
    (example,) = [block for block in blocks("python") if "parsl.load" in block]
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(9, 'cpu:")


def test_the_thinker_and_its_campaign_file_are_right(tmp_path: Path) -> None:
    (thinker,) = [block for block in blocks("python") if "CampaignThinker" in block]
    namespace: dict = {}
    exec(compile(thinker, "README", "exec"), namespace)
    (file,) = blocks("yaml")
    found = CampaignFile.model_validate(yaml.safe_load(file))
    assert found.thinker_class in namespace


def test_every_command_of_the_readme_exists() -> None:
    for command in re.findall(r"^    mdcampaign (\w+)", README, re.MULTILINE):
        done = subprocess.run(
            [sys.executable, "-m", "mdcampaign.cli", command, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "example:" in done.stdout
