"""The synthetic engine: honours directives, resumes, and fails in every way of the list of outcomes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from attempts import STOP, YIELD, Campaign

from mdcampaign.engines.drive import engine_of
from mdcampaign.engines.manifest import Manifest
from mdcampaign.errors import FAILURES, EngineFailed
from mdcampaign.jobs import Directive


def make_job(steps: int = 50, **engine: Any) -> dict[str, Any]:
    inputs = {"kind": "synthetic", "step_s": 1e-5, **engine}
    return {"name": "j", "steps": steps, "iteration_steps": 10, "engine": inputs}


def test_it_runs_anywhere() -> None:
    assert engine_of("synthetic").probe().problem == ""


def test_it_reports_each_iteration_and_is_done_at_its_target(campaign: Campaign) -> None:
    outcome = campaign.run(make_job(steps=45))

    assert (outcome.kind, outcome.step, outcome.target_step) == ("done", 45, 45)
    assert [(p.step, p.saved_step) for p in campaign.reports] == [(s, s) for s in (10, 20, 30, 40, 45)]
    assert campaign.reports[0].remaining_s == pytest.approx(35e-5)


@pytest.mark.parametrize("burn", [True, False])
def test_a_step_takes_its_time(campaign: Campaign, burn: bool) -> None:
    import time

    began = time.monotonic()
    campaign.run(make_job(step_s=0.002, burn=burn))

    assert time.monotonic() - began >= 50 * 0.002


def test_yield_then_resume(campaign: Campaign) -> None:
    first = campaign.run(make_job(), lambda p: YIELD if p.step == 20 else None)
    second = campaign.run(make_job())

    assert (first.kind, first.step) == ("interrupted", 20)
    assert (second.kind, second.step) == ("done", 50)
    assert [p.step for p in campaign.reports] == [30, 40, 50]
    manifest = Manifest.load(campaign.job_dir(make_job()))
    assert manifest
    assert [(p.attempt, p.first_step, p.accepted_step) for p in manifest.parts] == [(1, 0, 20), (2, 20, 50)]


def test_stop_keeps_the_result(campaign: Campaign) -> None:
    outcome = campaign.run(make_job(), lambda p: STOP if p.step == 30 else None)

    assert (outcome.kind, outcome.step) == ("stopped", 30)


def test_extend_goes_on_to_the_new_target(campaign: Campaign) -> None:
    outcome = campaign.run(make_job(), lambda p: Directive("extend", target_step=70) if p.step == 50 else None)

    assert (outcome.kind, outcome.step, outcome.target_step) == ("done", 70, 70)


def test_two_checkpoints_are_kept(campaign: Campaign) -> None:
    campaign.run(make_job())

    names = sorted(path.name for path in (campaign.job_dir(make_job()) / "attempt-1").iterdir())
    assert names == ["checkpoint-40.json", "checkpoint-50.json"]


def test_a_damaged_checkpoint_falls_back_visibly_and_two_end_the_job(campaign: Campaign) -> None:
    """W8, never a silent restart from zero."""
    job = make_job()
    campaign.run(job, lambda p: YIELD if p.step == 30 else None)
    attempt = campaign.job_dir(job) / "attempt-1"
    (attempt / "checkpoint-30.json").write_text("")

    campaign.run(job, lambda p: YIELD)

    assert campaign.reports[0].step == 30  # the iteration after step 20
    manifest = Manifest.load(campaign.job_dir(job))
    assert manifest and "checkpoint of step 30 refused" in manifest.events[0]

    for path in campaign.job_dir(job).glob("attempt-*/checkpoint-*"):
        path.write_text("")
    with pytest.raises(EngineFailed, match="no checkpoint of"):
        campaign.run(job)


@pytest.mark.parametrize("kind", ["input", "unstable", "memory", "device", "engine"])
def test_failures_that_the_engine_tells(campaign: Campaign, kind: Any) -> None:
    with pytest.raises(FAILURES[kind], match=f"asked to fail at step 25: {kind}"):
        campaign.run(make_job(fail=kind, fail_step=25))

    assert campaign.context and campaign.context.outcome
    assert (campaign.context.outcome.failure, campaign.context.outcome.step) == (kind, 25)
    assert [p.step for p in campaign.reports] == [10, 20]


@pytest.mark.parametrize(("kind", "code"), [("crashed", -signal.SIGSEGV), ("exit", 3)])
def test_failures_that_end_the_process(campaign: Campaign, kind: str, code: int) -> None:
    child = campaign.child(make_job(fail=kind, fail_step=25))

    assert child.end() == code
    manifest = Manifest.load(campaign.job_dir(make_job()))
    assert manifest and manifest.accepted_step == 20


def test_no_progress_reports_the_same_step_until_told(campaign: Campaign) -> None:
    job = make_job(fail="no progress", fail_step=25)
    outcome = campaign.run(job, lambda p: YIELD if len(campaign.reports) == 6 else None)

    assert outcome.kind == "interrupted"
    assert [p.step for p in campaign.reports] == [10, 20, 25, 25, 25, 25]
    assert campaign.run(job, lambda p: STOP if p.step == 25 else None).kind == "stopped"


def test_no_progress_can_be_killed(campaign: Campaign) -> None:
    child = campaign.child(make_job(fail="no progress", fail_step=25))
    steps = [report.step for _ in range(5) if (report := child.next_report())]

    assert steps == [10, 20, 25, 25, 25]
    assert child.kill() == -signal.SIGKILL


def test_it_fails_in_so_many_attempts_and_then_runs_well(campaign: Campaign) -> None:
    job = make_job(fail="engine", fail_step=25, fail_attempts=2)
    for _ in range(2):
        with pytest.raises(EngineFailed):
            campaign.run(job)

    assert campaign.run(job).kind == "done"


def test_it_holds_memory(campaign: Campaign) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    campaign.run(make_job(allocate_mb=before // 1024 + 64))  # more than this process ever had

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > before + 32 * 1024
