"""A manager with a remote tier as a process, with options that no setting has.

Arguments: the socket's path, the settings and the further options as JSON. The options are those of `RemoteOptions`,
`breaker_wait_s`, `tells_nobody`: it is killed when it is about to note its first packs in its log, and `blind`, for a
control: such a manager takes everything that a store answers for whole. A line of stdin is answered with one of stdout:
what the tier says of itself (`describe`).
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from typing import Any

import msgspec

from kvbm.manager import remote_opening
from kvbm.manager.process import serve, take_lock
from kvbm.settings import Settings
from kvbm.tiers.remote import health, packs, shared_log
from kvbm.tiers.remote.blob_tier import BlobTier

_tiers: list[BlobTier] = []


class _EqualToAll(bytes):
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _recorded(open_tier: Any, *arguments: Any, **keywords: Any) -> BlobTier:
    tier: BlobTier = open_tier(*arguments, **keywords)
    _tiers.append(tier)
    return tier


def _with_options(make: Any, options: dict[str, Any], **chosen: Any) -> Any:
    return make(**{**chosen, **options})


def _killed(name: object, entries: object) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived its kill")


def _answer() -> None:
    for _ in sys.stdin:
        described: dict[str, Any] = dict(_tiers[-1].describe()) if _tiers else {}
        if _tiers:
            described["openings"] = _tiers[-1]._health.reading.openings
            described["write_openings"] = _tiers[-1]._health.writing.openings
            collected = described["collected"]
            described["collected"] = collected and msgspec.to_builtins(collected)
        _say(json.dumps(described))
    os._exit(3)  # whoever started us is no more


def main() -> None:
    socket_path, settings, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if options.pop("blind", False):
        packs.checksum = lambda *_: _EqualToAll(16)  # type: ignore[assignment]  # on purpose no checksum
    if options.pop("tells_nobody", False):
        shared_log.encode_segment = _killed
    wait_s = options.pop("breaker_wait_s", None)
    if wait_s is not None:
        health.Breaker = functools.partial(health.Breaker, wait_s=wait_s)  # type: ignore[misc,assignment]
    remote_opening.open_blob_tier = functools.partial(_recorded, remote_opening.open_blob_tier)  # type: ignore[assignment]
    remote_opening.RemoteOptions = functools.partial(_with_options, remote_opening.RemoteOptions, options)  # type: ignore[misc,assignment]
    threading.Thread(target=_answer, daemon=True).start()
    lock = take_lock(socket_path)
    serve(
        msgspec.json.decode(settings, type=Settings),
        socket_path,
        on_listening=lambda: _say("listening"),
    )
    del lock


if __name__ == "__main__":
    main()
