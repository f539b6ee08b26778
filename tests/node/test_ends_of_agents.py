"""Real ends of agents, templates and brokers."""

import signal
from pathlib import Path

from mdcampaign.node import protocol
from tests.node import tasks
from tests.node.fake_broker import FakeBroker, alive, descendants, kill, until
from tests.node.test_ends_of_tasks import pids_in


def test_agent_killed_leaves_nothing_alive(broker: FakeBroker, tmp_path: Path) -> None:
    """L3, setsid'd grandchildren included."""
    agent = broker.start()
    for i in (0, 1):
        broker.place(tasks.family, str(tmp_path / f"pids{i}"), index=(i,))
    pids = [pid for i in (0, 1) for pid in pids_in(tmp_path / f"pids{i}")]
    everybody = {agent.template, *descendants(agent.process.pid)}
    assert everybody.issuperset(pids)
    agent.signal(signal.SIGKILL)
    until(lambda: not any(map(alive, everybody)), "the whole family to end", limit_s=5)


def test_template_killed_loses_what_ran_and_nothing_more(broker: FakeBroker, tmp_path: Path) -> None:
    agent = broker.start()
    lost = broker.place(tasks.family, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    broker.run(tasks.nothing, index=(1,))
    template = agent.template
    kill(template)
    ended = broker.ended(lost)
    next_one = broker.place(tasks.pid, index=(1,))  # has to wait for the new template
    assert ended.how == "lost" and not any(map(alive, pids))
    assert isinstance(broker.result(next_one), int)
    assert agent.template != template
    assert broker.run(tasks.echo, 1) == 1


def test_a_template_that_never_comes_up_ends_the_agent(broker: FakeBroker, tmp_path: Path) -> None:
    agent = broker.start()
    for _ in range(3):
        kill(template := agent.template)
        until(lambda template=template: agent.template != template, "another template")
    kill(agent.template)
    code, _ = agent.end()
    assert code == 5
    assert "template" in broker.wait(protocol.Leaving).reason


def test_sigterm_drains(broker: FakeBroker, tmp_path: Path) -> None:
    """W18, W3: who reports is told to yield, who does not is ended; then the agent goes, with nothing left."""
    agent = broker.start(slots=3)
    saves = broker.place(tasks.iterate, index=(0,))
    plain = broker.place(tasks.family, str(tmp_path / "pids"), index=(1,))
    pids = pids_in(tmp_path / "pids")
    broker.wait(protocol.Report, saves)
    broker.run(tasks.nothing, index=(2,))
    everybody = descendants(agent.process.pid)
    agent.signal(signal.SIGINT)  # ignored
    agent.signal(signal.SIGTERM)
    agent.signal(signal.SIGTERM)  # steps of srun get it twice
    assert broker.ended(saves).how == "interrupted"
    ended = broker.ended(plain)
    assert ended.how == "lost" and "SIGTERM" in ended.message and not any(map(alive, pids))
    assert "SIGTERM" in broker.wait(protocol.Leaving).reason
    assert agent.end()[0] == 0
    assert not any(map(alive, everybody))
    assert len(broker.all(protocol.Ended, saves)) == 1


def test_sigterm_to_every_process_of_a_step_lets_jobs_save(broker: FakeBroker) -> None:
    """W3: Slurm sends it to agent, template and runners alike."""
    agent = broker.start()
    saves = broker.place(tasks.iterate)
    broker.wait(protocol.Report, saves)
    for pid in [*descendants(agent.process.pid), agent.process.pid]:
        kill(pid, signal.SIGTERM)
    assert broker.ended(saves).how == "interrupted"
    assert agent.end()[0] == 0


def test_usr1_drains_and_new_work_is_turned_away(broker: FakeBroker, tmp_path: Path) -> None:
    agent = broker.start()
    deaf = broker.place(tasks.deaf, str(tmp_path / "pids"))
    broker.wait(protocol.Report, deaf)
    agent.signal(signal.SIGUSR1)
    assert "SIGUSR1" in broker.wait(protocol.Leaving).reason
    late = broker.ended(broker.place(tasks.nothing, index=(1,)))
    assert late.how == "lost" and "leaving" in late.message
    broker.send(protocol.Cancel(task=deaf, attempt=1))
    assert broker.ended(deaf).how == "cancelled"
    assert agent.end()[0] == 0


def test_the_drain_period_lets_work_end(broker: FakeBroker, tmp_path: Path) -> None:
    for period in ("8", "32"):  # counted from the agent's start, so one that starts slowly drains before it works
        agent = broker.start("--drain_period", period, register=False)
        until(lambda agent=agent: broker.pump() or broker.heard or agent.process.poll() is not None, "registration")
        if agent.process.poll() is None:
            break
        assert agent.process.returncode == 0
    broker.accept()
    held = broker.place(tasks.wait_for, str(tmp_path / "go"))
    assert "drain period" in broker.wait(protocol.Leaving).reason
    (tmp_path / "go").touch()
    assert broker.ended(held).how == "result"
    assert agent.end()[0] == 0


def test_fenced_ends_everything_and_reports_nothing(broker: FakeBroker, tmp_path: Path) -> None:
    agent = broker.start()
    task = broker.place(tasks.family, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    broker.send(protocol.Fenced())
    assert agent.end()[0] == 3
    assert not any(map(alive, pids))
    broker.pump()
    assert broker.all(protocol.Ended, task) == []


def test_shutdown(broker: FakeBroker, tmp_path: Path) -> None:
    agent = broker.start()
    broker.place(tasks.family, str(tmp_path / "pids"))
    pids = pids_in(tmp_path / "pids")
    broker.send(protocol.Shutdown(reason="scale in"))
    assert agent.end()[0] == 0
    assert not any(map(alive, pids))


def test_refused_says_why(broker: FakeBroker) -> None:
    agent = broker.start(register=False)
    broker.wait(protocol.Register)
    broker.send(protocol.Refused(reason="it runs Python 3.9, this campaign 3.12"))
    code, err = agent.end()
    assert code == 2
    assert "it runs Python 3.9, this campaign 3.12" in err


def test_a_silent_broker_is_given_up_after_the_next_report(broker: FakeBroker) -> None:
    broker.answers_heartbeats = False
    agent = broker.start("--hb_threshold", "3")
    task = broker.place(tasks.iterate)
    broker.wait(protocol.Report, task)
    assert broker.ended(task).how == "interrupted"
    assert "no word from the broker" in broker.wait(protocol.Leaving).reason
    code, err = agent.end()
    assert code == 4 and "no word from the broker" in err


def test_no_broker_at_all(tmp_path: Path) -> None:
    nobody = FakeBroker(tmp_path)
    nobody.close()
    agent = nobody.start("--address_probe_timeout", "1", register=False)
    code, err = agent.end()
    assert code == 1 and "No viable ZMQ url" in err


def test_cores_that_do_not_fit_are_refused_in_words(broker: FakeBroker) -> None:
    agent = broker.start("--cpu-affinity", "list:0:0", register=False)
    code, err = agent.end()
    assert code == 1 and "a core is listed twice" in err
