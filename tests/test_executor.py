"""SlotExecutor on real processes: what a Parsl user sees, and how jobs are steered."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from pathlib import Path

import parsl
import pytest
from parsl import bash_app, join_app, python_app
from parsl.executors.errors import InvalidResourceSpecification

from mdcampaign.errors import BadJob
from mdcampaign.executor import SlotExecutor
from mdcampaign.scheduling.policy import Policy
from tests import apps
from tests.conftest import GUARD_S, Start, wait_until

nap = python_app(apps.nap)
double = python_app(apps.double)
stamp = python_app(apps.stamp)
seat = python_app(apps.seat)
steps = python_app(apps.steps)


def test_everything_defaulted_works_on_a_laptop(tmp_path: Path) -> None:
    with parsl.load(parsl.Config(executors=[SlotExecutor(label="slots")], run_dir=str(tmp_path))):
        assert double(21).result(GUARD_S) == 42


def test_apps_of_every_kind(start: Start, tmp_path: Path) -> None:
    start()

    @bash_app
    def shout(outputs=()):
        return f"echo hello > {outputs[0]}"

    @join_app
    def twice(x):
        return double(x)

    assert [f.result(GUARD_S) for f in [double(n) for n in range(20)]] == [2 * n for n in range(20)]
    assert twice(double(3)).result(GUARD_S) == 12
    out = shout(outputs=[parsl.File(str(tmp_path / "out"))])
    out.outputs[0].result(GUARD_S)
    assert (tmp_path / "out").read_text() == "hello\n"
    with pytest.raises(ValueError, match="because"):
        python_app(apps.complain)("because").result(GUARD_S)


def test_large_arguments_and_results(start: Start) -> None:
    start(encrypted=True)
    big = b"x" * 8_000_000
    assert python_app(lambda data: data + b"y")(big).result(GUARD_S) == big + b"y"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"priorty": 3}, ["priorty", "Did you mean 'priority'", "got 3"]),
        ({"priority": "high"}, ["priority", "'high'", "finite number"]),
        ({"slots": 0}, ["slots", "at least 1"]),
        ({"slots": 3}, ["3 slots", "2"]),
        ({"exclusive": 1}, ["exclusive", "True or False"]),
    ],
)
def test_bad_specification_is_refused_in_words_and_never_retried(start: Start, spec: dict, words: list[str]) -> None:
    executor = start(retries=3)
    future = double(1, parsl_resource_specification=spec)
    with pytest.raises(InvalidResourceSpecification) as caught:
        future.result(GUARD_S)
    for word in words:
        assert word in str(caught.value)
    assert future.task_record["fail_count"] == 1
    assert executor.outstanding() == 0


def test_priority_decides_the_order_and_ties_are_first_come(start: Start) -> None:
    executor = start(slots_per_device=1)
    blocker = stamp(1.0)
    wait_until(lambda: executor.snapshot()["running"] == 1, "the blocker to run")
    low = [stamp(0.01, parsl_resource_specification={"priority": 0}) for _ in range(3)]
    high = [stamp(0.01, parsl_resource_specification={"priority": 5}) for _ in range(2)]
    began = {name: f.result(GUARD_S)[0] for name, f in zip("Babcde", [blocker, *low, *high])}
    assert sorted(began, key=began.get) == ["B", "d", "e", "a", "b", "c"]


def test_s2_an_urgent_task_that_arrives_late_starts_at_the_next_freed_slot(start: Start) -> None:
    start()
    queued = [stamp(0.05) for _ in range(60)]
    queued[5].result(GUARD_S)
    urgent = stamp(0.01, parsl_resource_specification={"priority": 10})
    asked = time.monotonic()
    began = urgent.result(GUARD_S)[0]
    later = [f.result(GUARD_S) for f in queued]
    between = sum(asked + 0.03 < b < began for b, _ in later)
    assert between <= 2


def test_m6_an_exclusive_job_has_no_neighbour_from_first_to_last_second(start: Start) -> None:
    start()
    before = [stamp(0.2) for _ in range(5)]
    alone = stamp(0.3, parsl_resource_specification={"exclusive": True, "priority": 1})
    after = [stamp(0.2) for _ in range(5)]
    first, last = alone.result(GUARD_S)
    for future in [*before, *after]:
        began, ended = future.result(GUARD_S)
        assert ended <= first or began >= last


def test_c1_c3_c4_slots_keep_disjoint_cores_and_threads(start: Start) -> None:
    start()
    seats = [f.result(GUARD_S) for f in [seat() for _ in range(12)]]
    cores = {}
    for one in seats:
        assert one["CUDA_VISIBLE_DEVICES"] == ""
        assert one["OMP_NUM_THREADS"] == one["OPENMM_CPU_THREADS"] == str(len(one["cores"]))
        assert cores.setdefault(tuple(one["slot"]), one["cores"]) == one["cores"]
    if len(cores) == 2 and sum(map(len, cores.values())) > 1:
        first, second = cores.values()
        assert not set(first) & set(second) or first == second


def test_warm_runner_serves_task_after_task(start: Start) -> None:
    start(slots_per_device=1)
    pids = {seat().result(GUARD_S)["pid"] for _ in range(5)}
    assert len(pids) == 1


def test_progress_is_ordered_and_carries_its_attempt(start: Start, events, tmp_path: Path) -> None:
    executor = start()
    seen = events(executor)
    spec = {"name": "demo/a"}
    result = steps(20, 0.01, str(tmp_path / "save"), parsl_resource_specification=spec).result(GUARD_S)
    assert result["last"] == 20
    progress = [e for e in seen if e["event"] == "progress"]
    assert progress and all(e["job"] == "demo/a" and e["attempt"] == 1 for e in progress)
    assert [e["seq"] for e in progress] == sorted({e["seq"] for e in progress})
    kinds = [e["event"] for e in seen if e.get("job") == "demo/a" and e["event"] != "progress"]
    assert kinds == ["submitted", "placed", "started", "ended", "done"]


def test_stop_extend_and_rerank_reach_jobs(start: Start, events, tmp_path: Path) -> None:
    executor = start(slots_per_device=1)
    seen = events(executor)
    stopped = steps(10_000, 0.01, str(tmp_path / "a"), parsl_resource_specification={"name": "demo/a"})
    wait_until(lambda: any(e["event"] == "progress" for e in seen), "the first report")
    waiting = [
        steps(3, 0.01, str(tmp_path / n), parsl_resource_specification={"name": f"demo/{n}"}) for n in ("b", "c")
    ]
    wait_until(lambda: executor.snapshot()["waiting"] == 2, "both to wait")
    assert executor.control("rerank", "demo/c", priority=5).result(GUARD_S)["state"] == "waiting"
    refused = executor.control("extend", "demo/a", target_step=7).result(GUARD_S)
    assert not refused["ok"] and "10000 already" in refused["message"]
    assert executor.control("extend", "demo/b", target_step=7).result(GUARD_S)["ok"]
    assert executor.control("stop", "demo/a").result(GUARD_S) == {
        "ok": True,
        "state": "running",
        "message": "it will be told at its next report",
    }
    assert stopped.result(GUARD_S)["last"] < 10_000
    assert [f.result(GUARD_S)["last"] for f in waiting] == [7, 3]
    order = [e["job"] for e in seen if e["event"] == "placed"]
    assert order == ["demo/a", "demo/c", "demo/b"]
    assert executor.control("stop", "demo/a").result(GUARD_S)["state"] == "ended"
    assert executor.control("stop", "demo/x").result(GUARD_S)["state"] == "unknown"


@pytest.mark.parametrize("payload", [{"priority": float("nan")}, {"priority": "high"}, {"target_step": 0}, {"prio": 1}])
def test_a_verb_with_a_bad_value_is_refused_at_once(start: Start, payload: dict) -> None:
    executor = start(slots_per_device=1)
    waiting = [nap(0.3), nap(0.0, parsl_resource_specification={"name": "demo/w"})]
    with pytest.raises(BadJob, match=next(iter(payload))):
        executor.control("rerank", "demo/w", **payload)
    for future in waiting:
        future.result(GUARD_S)


def test_preemption_an_urgent_job_makes_a_bulk_job_yield(start: Start, events, tmp_path: Path) -> None:
    executor = start(slots_per_device=1, policy=Policy(preempt_gap=5.0))
    seen = events(executor)
    spec = {"name": "demo/bulk", "requeue": True}
    bulk = steps(60, 0.02, str(tmp_path / "bulk"), parsl_resource_specification=spec)
    wait_until(lambda: any(e["event"] == "progress" for e in seen), "the first report")
    urgent = stamp(0.05, parsl_resource_specification={"name": "demo/urgent", "priority": 100})
    urgent.result(GUARD_S)
    assert not bulk.done()
    result = bulk.result(GUARD_S)
    assert result["last"] == 60
    assert result["attempt"] == 2
    assert result["first"] > 0
    order = [(e["job"], e["attempt"]) for e in seen if e["event"] == "placed"]
    assert order == [("demo/bulk", 1), ("demo/urgent", 1), ("demo/bulk", 2)]


def test_explain_gives_a_sentence(start: Start) -> None:
    executor = start(slots_per_device=1)
    blocker = nap(1.0)
    waiting = nap(0.0, parsl_resource_specification={"name": "demo/w"})
    wait_until(lambda: executor.snapshot()["running"] == 1, "the blocker to run")
    answer = executor.control("explain", "demo/w").result(GUARD_S)
    assert answer["state"] == "waiting"
    assert len(answer["message"].split()) > 3
    blocker.result(GUARD_S)
    waiting.result(GUARD_S)


def test_cancel_of_a_queued_task(start: Start) -> None:
    executor = start(slots_per_device=1)
    blocker = nap(0.5)
    queued = nap(100)
    after = nap(0)
    wait_until(lambda: "exec_fu" in queued.task_record and queued.task_record["exec_fu"], "its launch")
    assert queued.task_record["exec_fu"].cancel()
    blocker.result(GUARD_S)
    assert after.result(GUARD_S) == 0
    wait_until(lambda: executor.snapshot()["running"] == 0, "an empty slot")
    with pytest.raises(CancelledError):
        queued.result(GUARD_S)


def test_l4_l5_cancel_ends_the_whole_tree_before_the_slot_is_used_again(start: Start, tmp_path: Path) -> None:
    start(slots_per_device=1)
    pids_file = tmp_path / "pids"
    family = python_app(apps.silent_family)(str(pids_file))
    wait_until(pids_file.exists, "the family to be born")
    pids = [int(pid) for pid in pids_file.read_text().split()]

    def living(candidates):
        from pathlib import Path

        return [pid for pid in candidates if Path(f"/proc/{pid}").exists()]

    next_in_slot = python_app(living)(pids)
    assert family.task_record["exec_fu"].cancel()
    assert next_in_slot.result(GUARD_S) == []


def test_memoization_does_not_see_a_priority(start: Start) -> None:
    start()
    counted = python_app(apps.stamp, cache=True, ignore_for_cache=["parsl_resource_specification"])
    first = counted(0.01, parsl_resource_specification={"priority": 1}).result(GUARD_S)
    second = counted(0.01, parsl_resource_specification={"priority": 2}).result(GUARD_S)
    assert first == second
