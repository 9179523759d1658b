"""A defect of ours must never end the engine: the border between an engine's thread and our code.

An exception that gets this far switches KVBM off behind this border, once, with a traceback in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvbm.strict import record_swallowed

ResultT = TypeVar("ResultT")


class Guard:
    """Calls that may fail. Owned by one thread of the engine; `off` says that one has."""

    def __init__(
        self,
        log: logging.Logger,
        on_defect: Callable[[], object] = lambda: None,
        passes: tuple[type[Exception], ...] = (),
    ) -> None:
        """`on_defect` gives back what the engine would wait for. Exceptions of `passes` are meant for the engine."""
        self.off = False
        self._log = log
        self._on_defect = on_defect
        self._passes = passes

    def call(self, otherwise: ResultT, method: Callable[..., ResultT], *arguments: object) -> ResultT:
        """What the method returns, or `otherwise` when it fails, or when KVBM is off."""
        if self.off:
            return otherwise
        try:
            return method(*arguments)
        except self._passes:
            raise
        except Exception as error:
            record_swallowed(error)
            self.off = True
            self._log.exception(
                "KVBM is off for this engine from now on, after a defect in KVBM; the engine serves without it"
            )
            try:
                self._on_defect()
            except Exception as further:  # the first defect is logged
                record_swallowed(further)
            return otherwise
