"""`mdcampaign simulate`, the demo mode, as a user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mdcampaign.cli import main


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["simulate", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_tutorial_is_what_runs_when_nothing_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    told = figures(capsys)
    assert told == figures(capsys, "--workload", "tutorial", "--jobs", "8", "--slots", "2", "--seed", "42")
    assert (told["jobs"], told["slots"]) == (8, 2)
    assert list(told["policies"]) == ["continuous", "fifo", "static"]
    for policy in told["policies"].values():
        assert policy["makespan_s"] >= told["lower_bound_s"]
        assert 0 <= policy["idle_fraction"] < 1
        assert policy["mean_wait_s"] <= policy["max_wait_s"] == policy["top_waits"][0]["wait_s"]
        assert len(policy["top_waits"]) == 3
        assert policy["waits_by_priority"]["5"]["max_s"] == 0.0


def test_other_workloads_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    told = figures(capsys, "--jobs", "40", "--devices", "3", "--slots", "4", "--durations", "constant:2", "--seed", "1")
    assert (told["jobs"], told["devices"], told["slots"]) == (40, 3, 12)
    assert {policy["makespan_s"] for policy in told["policies"].values()} == {8.0}
    assert list(told["policies"]["fifo"]["waits_by_priority"]) == ["0"]


def test_a_workload_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_text("duration_s,priority\n3,0\n1,0\n1,9\n")
    told = figures(capsys, "--csv", str(file), "--slots", "1")
    assert told["lower_bound_s"] == told["policies"]["static"]["makespan_s"] == 5.0
    assert told["policies"]["continuous"]["waits_by_priority"]["9"]["max_s"] == 0.0


def test_the_tables_show_what_the_object_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 0
    shown = capsys.readouterr().out
    for word in ("lower bound 25.77 s", "28.68", "33.43", "continuous", "effective priority", "job-8"):
        assert word in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--jobs 0", "jobs: must be at least 1 (got 0)"),
        ("--jobs many", "jobs: is not a whole number (got 'many')"),
        ("--slots -1", "slots: must be at least 1 (got -1)"),
        ("--devices 0", "devices"),
        ("--seed 1.5", "seed"),
        ("--aging -1", "aging"),
        ("--durations unifrom:1,2", "Did you mean 'uniform'?"),
        ("--workload tutoral", "Did you mean 'tutorial'?"),
        ("--lengths unknwon", "Did you mean 'unknown'?"),
        ("--csv no-such-file", "no-such-file"),
        ("--csv no-such-file --jobs 3", "the CSV file already says this"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(["simulate", *arguments.split()]) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.out == ""
    assert len(told.err.splitlines()) == 1


def test_a_file_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "jobs.csv"
    file.write_bytes(b"\xff\xfe\x00")
    assert main(["simulate", "--csv", str(file)]) == 2
    assert "not a text file" in capsys.readouterr().err


def test_it_runs_in_a_process_of_its_own_without_parsl_or_an_engine() -> None:
    code = (
        "import sys; from mdcampaign.cli import main; main(['simulate', '--json']); "
        "sys.exit(bool({'parsl', 'colmena', 'openmm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["jobs"] == 8


SHOWN = re.findall(
    r"```console\n\$ mdcampaign (simulate[^\n]*)\n(.*?)\.\.\.\n```",
    (Path(__file__).parent.parent / "docs" / "continuous-batching.md").read_text(encoding="utf-8"),
    re.DOTALL,
)


def test_the_page_on_continuous_batching_shows_both_sides() -> None:
    assert {"simulate --workload tutorial", "simulate --jobs 8 --durations uniform:5,6"} <= {line for line, _ in SHOWN}


@pytest.mark.parametrize(("line", "output"), SHOWN)
def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, output: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(line.split()) == 0
    printed = [text.rstrip() for text in capsys.readouterr().out.splitlines()]
    assert output.splitlines() == printed[: len(output.splitlines())]
