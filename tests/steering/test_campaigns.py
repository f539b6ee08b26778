"""Whole campaigns in processes of their own: run_campaign, Thinker, queues, task server and the stand-in executor."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUARD_S = 60.0


def begin(name: str, directory: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.steering.campaigns", name, json.dumps({"dir": str(directory), **options})]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def end(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """Return what the campaign says of itself, and its stderr."""
    try:
        out, err = process.communicate(timeout=GUARD_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the campaign did not end\n{out}\n{err}") from None
    assert out.strip(), err
    report = json.loads(out.strip().splitlines()[-1])
    assert process.returncode == report["status"], err
    return report, err


def run(name: str, directory: Path, **options: Any) -> tuple[dict[str, Any], str]:
    return end(begin(name, directory, **options))


@pytest.fixture(params=["pipe", "redis"])
def queue(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The option that chooses the kind of queue."""
    return {} if request.param == "pipe" else {"redis_port": request.getfixturevalue("redis_port")}


def test_a_campaign_sees_every_iteration_and_ends_by_itself(queue: dict[str, Any], tmp_path: Path) -> None:
    report, err = run("Plain", tmp_path, **queue)
    assert report["status"] == 0, err
    assert report["names"] == ["default/j0", "default/j1", "default/j2", "default/j3", "others/x"]
    for name in ("default/j0", "default/j1", "default/j2", "default/j3"):
        assert report["steps"][name][-1] == 20
        assert report["steps"][name] == sorted(set(report["steps"][name]))
    assert ["default/late", "done", 2, True] in report["results"]
    assert report["others"] == [["others/x", "unstable", "NaN at step 1"]]
    assert len(report["third"]) == 6  # of 20 reports every third
    assert "others/x" not in report["steps"]


def test_every_verb_is_acknowledged_at_every_moment(tmp_path: Path) -> None:
    report, err = run("Verbs", tmp_path)
    assert report["status"] == 0, err
    acks = report["acks"]
    assert acks.pop("stop") == [True, "running"]
    assert acks.pop("again")[1] in ("running", "ended")
    assert acks.pop("cancel") == [True, "running"]
    assert acks == {
        "at once": [True, "waiting"],
        "early": [True, "waiting"],
        "dropped": [True, "waiting"],
        "rerank": [True, "waiting"],
        "explain": [True, "waiting"],
        "unknown": [False, "unknown"],
    }
    assert report["late"] == [False, "ended"]
    kinds = {name.partition("/")[2]: kind for name, (kind, _) in report["outcomes"].items()}
    assert kinds == {
        "stop-me": "stopped",
        "waits": "stopped",
        "cancel-me": "cancelled",
        "drop-me": "cancelled",
        "extend-me": "done",
    }
    assert report["outcomes"]["default/extend-me"][1] == 5


def test_a_burst_of_a_thousand_verbs_does_not_block(queue: dict[str, Any], tmp_path: Path) -> None:
    """200 verbs deadlocked PipeQueues in a trial. Here both directions are full: 8 kB of progress a millisecond."""
    report, err = run("Burst", tmp_path, padding=8192, **queue)
    assert report["status"] == 0, err
    assert (report["verbs"], report["ok"]) == (1000, 1000)
    assert {kind for kind, _ in report["outcomes"].values()} == {"stopped"}


def test_a_verb_never_overtakes_the_job_that_it_is_for(tmp_path: Path) -> None:
    report, err = run("Order", tmp_path)
    assert report["status"] == 0, err
    assert set(report["states"]) <= {"waiting", "running"}
    assert report["places"] == list(range(1, 61))
    assert {kind for kind, _ in report["outcomes"].values()} == {"stopped"}


def test_a_slow_handler_gets_the_newest_and_never_slows_the_job(tmp_path: Path) -> None:
    report, err = run("SlowHandler", tmp_path)
    assert report["status"] == 0, err
    assert report["steps"] == sorted(report["steps"])
    assert report["steps"][-1] == 300
    assert report["counted"] == 300  # delivered and skipped make all
    assert len(report["steps"]) < 100
    assert report["handled_when_done"] < len(report["steps"])


def test_k1_a_handler_that_raises_ends_the_campaign_and_running_jobs_are_saved(tmp_path: Path) -> None:
    report, err = run("Raises", tmp_path)
    assert report["status"] == 1
    assert report["failures"] == ["harvest"]
    assert err.count("Traceback") == 1
    assert "RuntimeError: I cannot go on" in err
    outcomes = report["outcomes"]
    assert [outcomes[f"default/short{n}"][0] for n in range(3)] == ["done"] * 3
    longs = [outcomes[f"default/long{n}"] for n in range(3)]
    assert {kind for kind, _ in longs} == {"interrupted"}
    assert max(step for _, step in longs) > 0


def test_k1_the_death_of_the_task_server_is_noticed(queue: dict[str, Any], tmp_path: Path) -> None:
    report, err = run("ServerKilled", tmp_path, **queue)
    assert report["status"] == 1
    assert report["failures"] == ["task server"]
    assert "TaskServerLost: the task server was killed by signal 9" in err
    assert report["done_when_woken"]
    assert report["stuck"] == []


def test_k1_a_task_server_that_fails_in_its_set_up_says_so(tmp_path: Path) -> None:
    report, err = run("SetupFails", tmp_path, fail_start=True)
    assert report["status"] == 1
    assert report["failures"] == ["task server"]
    assert "TaskServerLost: the task server ended with exit code 1" in err
    assert err.count("RuntimeError: there is no such partition") >= 1
    assert report["ack"]


def test_k2_done_reaches_agents_that_wait_and_results_come_first(tmp_path: Path) -> None:
    report, err = run("Sleepers", tmp_path)
    assert report["status"] == 0, err
    assert sorted(report["results"]) == [f"default/j{n}" for n in range(5)]
    assert report["done_when_woken"]
    assert report["stuck"] == []
    assert report["ended_s"] < 5.0 + 1.0  # K2 allows 5 s; the rest is for a busy machine


def test_ctrl_c_once_saves_running_jobs(tmp_path: Path) -> None:
    process = begin("Interrupted", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGINT)
    report, _ = end(process)
    assert report["status"] == 130
    assert [kind for kind, _ in report["outcomes"].values()] == ["interrupted"] * 3
    assert sum(step > 0 for _, step in report["outcomes"].values()) == 2
    assert "results" not in report  # what the end interrupts is no result
    assert report["failures"] == []


def test_ctrl_c_twice_ends_within_five_seconds(tmp_path: Path) -> None:
    process = begin("Interrupted", tmp_path, drains=False, drain_s=1000.0)
    assert process.stdout is not None
    assert process.stdout.readline() == "running\n"
    process.send_signal(signal.SIGTERM)  # counts as well
    assert process.stderr is not None
    while "once more ends them at once" not in process.stderr.readline():
        pass
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    report, _ = end(process)
    assert time.monotonic() - began < 5.0 + 2.0  # 5 s are promised; the rest is for a busy machine
    assert report["status"] == 143


def test_jobs_and_methods_side_by_side_and_bad_input_refused_in_the_users_script(tmp_path: Path) -> None:
    report, err = run("Mixed", tmp_path)
    assert report["status"] == 0, err
    assert sorted(report["values"]) == [0, 1, 4, 9, 16]
    refused = report["refused"]
    assert refused["no job"].startswith("BadJob: job: only an MDJob can be submitted")
    assert refused["again"] == (
        "BadJob: name: this job is active already (got 'default/a'). "
        "Use extend() to make it longer, or give this job another name."
    )
    assert refused["other"].startswith("NameTaken: default/a: another simulation has this name")
    assert "active already (got 'default/b')" in refused["twice in a list"]
    assert "active already (got 'default/a')" in refused["last of a list"]
    assert refused["target_step"] == "BadInput: target_step: must be a whole number of at least 1 (got 0)"
    assert refused["priority"] == "BadInput: priority: must be a finite number (got nan)"
    assert report["outcomes"] == {"default/a": ["done", 200]}
    assert report["targets"] == [50, 100, 200]  # a job that has ended goes on under its name
