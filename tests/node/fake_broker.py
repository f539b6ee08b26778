"""A broker that does only what a test tells it to, and real agents that talk to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import zmq
from parsl.serialize import deserialize, pack_apply_message

from mdcampaign.node import processes, protocol

GUARD_S = 30.0
"""A guard against hanging, not a claim about speed."""

M = TypeVar("M", bound=protocol.Message)


def until(condition: Callable[[], Any], what: str, limit_s: float = GUARD_S) -> Any:
    """Wait until `condition` gives something true and return it."""
    deadline = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {limit_s} s in vain for {what}"
        time.sleep(0.005)
    return value


def alive(pid: int) -> bool:
    """Tell whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return all processes below one, itself left out."""
    below = processes.children(pid)
    return below + [deeper for child in below for deeper in descendants(child)]


class Agent:
    """A real agent process."""

    def __init__(self, port: int, directory: Path, options: list[str], environ: dict[str, str]) -> None:
        self.logdir = directory / "logs"
        command = [sys.executable, "-m", "mdcampaign.node.agent", "--addresses", "127.0.0.1", "--port", str(port)]
        command += ["--cert_dir", "None", "--logdir", str(self.logdir), "--block_id", "0", "--uid", "agent"]
        command += ["--hb_period", "1", "--hb_threshold", "60", "--drain_period", "None", "--mem_per_worker", "None"]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environ
        self.process = subprocess.Popen(
            [*command, *options], cwd=directory, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    @property
    def directory(self) -> Path:
        return self.logdir / "block-0" / "agent"

    @property
    def template(self) -> int:
        return until(lambda: processes.children(self.process.pid), "the template")[0]

    @property
    def log(self) -> str:
        return (self.directory / "agent.log").read_text()

    def end(self) -> tuple[int, str]:
        """Wait for the agent's end; return exit code and stderr."""
        _, err = self.process.communicate(timeout=GUARD_S)
        return self.process.returncode, err

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def destroy(self) -> None:
        """Kill it; what it leaves behind is not left to its template."""
        below = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        until(lambda: not any(map(alive, below)), "the agent's family to end")


class FakeBroker:
    """A ROUTER socket, a list of what has come in, and the agents started for it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._agents: list[Agent] = []
        self._task = 0
        self.answers_heartbeats = True
        self.heard: list[tuple[protocol.FromAgent, bytes | None]] = []

    def start(self, *options: str, slots: int = 2, register: bool = True, **environ: str) -> Agent:
        """Start an agent with this many slots and accept its registration."""
        agent = Agent(self._port, self._directory, ["--slots_per_device", str(slots), *options], environ)
        self._agents.append(agent)
        if register:
            self.accept()
        return agent

    def accept(self) -> None:
        """Accept a registration."""
        self.device = self.wait(protocol.Register).devices[0]
        self.send(protocol.Registered())

    def send(self, message: protocol.Message, payload: bytes | None = None) -> None:
        self.send_frames(protocol.encode(message, payload))

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([b"agent", *frames])

    def place(self, function: Callable[..., Any], *args: Any, index: tuple[int, ...] = (0,), **fields: Any) -> int:
        """Place a call into slots of the first device; return the number of the task."""
        self._task += 1
        buffer = pack_apply_message(function, args, {})
        where = {"device": self.device.uuid, "index": list(index)}
        self.send(protocol.Place(**({"task": self._task, "attempt": 1, "name": "job"} | where | fields)), buffer)
        return self._task

    def pump(self, wait_ms: int = 50) -> None:
        """Take in what has come."""
        while self._socket.poll(wait_ms):
            identity, *frames = self._socket.recv_multipart()
            if protocol.is_probe(frames):
                self._socket.send_multipart([identity, b"yes"])
                continue
            message, payload = protocol.decode_from_agent(frames)
            self.heard.append((message, payload))
            if isinstance(message, protocol.Heartbeat) and self.answers_heartbeats:
                self.send(protocol.Beat())
            wait_ms = 0

    def wait(self, kind: type[M], task: int | None = None, where: Callable[[M], bool] = lambda _: True) -> M:
        """Return the first message of a kind (about a task, if given), heard already or still to come."""
        return self.wait_both(kind, task, where)[0]

    def wait_both(
        self, kind: type[M], task: int | None = None, where: Callable[[M], bool] = lambda _: True
    ) -> tuple[M, bytes | None]:
        """Return such a message with its payload."""
        deadline = time.monotonic() + GUARD_S
        seen = 0
        while True:
            for message, payload in self.heard[seen:]:
                if isinstance(message, kind) and task in (None, getattr(message, "task", None)) and where(message):
                    return message, payload
            seen = len(self.heard)
            assert time.monotonic() < deadline, f"waited for {kind.__name__} of {task}; heard {self.heard}"
            assert seen or any(agent.process.poll() is None for agent in self._agents), "no agent lives"
            self.pump()

    def result(self, task: int) -> Any:
        """Return what a task returned, or raised (in Parsl's wrapping)."""
        message, payload = self.wait_both(protocol.Ended, task)
        assert message.how in ("result", "exception"), message
        return deserialize(payload)

    def run(self, function: Callable[..., Any], *args: Any, **fields: Any) -> Any:
        """Place a call and return its result."""
        return self.result(self.place(function, *args, **fields))

    def ended(self, task: int) -> protocol.Ended:
        return self.wait(protocol.Ended, task)

    def all(self, kind: type[M], task: int) -> list[M]:
        """Return what has been heard of a kind about a task."""
        return [one for one, _ in self.heard if isinstance(one, kind) and getattr(one, "task", None) == task]

    def close(self) -> None:
        for agent in self._agents:
            if agent.process.poll() is None:
                agent.destroy()
            elif agent.process.stderr:
                agent.process.stderr.close()
        self._context.destroy(0)


@dataclass
class Node:
    """A broker with an agent."""

    broker: FakeBroker
    agent: Agent
