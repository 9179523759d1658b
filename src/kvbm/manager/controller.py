"""The manager's controller on Dynamo's runtime, where the settings ask for one: a child process."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterator

import msgspec

from kvbm.client.kept_process import KeptProcess
from kvbm.clock import monotonic
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

PROGRAM = "kvbm.dynamo_runtime.controller"


@contextlib.contextmanager
def controller(settings: Settings, socket_path: str) -> Iterator[Callable[[], None]]:
    """What is yielded starts the controller, which then answers until the end. Without one the manager serves on."""
    with contextlib.ExitStack() as ends:

        def start() -> None:
            words = [PROGRAM, socket_path, msgspec.json.encode(settings).decode()]
            child = KeptProcess("the controller", lambda _: words, _give_up, monotonic, log, for_ever=True)
            try:
                child.start()
            except OSError as error:
                _give_up(f"there is no process to be had: {error.strerror}")
            else:
                ends.callback(child.end)

        if settings.dynamo_runtime and importlib.util.find_spec("dynamo") is None:
            log.warning(
                "DYN_RUNTIME_ENABLED_KVBM is set, but Dynamo is not installed here: "
                "no controller, `kvbm status` and `kvbm reset` do the same"
            )
            yield _nothing
        else:
            yield start if settings.dynamo_runtime else _nothing


def _give_up(why: str) -> None:
    log.error("no controller on Dynamo's runtime until the manager starts again: %s", why)


def _nothing() -> None: ...
