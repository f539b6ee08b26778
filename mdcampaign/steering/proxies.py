"""Inputs in a ProxyStore that a task may read more than once.

Colmena evicts the inputs that it puts into a ProxyStore at their first read, so a task that is requeued after the
loss of its node cannot read them again. Here they stay until the final result of the task has come.
"""

from __future__ import annotations

import sys
from typing import Any

import proxystore.store
from colmena.models import SerializationMethod
from colmena.queue.base import ColmenaQueues
from proxystore.proxy import Proxy
from proxystore.store.utils import get_key


class KeptInputs:
    """Puts large inputs into the store of their topic, and evicts them when their task has ended."""

    def __init__(self) -> None:
        self._proxies: dict[str, list[Proxy[Any]]] = {}

    def store(
        self, queues: ColmenaQueues, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Proxy[Any]]]:
        """Return the inputs with the large ones replaced by proxies, and those proxies.

        What is large is the business of the topic's `proxystore_threshold`, as in Colmena.
        """
        name, threshold = queues.proxystore_name.get(topic), queues.proxystore_threshold.get(topic)
        if name is None or threshold is None:
            return args, kwargs, []
        store = proxystore.store.get_store(name)
        made: list[Proxy[Any]] = []

        def keep(value: Any) -> Any:
            if isinstance(value, Proxy) or value is None or isinstance(value, bool):
                return value
            if sys.getsizeof(SerializationMethod.serialize(queues.serialization_method, value)) < threshold:
                return value
            made.append(store.proxy(value, evict=False))
            return made[-1]

        return tuple(map(keep, args)), {key: keep(value) for key, value in kwargs.items()}, made

    def remember(self, task_id: str, proxies: list[Proxy[Any]]) -> None:
        """Keep these proxies until `release`."""
        if proxies:
            self._proxies[task_id] = proxies

    def release(self, task_id: str) -> None:
        """Evict what was stored for this task."""
        for proxy in self._proxies.pop(task_id, ()):
            if (store := proxystore.store.get_store(proxy)) is not None:
                store.evict(get_key(proxy))
