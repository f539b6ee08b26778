"""Messages on their way out: an unbounded mailbox, and the one thread that sends what lies in it.

Nobody who puts a message in ever waits. Messages leave in order; of messages put in under one key only the newest
leaves, in the place of the oldest, and it is told how many it replaced.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """A message in a mailbox; `skipped` counts the older ones that it stands for beside itself."""

    message: Any
    skipped: int = 0


class Mailbox:
    """An unbounded queue between threads in which the newest message of a key replaces the older one."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, Item] = OrderedDict()
        self._taken = 0
        self._changed = threading.Condition()

    def put(self, message: Any, key: Hashable | None = None, skipped: int = 0) -> None:
        """Put a message in; never waits. Messages without a key are all kept.

        `skipped` says how many older ones this message stands for already.
        """
        with self._changed:
            key = object() if key is None else key
            if (old := self._items.get(key)) is not None:
                skipped += old.skipped + 1
            self._items[key] = Item(message, skipped)
            self._changed.notify()

    def get(self, timeout_s: float | None = None) -> Item | None:
        """Take the oldest message out; return None when there is none within the time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                return None
            self._taken += 1
            return self._items.popitem(last=False)[1]

    def finish(self) -> None:
        """Say that a message that was taken out has been dealt with."""
        with self._changed:
            self._taken -= 1

    @property
    def unfinished(self) -> int:
        """The number of messages in the mailbox, and of those taken out that have not been dealt with."""
        with self._changed:
            return len(self._items) + self._taken

    def __len__(self) -> int:
        return len(self._items)


class Outbound:
    """The one thread that owns a sending end.

    `send(topic, message)` may wait as long as it likes: only this thread waits with it. When it raises, what is left
    is dropped, `failure` holds the exception, and `put` raises to whoever wants to send more.
    """

    def __init__(self, send: Callable[[str, Any], None], name: str) -> None:
        self.failure: Exception | None = None
        self._send = send
        self._mailbox = Mailbox()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, topic: str, message: str | dict[str, Any]) -> None:
        """Send a message soon; never waits.

        Raises:
            ConnectionError: an earlier message could not be sent.
        """
        self._check()
        self._mailbox.put((topic, message))

    def put_newest(self, topic: str, message: dict[str, Any], key: Hashable) -> None:
        """Send a message soon; a newer one under the same key takes its place until it has left.

        Its field "skipped" grows by the messages whose place it took.
        """
        self._check()
        self._mailbox.put((topic, message), (topic, key), message.get("skipped", 0))

    def close(self, limit_s: float) -> bool:
        """Send what is left, end the thread, and tell whether all was sent within the limit."""
        self._closing = True
        self._mailbox.put(None)  # wakes the thread
        self._thread.join(limit_s)
        return not self._thread.is_alive() and self.failure is None

    def _check(self) -> None:
        if self.failure is not None:
            raise ConnectionError(f"nothing can be sent any more: {self.failure}") from self.failure

    def _run(self) -> None:
        while not (self._closing and not len(self._mailbox)):
            item = self._mailbox.get()
            if item is None or item.message is None:
                continue
            topic, message = item.message
            if item.skipped:
                message = message | {"skipped": item.skipped}
            try:
                self._send(topic, message)
            except Exception as exc:
                logger.exception("sending on topic %s failed", topic)
                self.failure = exc
                return
