"""The controller's process: an endpoint of Dynamo's runtime that asks a manager.

A process of its own, because Dynamo's runtime may end the process that it is in where its services are not there.
Dynamo's own variables (`DYN_NAMESPACE`, `DYN_DISCOVERY_BACKEND`, `DYN_REQUEST_PLANE` and those of its services) say
which runtime is joined.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import select
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvbm.admin_protocol import Describe, Description
from kvbm.client.admin import Admin
from kvbm.dynamo_runtime.verbs import answer
from kvbm.observe.log import configure
from kvbm.protocol import Reset, ResetReply
from kvbm.settings import Settings, process_environment

log = logging.getLogger("kvbm.controller")

AGAIN_S = 30.0
"""Before it ends, and is started again: the services of a runtime may come later than a manager."""
COMPONENT, ENDPOINT = "kvbm", "controller"
RUNTIME = "dynamo.runtime"


class Controller:
    """Answers requests, each in a session of its own with the manager at `socket_path`."""

    def __init__(self, socket_path: str, settings: Settings) -> None:
        self._socket_path, self._settings = socket_path, settings

    def answer(self, request: object) -> dict[str, Any]:
        """The answer to one request; may wait for the manager."""
        return answer(request, self._describe, self._reset)

    def _describe(self) -> Description:
        with Admin(self._socket_path, self._settings) as admin:
            return admin.ask(Describe(), Description)

    def _reset(self, tier: str) -> ResetReply:
        with Admin(self._socket_path, self._settings) as admin:
            return admin.ask(Reset(tier=tier), ResetReply)


async def serve(controller: Controller, until: int) -> None:
    """Serve the endpoint until the descriptor `until` is readable."""
    environment = process_environment()
    loop = asyncio.get_running_loop()
    runtime = importlib.import_module(RUNTIME).DistributedRuntime(
        loop,
        environment.get("DYN_DISCOVERY_BACKEND", "etcd"),
        environment.get("DYN_REQUEST_PLANE", "tcp"),
    )
    path = f"{environment.get('DYN_NAMESPACE', 'dynamo')}.{COMPONENT}.{ENDPOINT}"

    async def handle(request: object) -> AsyncIterator[dict[str, Any]]:
        yield await loop.run_in_executor(None, controller.answer, request)

    ended = asyncio.Event()
    loop.add_reader(until, ended.set)
    serving = asyncio.ensure_future(runtime.endpoint(path).serve_endpoint(handle))
    log.info("joining Dynamo's runtime (%s) as %s", environment.get("DYN_DISCOVERY_BACKEND", "etcd"), path)
    await asyncio.wait([serving, asyncio.ensure_future(ended.wait())], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    runtime.shutdown()


def main(words: list[str]) -> int:
    """`words`: the manager's socket, and its settings as JSON. Ends with its input; 1 where no runtime is joined."""
    socket_path, settings = words[0], msgspec.json.decode(words[1], type=Settings)
    configure(settings.log_level)
    try:
        asyncio.run(serve(Controller(socket_path, settings), sys.stdin.fileno()))
    except KeyboardInterrupt:  # the terminal's, for the manager: its end is ours
        return 0
    except Exception as error:  # Dynamo raises what it likes
        log.warning("Dynamo's runtime is not joined: %s", error)
        select.select([sys.stdin], [], [], AGAIN_S)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
