"""Checks of the managers that run: whether each answers, and which of its parts are off."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvbm.admin_protocol import Describe, Description, Snapshot, SnapshotReply
from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.client.admin import Admin
from kvbm.client.channel import Channel
from kvbm.client.finder import ERROR_SUFFIX, SOCKET_NAME
from kvbm.client.whereabouts import known_sockets
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError
from kvbm.observe.unread import Growth
from kvbm.present.numbers import format_bytes
from kvbm.protocol import PROTOCOL_VERSION, Hello, Status, StatusQuery
from kvbm.runtime_dir import read_private
from kvbm.settings import Settings, size_notices, variable

ANSWER_TIMEOUT_S = 5.0
SOCKETS_MAX = 32
_WORDS_MAX = 300


class Managers(NamedTuple):
    """The checks, how many managers answer, and the size of a model's blocks there; 0 where no engine has named it."""

    checks: list[Check]
    answering: int
    block_bytes: int = 0


def check_managers(settings: Settings) -> Managers:
    """Look at the manager that the settings name, and at those in the runtime directory."""
    directory = settings.runtime_dir
    sockets: list[Path] = []
    checks: list[Check] = []
    try:
        sockets = [Path(path) for path in known_sockets(directory)]
        if len(sockets) > SOCKETS_MAX:
            there = f"{len(sockets)} sockets in {directory}; the first {SOCKETS_MAX} are looked at"
            checks.append(advice("managers", there, "name one with --manager"))
            sockets = sockets[:SOCKETS_MAX]
    except SettingsError as error:
        remedy = f"engines will serve without a cache: remove it, or set {variable('runtime_dir')}"
        checks.append(fault("runtime directory", str(error), remedy))
    named = Path(settings.manager).absolute() if settings.manager else None
    if named is not None and named not in sockets:
        sockets.insert(0, named)
    answering = block_bytes = 0
    for path in sockets:
        found = list(_look_at(path, settings, named=path == named))
        answering += found[0].state == "ok"
        block_bytes = block_bytes or int(found[0].measured.get("block_bytes", 0))
        checks += found
    checks += _last_words(directory)
    if not answering and all(check.state == "ok" for check in checks):
        checks.append(ok("managers", f"none runs (looked in {directory}); an engine starts its own"))
    return Managers(checks, answering, block_bytes)


def _look_at(path: Path, settings: Settings, named: bool) -> Iterator[Check]:
    name = f"manager {path}"
    shared = named or path.name == SOCKET_NAME
    begun_s = time.monotonic()
    try:
        status = ask_status(str(path), settings.trusted_peer_uids)
    except ManagerRefused as error:
        yield fault(name, str(error), "run this as the manager's user, and with its version of KVBM")
        return
    except ManagerUnavailable as error:
        if named:
            remedy = f"the engines that it is for compute everything: start `kvbm manager --socket {path}`"
            yield fault(name, str(error), remedy)
        elif "did not answer" in str(error):
            yield fault(name, str(error), "it hangs, and its engines compute everything: restart it")
        elif shared:
            yield advice(name, str(error), "its engines compute everything until `kvbm manager` runs again")
        else:
            yield advice(name, f"{error}: a private manager was killed", "none, if its engine has ended")
        return
    seconds = time.monotonic() - begun_s
    spaces = ", ".join(_space(space) for space in status.spaces) or "no engine has named its blocks yet"
    block_bytes = max((int(str(space["block_bytes"])) for space in status.spaces), default=0)
    found = f"answers in {seconds * 1e3:.1f} ms; {spaces}"
    yield ok(name, found, answer_seconds=seconds, block_bytes=block_bytes)
    yield from _check_device_caches(str(path), settings)
    yield from _check_unread(str(path), settings)
    for space in status.spaces:
        if space["fault"]:
            remedy = (
                "mend what this names: a disk then comes back by itself; for all else restart the manager"
            )
            yield fault(f"namespace {space['namespace']} ({space['model']})", str(space["fault"]), remedy)


def _check_device_caches(path: str, settings: Settings) -> Iterator[Check]:
    """Whether host memory is larger than the own cache of each engine that runs."""
    try:
        with Admin(path, settings, ANSWER_TIMEOUT_S) as admin:
            described = admin.ask(Describe(), Description)
    except KvbmError:
        return  # another version, or it has just ended
    host = {
        space.namespace: tier.blocks
        for space in described.spaces
        for tier in space.tiers
        if tier.tier == "host" and not space.staging
    }
    for engine in described.engines:
        blocks = host.get(engine.namespace, 0)
        for line in size_notices(blocks, engine.device_blocks):
            remedy = f"give it more than the engine's {engine.device_blocks} blocks, or a disk tier"
            yield advice(
                f"engine {engine.engine}",
                line,
                remedy,
                host_blocks=blocks,
                device_blocks=engine.device_blocks,
            )


def _check_unread(path: str, settings: Settings) -> Iterator[Check]:
    """Whether what was stored since the manager's start was ever read."""
    try:
        with Admin(path, settings, ANSWER_TIMEOUT_S) as admin:
            state = admin.ask(Snapshot(), SnapshotReply)
    except KvbmError:
        return  # another version, or it has just ended
    growth = Growth.between({}, {(name, *labels): value for name, labels, value in state.now.values})
    if growth.unread(state.manager.uptime_s):
        remedy = "until something is read, storing costs memory bandwidth and wears the disk for nothing"
        yield advice(f"manager {path}", growth.alarm(state.manager.uptime_s), remedy)


def ask_status(socket_path: str, peer_uids: tuple[int, ...]) -> Status:
    """Ask a manager for its status. Raises ManagerRefused, ManagerUnavailable."""
    channel = Channel.connect(socket_path, peer_uids)
    try:
        channel.introduce(Hello(version=PROTOCOL_VERSION, role="admin"), ANSWER_TIMEOUT_S)
        channel.send(StatusQuery())
        while channel.wait(ANSWER_TIMEOUT_S):
            for message in channel.receive():
                if isinstance(message, Status):
                    return message
    finally:
        channel.close()
    raise ManagerUnavailable(f"the manager did not answer within {ANSWER_TIMEOUT_S:g} s")


def _space(space: dict[str, Any]) -> str:
    """One namespace: its model, and how full its tiers are."""
    tiers = [
        f"{name} {tier['resident']:,} of {tier['blocks']:,} blocks"
        f" ({format_bytes(tier['blocks'] * space['block_bytes'])})"
        for name, tier in space["tiers"].items()
    ]
    return f"{space['model']}: {', '.join(tiers)}"


def _last_words(directory: str) -> Iterator[Check]:
    """The line that a private manager left when it could not start."""
    for path in sorted(Path(directory).glob(f"*{ERROR_SUFFIX}")):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = read_private(str(path)).decode().strip()[:_WORDS_MAX]
            if words:
                yield advice(
                    "last start of a manager", words, f"mend that; {path} stays until the next start"
                )
