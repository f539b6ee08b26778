"""A real agent carries progress up and directives down."""

from pathlib import Path

from mdcampaign.node import protocol
from tests.node import tasks
from tests.node.fake_broker import Node


def test_reports_arrive_in_order(node: Node) -> None:
    broker = node.broker
    task = broker.place(tasks.report, 20)
    assert broker.result(task) == ["continue"] * 20
    reports = broker.all(protocol.Report, task)
    assert [one.seq for one in reports] == list(range(1, 21))
    assert [one.progress["step"] for one in reports] == list(range(1, 21))
    assert reports[-1].progress["observables"] == {"energy": 20.0}
    assert reports[-1].skipped == 0


def test_a_flood_of_reports_is_thinned_and_the_newest_arrives(node: Node) -> None:
    broker = node.broker
    task = broker.place(tasks.flood, 20_000)
    assert broker.result(task) is None
    reports = broker.all(protocol.Report, task)
    steps = [one.progress["step"] for one in reports]
    assert steps == sorted(steps)
    assert steps[-1] == reports[-1].seq == 20_000
    assert len(reports) + reports[-1].skipped == 20_000
    assert reports[-1].skipped > 0


def test_directives_reach_the_attempt_that_they_are_for(node: Node) -> None:
    broker = node.broker
    task = broker.place(tasks.iterate, attempt=2)
    broker.wait(protocol.Report, task)
    broker.send(protocol.Direct(task=task, attempt=1, id=1, kind="stop"))
    broker.send(protocol.Direct(task=task, attempt=2, id=2, kind="extend", target_step=9))
    directive = broker.result(task)
    assert (directive.kind, directive.id, directive.attempt, directive.target_step) == ("extend", 2, 2, 9)


def test_a_directive_waits_in_the_mailbox_for_the_first_report(node: Node) -> None:
    broker = node.broker
    broker.run(tasks.nothing, index=(1,))  # so that the next one has to wait for this runner's end
    task = broker.place(tasks.iterate, index=(0, 1))
    broker.send(protocol.Direct(task=task, attempt=1, id=5, kind="stop"))
    assert broker.result(task).id == 5
    assert len(broker.all(protocol.Report, task)) == 1


def test_a_late_directive_does_not_reach_the_next_task(node: Node, tmp_path: Path) -> None:
    broker = node.broker
    first = broker.place(tasks.nothing)
    for number in range(20):
        broker.send(protocol.Direct(task=first, attempt=1, id=number, kind="stop"))
    broker.ended(first)
    assert broker.run(tasks.report, 30) == ["continue"] * 30


def test_yield_ends_interrupted_without_a_result(node: Node) -> None:
    broker = node.broker
    task = broker.place(tasks.iterate, attempt=4)
    broker.wait(protocol.Report, task)
    broker.send(protocol.Direct(task=task, attempt=4, id=1, kind="yield"))
    ended, payload = broker.wait_both(protocol.Ended, task)
    assert (ended.how, ended.failed, payload) == ("interrupted", False, None)
    assert ended.outcome and (ended.outcome["kind"], ended.outcome["attempt"]) == ("interrupted", 4)
    assert broker.run(tasks.pid) == broker.wait(protocol.Started, task).pid  # the runner is as good as before


def test_a_mailbox_that_nobody_reads_does_not_stop_the_agent(node: Node, tmp_path: Path) -> None:
    broker, agent = node.broker, node.agent
    held = broker.place(tasks.wait_for, str(tmp_path / "go"))
    broker.wait(protocol.Started, held)
    for number in range(2000):
        broker.send(protocol.Direct(task=held, attempt=1, id=number, kind="stop"))
    assert broker.run(tasks.echo, "alive", index=(1,)) == "alive"
    assert "one is dropped" in agent.log
    (tmp_path / "go").touch()
    assert broker.ended(held).how == "result"
