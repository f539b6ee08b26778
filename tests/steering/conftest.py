"""Queues of both kinds, the second with a Redis server of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from mdcampaign.steering.queues import CampaignQueues, PipeQueues, RedisQueues
from tests.conftest import wait_until


def find_redis() -> str:
    """Return the path of redis-server; install it where it is missing and we may."""
    if shutil.which("redis-server") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "redis-server"]
        subprocess.run(command, check=True, capture_output=True)
    path = shutil.which("redis-server")
    assert path, "these tests need redis-server: install it with the system's package manager"
    return path


@pytest.fixture(scope="session")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A Redis server on a loopback port, with a directory of its own and nothing kept on disk."""
    directory = tmp_path_factory.mktemp("redis")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    server = subprocess.Popen([find_redis(), *options], stdout=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return bool(redis.Redis(port=port).ping())
        except redis.exceptions.ConnectionError:
            return False

    wait_until(answers, "the Redis server to answer")
    yield port
    server.terminate()
    server.wait(10)


Make = Callable[..., CampaignQueues]


@pytest.fixture(params=["pipe", "redis"])
def make_queues(request: pytest.FixtureRequest) -> Make:
    """Makes queues of one kind and then, in the next test, of the other."""
    if request.param == "pipe":
        return PipeQueues
    port = request.getfixturevalue("redis_port")

    def make(*args: Any, **kwargs: Any) -> CampaignQueues:
        return RedisQueues(*args, port=port, **kwargs)

    return make


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    """Where Parsl writes."""
    return str(tmp_path / "runinfo")
