"""The work of a test inside the engine's process: the metrics are read while replies come."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

from engine.engine_child import Child, Engine
from engine.workload import Request
from rigs.manager_probe import Metrics, scrape


def at_replies(child: Child, requests: Sequence[Request], metrics_port: int, ahead_s: float) -> list[Metrics]:
    """Answer the requests one by one, and read the metrics as soon as each reply is there.

    The engine takes its next step when they were read, or `ahead_s` later.
    """
    assert child.engine is not None, "no engine was started"
    pages: list[Future[Metrics]] = []
    with ThreadPoolExecutor(1) as threads:

        def read(number: int, engine: Engine, finished: int) -> None:
            if finished and len(pages) == number:
                pages.append(threads.submit(scrape, metrics_port))
                wait(pages[-1:], ahead_s)

        for number, request in enumerate(requests):
            child.engine.run([request], between=partial(read, number))
        return [page.result() for page in pages]
