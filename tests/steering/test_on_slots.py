"""The steering layer on the real executor: broker, agent, runners and the synthetic engine."""

from __future__ import annotations

from pathlib import Path

from tests.steering.test_campaigns import run


def test_jobs_verbs_methods_and_a_streaming_generator_on_slots(redis_port: int, tmp_path: Path) -> None:
    report, err = run("OnSlots", tmp_path / "campaign", real=True, redis_port=redis_port)
    assert report["status"] == 0, err
    outcomes = {name.partition("/")[2]: outcome for name, outcome in report["outcomes"].items()}
    assert outcomes["extended"] == ["done", 40]
    assert outcomes["stopped"][0] == "stopped"
    assert outcomes["stopped"][1] > 0
    assert outcomes["drop-me"] == ["cancelled", 0]
    assert outcomes["bad"][0] == "failed"
    assert all(ok for ok, _ in report["acks"].values()), report["acks"]
    assert sorted(report["values"], key=str) == [
        ["complain", None, False],
        ["square", 49, True],
        ["stream", None, True],
    ]
    assert report["streamed"] == [[n, 4] for n in range(4)]  # in order, with the inputs that did not travel


def test_k1_running_jobs_are_checkpointed_when_a_handler_raises(tmp_path: Path) -> None:
    report, err = run("Raises", tmp_path / "campaign", real=True)
    assert report["status"] == 1
    assert "RuntimeError: I cannot go on" in err
    longs = [outcome for name, outcome in report["outcomes"].items() if "long" in name]
    assert {kind for kind, _ in longs} == {"interrupted"}
    assert max(step for _, step in longs) > 0
    manifests = [path.read_text() for path in (tmp_path / "campaign" / "jobs" / "default").glob("long*/manifest.json")]
    assert any('"state": "interrupted"' in text for text in manifests)
