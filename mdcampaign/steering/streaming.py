"""Generator methods that stream without shipping their inputs with every value."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import colmena.queue.python
from colmena.models import Result
from colmena.models.methods import ColmenaMethod, PythonGeneratorMethod

from mdcampaign.errors import BadInput


class LeanGenerator(PythonGeneratorMethod):
    """Colmena's generator method, with intermediate results that leave the inputs out.

    The queues of `mdcampaign.steering.queues` put the inputs back on the Thinker's side.
    """

    def stream_result(self, y: Any, result: Result, start_time: float) -> None:
        """Send one yielded value to the Thinker."""
        lean = result.model_copy(update={"inputs": ((), {})}).model_copy(deep=True)
        lean.set_result(y, perf_counter() - start_time, intermediate=True)
        lean.time.serialize_results, _ = lean.serialize()
        if self.streaming_queue is not None:
            self.streaming_queue.send_result(lean)


def lean(method: Any) -> Any:
    """Return a method that streams without its inputs in place of one of Colmena's; others as they are.

    Raises:
        BadInput: it would stream through pipes, which cannot follow it into a slot.
    """
    function = method[0] if isinstance(method, tuple | list) else method
    if not isinstance(function, ColmenaMethod) or type(function) is not PythonGeneratorMethod:
        return method
    if function.streaming_queue is None:
        return method
    if isinstance(function.streaming_queue, colmena.queue.python.PipeQueues):
        raise BadInput(
            "methods",
            function.name,
            "a generator method cannot stream through PipeQueues: the pipes do not reach into a slot",
            "Use RedisQueues, or leave streaming_queue out to get all values at the end.",
        )
    slim = LeanGenerator(function._function, function.name, function.store_return_value, function.streaming_queue)
    return (slim, *method[1:]) if isinstance(method, tuple | list) else slim
