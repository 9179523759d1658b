"""Keeps a consolidator running beside an engine: it is started again when it ends."""

from __future__ import annotations

import logging

import msgspec

from kvbm.client.kept_process import KeptProcess
from kvbm.clock import monotonic
from kvbm.events import consolidator

log = logging.getLogger("kvbm.consolidator")


def keep_consolidator(options: consolidator.Options) -> KeptProcess | None:
    """The process, running; None, with a line, where none can be started. Serving goes on without it."""

    def words(first: bool) -> list[str]:
        said = msgspec.json.encode(msgspec.structs.replace(options, began=first)).decode()
        return [consolidator.__name__, said]

    child = KeptProcess("the KV event consolidator", words, _given_up, monotonic, log)
    try:
        child.start()
    except OSError as error:
        _given_up(f"there is no process to be had: {error.strerror}")
        return None
    return child


def _given_up(why: str) -> None:
    log.error("there are no consolidated KV events until the engine starts again: %s", why)
