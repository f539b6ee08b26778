"""Campaigns from the command line, as users run them: real processes, real kills, a second run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mdcampaign.engines import stitch
from mdcampaign.engines.manifest import Manifest
from mdcampaign.layout import job_directory
from mdcampaign.ledger import read_events
from mdcampaign.state import CampaignState
from tests.conftest import wait_until

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 240


def write(path: Path, thinker: str, executor: str = "slots_per_device: 2", **parameters: Any) -> Path:
    path.write_text(
        f"name: trial\nthinker: {ROOT}/tests/campaigns/small.py:{thinker}\n"
        f"parameters: {json.dumps(parameters)}\nexecutor: {{{executor}}}\n"
    )
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "mdcampaign.cli", *map(str, arguments)]


def mdcampaign(cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S)


def begin(cwd: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def state(directory: Path) -> CampaignState:
    return CampaignState.replay(directory) if (directory / "events").is_dir() else CampaignState()


def reported(directory: Path, job: str) -> bool:
    found = state(directory).jobs.get(job)
    return bool(found and found.state == "running" and found.saved_step)


@pytest.fixture
def campaign(tmp_path: Path) -> Path:
    return tmp_path / "campaigns" / "trial"


def test_r1_a_second_run_repeats_nothing(tmp_path: Path, campaign: Path) -> None:
    file = write(tmp_path / "c.yaml", "Small")
    first = mdcampaign(tmp_path, "run", file, "--json")
    assert first.returncode == 0, first.stderr
    told = json.loads(first.stdout.splitlines()[-1])
    assert (told["jobs"], told["done"], told["failed"], told["interrupted"]) == (6, 6, 0, 0)
    for key in ("wall_s", "ns", "slot_idle_fraction", "fifo_wall_s", "static_wall_s", "lower_bound_s", "top_waits"):
        assert key in told
    assert told["lower_bound_s"] <= told["fifo_wall_s"] + 1e-6
    again = mdcampaign(tmp_path, "run", file, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["done"] == 6
    assert sum(event["event"] == "placed" for event in read_events(campaign)) == 6
    for n in range(6):
        job_dir = job_directory(campaign, "small", f"j{n}")
        assert [path.name for path in job_dir.glob("attempt-*")] == ["attempt-1"]


def test_w9_driver_killed_and_campaign_run_again_goes_on_from_checkpoints(tmp_path: Path, campaign: Path) -> None:
    file = write(tmp_path / "c.yaml", "Peptide", steps=50_000)
    process = begin(tmp_path, "run", file)
    wait_until(lambda: reported(campaign, "ala/r0") and reported(campaign, "ala/r1"), "checkpoints", LIMIT_S)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    again = mdcampaign(tmp_path, "run", file, "--json")
    assert again.returncode == 0, again.stderr
    told = json.loads(again.stdout.splitlines()[-1])
    assert told["done"] == 2
    assert len(told["resumed"]) == 2
    for n in range(2):
        job_dir = job_directory(campaign, "ala", f"r{n}")
        assert stitch.verify(job_dir) == (501, 501)
        manifest = Manifest.load(job_dir)
        assert manifest is not None
        assert len(manifest.parts) >= 2
        assert manifest.parts[1].first_step > 0


def test_p6_ctrl_c_once_saves_and_ends(tmp_path: Path, campaign: Path) -> None:
    file = write(tmp_path / "c.yaml", "Small", steps=100_000)
    process = begin(tmp_path, "run", file)
    wait_until(lambda: reported(campaign, "small/j0"), "a checkpoint", LIMIT_S)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    left = state(campaign).jobs["small/j0"]
    assert left.attempts[-1].how == "interrupted"
    manifest = Manifest.load(job_directory(campaign, "small", "j0"))
    assert manifest is not None
    assert manifest.accepted_step >= left.attempts[-1].step > 0


def test_p6_ctrl_c_twice_ends_at_once(tmp_path: Path, campaign: Path) -> None:
    file = write(tmp_path / "c.yaml", "Small", steps=100_000, step_s=1.0)
    process = begin(tmp_path, "run", file)
    running = lambda: any(job.state == "running" for job in state(campaign).jobs.values())  # noqa: E731
    wait_until(running, "a running job", LIMIT_S)
    family = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_r6_and_questions_from_another_terminal(tmp_path: Path, campaign: Path) -> None:
    file = write(tmp_path / "c.yaml", "Small", "slots_per_device: 1", jobs=3, steps=100_000)
    process = begin(tmp_path, "run", file)
    wait_until(lambda: reported(campaign, "small/j0"), "a running job", LIMIT_S)
    second = mdcampaign(tmp_path, "run", file)
    assert second.returncode == 1
    assert str(process.pid) in second.stderr
    assert "Traceback" not in second.stderr
    told = json.loads(mdcampaign(tmp_path, "status", campaign, "--json").stdout)
    assert told["states"] == {"running": 1, "waiting": 2}
    assert "small/j0" in mdcampaign(tmp_path, "status", campaign).stdout
    why = mdcampaign(tmp_path, "explain", campaign, "j2")
    assert why.returncode == 0, why.stderr
    assert "small/j2" in why.stdout
    assert "Did you mean" in mdcampaign(tmp_path, "explain", campaign, "small/j22").stderr
    stopped = mdcampaign(tmp_path, "stop", campaign, "small/j0")
    assert stopped.returncode == 0, stopped.stderr
    wait_until(lambda: state(campaign).jobs["small/j0"].state == "stopped", "the stop", LIMIT_S)
    assert mdcampaign(tmp_path, "stop", campaign).returncode == 0
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "not running" in mdcampaign(tmp_path, "status", campaign).stdout
    assert "is stopped" in mdcampaign(tmp_path, "explain", campaign, "small/j0").stdout
    assert mdcampaign(tmp_path, "stop", campaign, "small/j1").returncode == 1


def test_k1_a_broken_handler_ends_the_campaign_with_its_traceback(tmp_path: Path, campaign: Path) -> None:
    done = mdcampaign(tmp_path, "run", write(tmp_path / "c.yaml", "Crashing", steps=100_000))
    assert done.returncode == 1
    assert "the handler is broken" in done.stderr
    assert "waiting" not in {job.state for job in state(campaign).jobs.values()}


def test_a_killed_broker_fails_the_campaign_and_no_job(tmp_path: Path, campaign: Path) -> None:
    process = begin(tmp_path, "run", write(tmp_path / "c.yaml", "Small", steps=100_000))
    wait_until(lambda: reported(campaign, "small/j0"), "a running job", LIMIT_S)
    family = psutil.Process(process.pid).children(recursive=True)
    (broker,) = [child for child in family if "mdcampaign.broker" in child.cmdline()]
    broker.kill()
    _, stderr = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "the broker ended with status -9" in stderr
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert {job.state for job in state(campaign).jobs.values()} == {"interrupted"}


def test_a_failed_job_is_an_outcome_and_is_told(tmp_path: Path) -> None:
    done = mdcampaign(tmp_path, "run", write(tmp_path / "c.yaml", "Small", jobs=2, fail="unstable"), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["done"], told["failed"]) == (2, 1)
    assert list(told["failures"]) == ["small/bad"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: t\nthinkr: x.py:Y\n", ["thinkr", "Did you mean 'thinker'"]),
        ("name: t\nthinker: nowhere.py:Y\n", ["nowhere.py", "no such file"]),
        (f"name: t\nthinker: {ROOT}/tests/campaigns/small.py:Smal\n", ["Smal", "Did you mean 'Small'"]),
        (f"name: t\nthinker: {ROOT}/tests/campaigns/small.py:Small\nparameters: {{job: 3}}\n", ["job", "'jobs'"]),
        (
            f"name: t\nthinker: {ROOT}/tests/campaigns/small.py:Small\nexecutor: {{slots_per_device: many}}\n",
            ["slots_per_device", "many"],
        ),
        (
            f"name: t\nthinker: {ROOT}/tests/campaigns/small.py:Small\ndirectory: a$(touch pwned) b\n",
            ["directory", "'$'", "' '"],
        ),
    ],
)
def test_a_bad_campaign_file_is_refused_in_one_sentence(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    done = mdcampaign(tmp_path, "run", "c.yaml")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "campaigns").exists()


@pytest.mark.timeout(900)
def test_quickstart_as_the_readme_runs_it(tmp_path: Path) -> None:
    done = subprocess.run(
        command("run", ROOT / "configs" / "quickstart.yaml", "--json"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["jobs"] == 28
    assert told["done"] + told["stopped"] == told["jobs"]
    assert told["interrupted"] >= 2
    assert told["groups"]["water"]["jobs"] == 3
    assert told["slot_idle_fraction"] < 0.5
    assert told["static_wall_s"] > told["lower_bound_s"] > 0
    assert told["findings"]["crossings"] >= 1
    assert told["findings"]["crossings"] + told["findings"]["censored"] == 24
    assert told["findings"]["rate_error_per_ns"] > 0
    assert told["resumed"]
    for one in told["resumed"]:
        assert one["frames"] == one["frames_expected"]
        assert one["lost_steps"] == 0
    assert told["waits_by_priority"]["100"]["max_s"] < told["waits_by_priority"]["0"]["max_s"]
    assert "on purpose" in done.stdout
    assert "urgent" in done.stdout
