"""Run a campaign file: from YAML to a Thinker, an executor and queues, with a display and an open inbox."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import parsl
from parsl.providers import LocalProvider

from mdcampaign.campaign import Campaign
from mdcampaign.campaign_file import CampaignFile, load_campaign_file
from mdcampaign.control import Inbox, Request
from mdcampaign.display import Display
from mdcampaign.errors import BadCampaignFile, nearest
from mdcampaign.executor import SlotExecutor, retry_handler
from mdcampaign.report import Summary, summarise
from mdcampaign.scheduling.policy import Policy
from mdcampaign.steering.queues import CampaignQueues, PipeQueues, RedisQueues
from mdcampaign.steering.run import run_campaign
from mdcampaign.steering.thinker import Ack, CampaignThinker

logger = logging.getLogger(__name__)

INBOX_S = 1.0
ANSWER_S = 5.0
"""How long a request from another terminal may take: one look at the inbox, and the executor's answer."""


def run_file(path: Path, *, take_over: bool = False, display: Display | None = None) -> tuple[Summary, int]:
    """Run the campaign of a campaign file, or go on with it, and return its summary and an exit status.

    The exit status is that of `run_campaign`.

    Raises:
        BadCampaignFile: the file, or what it names, is not right; nothing has been started.
        CampaignLocked: the campaign is being run by another process.
    """
    file = load_campaign_file(path)
    thinker_class = load_thinker(file)
    config = parsl_config(file)
    lost = threading.Event()
    campaign = Campaign(file.directory, tell=lambda text: print(text, file=sys.stderr), on_lost=lambda _: lost.set())
    attached: list[Attachment] = []

    def prepare(thinker: CampaignThinker) -> None:
        attached.append(Attachment(thinker, campaign, lost, display))

    campaign.acquire(take_over=take_over)
    try:
        campaign.record(file.as_yaml())
        thinker, status = run_campaign(
            thinker_class, file.parameters, make_queues(file), config, campaign.directory, prepare=prepare
        )
    finally:
        for attachment in attached:
            attachment.detach()
        campaign.release()
    summary = summarise(file.directory)
    summary.findings = thinker.findings()
    return summary, status


class Attachment:
    """What accompanies a running Thinker: the display, the inbox for other terminals, and the watch over the lock."""

    def __init__(
        self, thinker: CampaignThinker, campaign: Campaign, lost: threading.Event, display: Display | None
    ) -> None:
        self._thinker, self._lost, self._display = thinker, lost, display
        self._ended = threading.Event()
        thinker.campaign_dir = campaign.directory
        if display is not None:
            thinker.observe(display.take)
            display.start()
        inbox = campaign.inbox()
        self._thread = threading.Thread(target=self._serve, args=(inbox,), name="inbox", daemon=True)
        self._thread.start()

    def detach(self) -> None:
        """End with the Thinker."""
        self._ended.set()
        self._thread.join(ANSWER_S + INBOX_S)
        if self._display is not None:
            self._display.stop()

    def _serve(self, inbox: Inbox) -> None:
        """Look into the inbox once a second; never let one request end the service."""
        while not self._ended.wait(INBOX_S):
            if self._lost.is_set():
                logger.error("another process has taken the campaign over; this one ends")
                self._thinker.done.set()
            for request in inbox.poll():
                try:
                    ack = obey(self._thinker, request)
                    inbox.answer(request, ack.ok, ack.message, state=ack.state)
                except Exception as exc:
                    inbox.answer(request, False, f"{type(exc).__name__}: {exc}")


def obey(thinker: CampaignThinker, request: Request) -> Ack:
    """Carry a request of another terminal out and return the acknowledgement."""
    job: Any = request.payload.get("job")
    more: dict[str, Any] = {key: value for key, value in request.payload.items() if key != "job"}
    if request.verb == "stop" and job is None:
        thinker.done.set()
        return Ack(True, "running", "the campaign ends: running jobs save their state first")
    verbs: dict[str, Callable[..., Future[Ack]]] = {
        "stop": thinker.stop,
        "cancel": thinker.cancel,
        "explain": thinker.explain,
        "yield": thinker.yield_now,
        "extend": thinker.extend,
        "rerank": thinker.rerank,
    }
    if request.verb not in verbs:
        return Ack(False, "unknown", f"unknown verb {request.verb!r}. {nearest(request.verb, verbs)}")
    if not isinstance(job, str):
        return Ack(False, "unknown", f"{request.verb} needs the name of a job")
    return verbs[request.verb](job, **more).result(ANSWER_S)


def load_thinker(file: CampaignFile) -> type[CampaignThinker]:
    """Return the Thinker class that a campaign file names; its own directory is importable, as for a script."""
    module = load_module(file.thinker_file, "thinker")
    found = getattr(module, file.thinker_class, None)
    if not (isinstance(found, type) and issubclass(found, CampaignThinker)):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, CampaignThinker)]
        mend = f"{nearest(file.thinker_class, classes)}It has: {', '.join(classes) or 'none'}."
        raise BadCampaignFile(
            "thinker", file.thinker_class, f"no CampaignThinker of this name in {module.__file__}", mend
        )
    known = [name for name in inspect.signature(found.__init__).parameters if name not in ("self", "queue", "queues")]
    for name in file.parameters:
        if name not in known and "kwargs" not in known:
            mend = f"{nearest(name, known)}It takes: {', '.join(known)}."
            raise BadCampaignFile(
                f"parameters.{name}", file.parameters[name], f"{found.__name__} does not take it", mend
            )
    return found


def load_module(path: Path, field: str) -> ModuleType:
    """Import a Python file by its path; what goes wrong in it is told with the field that names it."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "load_campaign_file has checked that it is a .py file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as exc:
        raise BadCampaignFile(field, str(path), f"importing it fails: {type(exc).__name__}: {exc}") from exc
    return module


def parsl_config(file: CampaignFile) -> parsl.Config:
    """Return the Parsl configuration of a campaign: its own, or one SlotExecutor on this machine."""
    if file.executor.config is not None:
        config = getattr(load_module(Path(file.executor.config), "executor.config"), "config", None)
        if not isinstance(config, parsl.Config):
            raise BadCampaignFile("executor.config", file.executor.config, "exports no parsl.Config named `config`")
    else:
        executor = SlotExecutor(
            label="slots",
            provider=LocalProvider(init_blocks=1, max_blocks=1),
            policy=Policy(**file.executor.policy()),
            address="127.0.0.1",
            **file.executor.executor(),
        )
        config = parsl.Config(executors=[executor], retry_handler=retry_handler, strategy_period=0.5)
    ours = [executor for executor in config.executors if isinstance(executor, SlotExecutor)]
    if not ours:
        mend = "Put a mdcampaign.executor.SlotExecutor among its executors."
        raise BadCampaignFile("executor.config", file.executor.config, "has no SlotExecutor", mend)
    ours[0].campaign_dir = str(file.directory)  # one writer of the log
    config.run_dir = str(file.directory / "parsl")
    return config


def make_queues(file: CampaignFile) -> CampaignQueues:
    """Return the queues that a campaign file asks for."""
    if file.queues == "redis":
        return RedisQueues(hostname=file.redis.host, port=file.redis.port)
    return PipeQueues()
