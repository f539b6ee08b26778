from collections.abc import Iterator
from pathlib import Path

import pytest

from mdcampaign.node import protocol
from tests.node.fake_broker import FakeBroker, Node


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[FakeBroker]:
    """A fake broker in a directory of its own; its agents end with it."""
    fake = FakeBroker(tmp_path)
    yield fake
    fake.close()


@pytest.fixture(scope="package")
def _node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    fake = FakeBroker(tmp_path_factory.mktemp("node"))
    agent = fake.start("--hb_period", "0.2", slots=2, MKL_NUM_THREADS="5", OMP_NUM_THREADS="")
    yield Node(fake, agent)
    fake.close()


@pytest.fixture
def node(_node: Node) -> Node:
    """A broker and its agent with two slots, shared by the tests that harm neither; nothing runs."""
    assert _node.agent.process.poll() is None, "an earlier test has ended the shared agent"
    _node.broker.heard.clear()
    _node.broker.wait(protocol.Heartbeat, where=lambda beat: beat.running == [])
    return _node
