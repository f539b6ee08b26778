"""Futures of the executor: cancellation that reaches the job, and results that arrive late or broken."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any

from parsl.app.errors import RemoteExceptionWrapper
from parsl.executors.errors import BadStateException, InvalidResourceSpecification
from parsl.executors.high_throughput.executor import HTEXFuture
from parsl.serialize import deserialize
from parsl.serialize.errors import DeserializationError

from mdcampaign.errors import InputFailed, JobCancelled

logger = logging.getLogger(__name__)


class SlotFuture(HTEXFuture):
    """A future whose cancellation reaches the job, queued or running, and that shrugs off late results."""

    def __init__(self, task_id: int, name: str, cancel: Callable[[int], None]) -> None:
        super().__init__(task_id)
        self.name = name
        self._cancel_task = cancel

    def cancel(self) -> bool:
        """Cancel the job; its process tree is ended before its slot is used again."""
        if not super().cancel():
            return False
        self._cancel_task(self.parsl_executor_task_id)
        return True

    def set_result(self, result: Any) -> None:
        """Set the result, unless the future was cancelled meanwhile."""
        try:
            super().set_result(result)
        except InvalidStateError:
            logger.info("Dropped the late result of task %s", self.parsl_executor_task_id)

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the exception, unless the future was cancelled meanwhile."""
        try:
            super().set_exception(exception)
        except InvalidStateError:
            logger.info("Dropped the late exception of task %s", self.parsl_executor_task_id)


def retry_handler(exception: Exception, task_record: Any) -> float:
    """For `parsl.Config(retries=n, retry_handler=retry_handler)`: never repeat what cannot go well.

    A refused resource specification, missing input, and what the user cancelled cost more than all retries.
    """
    final = (InvalidResourceSpecification, InputFailed, JobCancelled, CancelledError, BadStateException)
    return float("inf") if isinstance(exception, final) else 1.0


def resolve(future: Future[Any], message: dict[str, Any]) -> None:
    """Resolve a future from a result message, whatever it holds."""
    try:
        if "result" in message:
            future.set_result(deserialize(message["result"]))
            return
        exc = deserialize(message["exception"])
        if isinstance(exc, RemoteExceptionWrapper):
            exc = exc.get_exception()
        future.set_exception(exc)
    except BaseException as exc:  # unpickling runs the user's code, which may do anything
        future.set_exception(DeserializationError(f"the result arrived and could not be read: {exc!r}"))
