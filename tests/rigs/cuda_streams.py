"""Streams and events of the model of a CUDA device (`cuda_model`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rigs.cuda_model import Model


class Call(NamedTuple):
    """A copy call to the driver: its name, whether it copies to the device, how many pieces, how far apart, and
    whether sources may be read ahead of earlier work."""

    name: str
    to_device: bool
    pieces: int
    pitch: int
    read_early: bool = False


class Operation:
    """What lies in a stream. `step` does a part and says whether that was the last one."""

    def __init__(self, kind: str, step: Callable[[], bool], ready: Callable[[], bool] = lambda: True) -> None:
        self.kind, self.step, self.ready = kind, step, ready


class ModelEvent:
    """A point in a stream."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.reached = False

    def query(self) -> bool:
        self._model.use()
        self._model.unsafe("cudaEventQuery")
        for _ in range(self._model.random.randrange(4)):
            self._model.advance()
        return self.reached

    def synchronize(self) -> None:
        self._model.use()
        self._model.unsafe("cudaEventSynchronize")
        while not self.reached:
            if self._model.advance() or self.reached:  # another thread may have got there meanwhile
                continue
            if not self._model.engine_goes_on():
                self._model.complain("deadlock: the event cannot be reached")


class ModelStream:
    """A queue of operations. `kinds` names all that was ever put in, `calls` are the driver's."""

    def __init__(self, model: Model, handle: int) -> None:
        self._model = model
        self.handle = handle
        self.queue: deque[Operation] = deque()
        self.kinds: list[str] = []
        self.calls: list[Call] = []

    def put(self, operation: Operation) -> None:
        with self._model.lock:
            self.queue.append(operation)
            self.kinds.append(operation.kind)

    def work(self, action: Callable[[], object]) -> None:
        """Something that the engine computes."""
        self.put(Operation("work", lambda: (action(), True)[1]))

    def wait(self, event: Any) -> None:
        self._model.use()
        assert isinstance(event, ModelEvent), event
        self.put(Operation("wait", lambda: True, lambda: event.reached))

    def record(self) -> ModelEvent:
        self._model.use()
        event = ModelEvent(self._model)

        def reach() -> bool:
            event.reached = True
            return True

        self.put(Operation("record", reach))
        return event

    def run(self, begin: Callable[[], None]) -> None:
        """In the stream's turn: a kernel that copies when it is started is ordered as on a device."""
        self._model.use()
        self.put(Operation("run", lambda: (begin(), True)[1]))
