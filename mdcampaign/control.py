"""The control inbox: requests to a running campaign from another terminal or another node of the file system.

A request is a small file `ID.request`, moved into `control/` by rename. The campaign takes it by renaming it to
`ID.taken` and answers with `ID.answer`. So a requester that gives up can tell whether its request was still there
to be withdrawn. One directory scan a second finds everything; the caller drives it.
"""

from __future__ import annotations

import json
import os
import platform
import stat
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mdcampaign import atomic
from mdcampaign.errors import CampaignError
from mdcampaign.layout import CONTROL, LOCK
from mdcampaign.lock import holder

LARGEST_REQUEST = 65_536
"""Bytes; a larger file is no request."""
KEEP_ANSWERS_S = 600.0
"""Answers that nobody fetched are removed after this time."""
_GRACE_S = 2.0
_REMEMBERED = 1000


@dataclass(frozen=True)
class Request:
    """What is asked of a campaign. Verbs must bear being done twice: a campaign that died before its answer did one."""

    id: str
    verb: str
    payload: dict[str, Any] = field(default_factory=dict)
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class Answer:
    """What the campaign says to a request; `ok` tells whether it did it, `message` why not."""

    ok: bool
    message: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Inbox:
    """The campaign's end. One process, one thread; it holds the campaign's lock."""

    def __init__(self, campaign_dir: Path) -> None:
        self._directory = campaign_dir / CONTROL
        self._open: set[str] = set()
        self._answered: OrderedDict[str, Answer] = OrderedDict()
        self._refuse_old()

    def poll(self) -> list[Request]:
        """Return the requests that came since the last call, oldest first; one scan of one directory."""
        requests = []
        for path in self._files():
            if path.suffix == ".answer":
                self._drop_if_old(path)
            elif path.suffix == ".request" and (request := self._take(path)) is not None:
                requests.append(request)
        return requests

    def answer(self, request: Request, ok: bool = True, message: str = "", **data: Any) -> None:
        """Answer a request; a second answer to the same one is dropped."""
        if request.id in self._open:
            self._open.discard(request.id)
            self._put_answer(request.id, Answer(ok, message, data))
            (self._directory / f"{request.id}.taken").unlink(missing_ok=True)

    def _take(self, path: Path) -> Request | None:
        """Take a request; None where it was withdrawn, is none, or is one that came before under this id."""
        id_ = path.stem
        try:
            path.rename(taken := path.with_suffix(".taken"))
        except FileNotFoundError:
            return None
        if id_ in self._open:
            return None
        if id_ in self._answered:
            self._put_answer(id_, self._answered[id_])
            taken.unlink(missing_ok=True)
            return None
        request = self._read(id_, taken)
        if request is not None:
            self._open.add(id_)
        return request

    def _read(self, id_: str, taken: Path) -> Request | None:
        """Return the request in a file, or move the file aside, answered."""
        try:
            data = json.loads(_read_small(taken))
            if not isinstance(data, dict) or not isinstance(data.get("verb"), str):
                raise ValueError('a request is an object with a "verb"')
            if not isinstance(payload := data.get("payload", {}), dict):
                raise ValueError('"payload" must be an object')
            return Request(id_, data["verb"], payload, str(data.get("host", "")), int(data.get("pid", 0)))
        except (ValueError, TypeError, OverflowError, RecursionError, OSError) as exc:
            self._put_answer(id_, Answer(False, f"not a request: {exc}"))
            aside = self._directory / "rejected"
            aside.mkdir(exist_ok=True)
            taken.replace(aside / f"{id_}.request")
            return None

    def _refuse_old(self) -> None:
        """Answer what was left from before this start: a stop that was meant for yesterday must not act today."""
        why = {".request": "was not running", ".taken": "ended before it answered"}
        for path in self._files():
            if path.suffix in why:
                self._put_answer(path.stem, Answer(False, f"the campaign {why[path.suffix]}; ask again"))
                path.unlink(missing_ok=True)

    def _drop_if_old(self, answer: Path) -> None:
        try:
            if time.time() - answer.stat().st_mtime > KEEP_ANSWERS_S:
                answer.unlink()
        except FileNotFoundError:
            pass

    def _put_answer(self, id_: str, answer: Answer) -> None:
        self._answered[id_] = answer
        if len(self._answered) > _REMEMBERED:
            self._answered.popitem(last=False)
        text = json.dumps({"ok": answer.ok, "message": answer.message, "data": answer.data}, default=str)
        atomic.replace(self._directory / f"{id_}.answer", text.encode())

    def _files(self) -> list[Path]:
        with os.scandir(self._directory) as entries:
            return [self._directory / name for name in sorted(e.name for e in entries) if not name.startswith(".")]


def _read_small(path: Path) -> bytes:
    """Return the content of a small regular file; a pipe or device, or a link to one, must not hold up the inbox."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("a request is a regular file")
        if status.st_size > LARGEST_REQUEST:
            raise ValueError(f"a request has at most {LARGEST_REQUEST} bytes, this one {status.st_size}")
        return file.read(LARGEST_REQUEST)


def request(directory: Path, verb: str, *, timeout_s: float = 10.0, **payload: Any) -> Answer:
    """Ask the campaign that runs in `directory` to do something, and return its answer.

    Raises:
        CampaignError: no campaign runs there, or it did not answer in time; says whether it may still act.
    """
    _must_run(directory)
    control = directory / CONTROL
    id_ = f"{time.time_ns():020d}-{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    content = {"verb": verb, "payload": payload, "host": platform.node(), "pid": os.getpid()}
    waiting = control / f"{id_}.request"
    atomic.create(waiting, json.dumps(content).encode())
    try:
        if (found := _await(control / f"{id_}.answer", timeout_s)) is not None:
            return found
        waiting.unlink()
    except FileNotFoundError:
        if (found := _await(control / f"{id_}.answer", _GRACE_S)) is not None:
            return found
        raise CampaignError(f"{verb}: the campaign took the request but did not answer; it may still act") from None
    except BaseException:  # Ctrl-C: do not leave the request behind
        waiting.unlink(missing_ok=True)
        raise
    _must_run(directory)
    raise CampaignError(f"{verb}: no answer from {holder(directory / LOCK)} within {timeout_s:g} s; withdrawn")


def _await(path: Path, timeout_s: float) -> Answer | None:
    """Fetch and remove an answer; None where there is none after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        try:
            data = json.loads(path.read_bytes())
            path.unlink(missing_ok=True)
            return Answer(**data)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                return None
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
        pause_s = min(pause_s * 1.5, 0.25)


def _must_run(directory: Path) -> None:
    if not (directory / CONTROL).is_dir():
        raise CampaignError(f"{directory} is no campaign directory")
    if holder(directory / LOCK) is None:
        raise CampaignError(f"no campaign runs in {directory}; start it with `mdcampaign run`")
