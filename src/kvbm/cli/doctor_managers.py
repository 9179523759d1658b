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
from kvbm.client.finder import ERROR_SUFFIX, SOCKET_NAME
from kvbm.client.whereabouts import Sockets, known_sockets
from kvbm.errors import KvbmError, ManagerRefused, ManagerUnavailable, SettingsError
from kvbm.observe.unread import Growth
from kvbm.present.numbers import format_bytes
from kvbm.protocol import Status, StatusQuery
from kvbm.runtime_dir import read_private
from kvbm.settings import Settings, size_notices, variable

ANSWER_TIMEOUT_S = 5.0
SOCKETS_MAX = 32
_DEAD_NAMED = 3
_TABLES_NAMED = 3
_WORDS_MAX = 300


class Managers(NamedTuple):
    """The checks, how many managers answer, and the size of a model's blocks there; 0 where no engine has named it."""

    checks: list[Check]
    answering: int
    block_bytes: int = 0


def check_managers(settings: Settings) -> Managers:
    """Look at the manager that the settings name, and at those in the runtime directory."""
    directory = settings.runtime_dir
    known = Sockets([], [])
    checks: list[Check] = []
    try:
        known = known_sockets(directory)
    except SettingsError as error:
        remedy = f"engines will serve without a cache: remove it, or set {variable('runtime_dir')}"
        checks.append(fault("runtime directory", str(error), remedy))
    named = Path(settings.manager).absolute() if settings.manager else None
    sockets = [Path(path) for path in known.living]
    if len(sockets) > SOCKETS_MAX:
        there = f"{len(sockets)} managers in {directory}; the first {SOCKETS_MAX} are looked at"
        checks.append(advice("managers", there, "name one with --manager"))
        sockets = sockets[:SOCKETS_MAX]
    dead = [Path(path) for path in known.dead if Path(path) != named]
    # Engines wait for this one; the others of the dead are told of in one line.
    sockets += [path for path in dead if path.name == SOCKET_NAME]
    if named is not None and named not in sockets:
        sockets.insert(0, named)
    answering = block_bytes = 0
    for path in sockets:
        found = list(_look_at(path, settings, named=path == named))
        answering += found[0].state == "ok"
        block_bytes = block_bytes or int(found[0].measured.get("block_bytes", 0))
        checks += found
    checks += _left_behind([path for path in dead if path.name != SOCKET_NAME], directory)
    checks += _last_words(directory)
    if not answering and all(check.state == "ok" for check in checks):
        checks.append(ok("managers", f"none runs (looked in {directory}); an engine starts its own"))
    return Managers(checks, answering, block_bytes)


def _look_at(path: Path, settings: Settings, named: bool) -> Iterator[Check]:
    name = f"manager {path}"
    begun_s = time.monotonic()
    try:
        with Admin(str(path), settings, ANSWER_TIMEOUT_S) as admin:
            status = admin.ask(StatusQuery(), Status)
            yield _answers(name, status, time.monotonic() - begun_s)
            yield from _check_described(admin, name)
            yield from _check_unread(admin, name)
    except ManagerRefused as error:
        yield fault(name, str(error), "run this as the manager's user, and with its version of KVBM")
        return
    except ManagerUnavailable as error:
        yield _absent(name, path, str(error), named)
        return
    for space in status.spaces:
        if space["fault"]:
            remedy = (
                "mend what this names: a disk then comes back by itself; for all else restart the manager"
            )
            yield fault(f"namespace {space['namespace']} ({space['model']})", str(space["fault"]), remedy)
        yield from _check_stores(space)


def _check_stores(space: dict[str, Any]) -> Iterator[Check]:
    """Whether the remote stores of a namespace work, as its manager sees them."""
    for each in space["remote"]:
        if line := each.get("fault") or each.get("store_fault"):
            remedy = (
                "mend what this names: the store then comes back by itself; until then it is done without"
            )
            yield fault(f"namespace {space['namespace']} ({space['model']})", str(line), remedy)


def _answers(name: str, status: Status, seconds: float) -> Check:
    spaces = ", ".join(_space(space) for space in status.spaces) or "no engine has named its blocks yet"
    block_bytes = max((int(str(space["block_bytes"])) for space in status.spaces), default=0)
    found = f"answers in {seconds * 1e3:.1f} ms; {spaces}"
    return ok(name, found, answer_seconds=seconds, block_bytes=block_bytes)


def _absent(name: str, path: Path, error: str, named: bool) -> Check:
    """A manager that gave no answer: one that hangs, one that was named, or the one that engines share."""
    if named:
        return fault(
            name,
            error,
            f"the engines that it is for compute everything: start `kvbm manager --socket {path}`",
        )
    if "did not answer" in error:
        return fault(name, error, "it hangs, and its engines compute everything: restart it")
    if path.name == SOCKET_NAME:
        return advice(name, error, "its engines compute everything until `kvbm manager` runs again")
    return advice(name, f"{error}: it has just ended", "none, if its engine has ended")


def _left_behind(dead: list[Path], directory: str) -> Iterator[Check]:
    """One line about all sockets at which nobody listens."""
    if not dead:
        return
    names = ", ".join(path.name for path in dead[:_DEAD_NAMED]) + (", …" if len(dead) > _DEAD_NAMED else "")
    found = (
        f"1 socket of a manager that was killed: {names}"
        if len(dead) == 1
        else f"{len(dead)} sockets of managers that were killed: {names}"
    )
    remedy = (
        "none, if its engine has ended: the next manager that starts removes what private ones left"
        if all(path.name.startswith("private-") for path in dead)
        else "start `kvbm manager --socket` there again, or remove it; the next manager that starts removes what "
        "private ones left"
    )
    yield advice(f"sockets in {directory}", found, remedy, sockets=len(dead))


def _check_described(admin: Admin, name: str) -> Iterator[Check]:
    """What a manager's description of itself shows."""
    try:
        described = admin.ask(Describe(), Description)
    except KvbmError:
        return  # it has just ended
    yield _check_memory(described, name)
    yield from _check_device_caches(described)


def _check_memory(described: Description, name: str) -> Check:
    """What the manager's tables take beside its tiers, now and at most, and the largest of them."""
    tables = sorted(described.tables, key=lambda each: each.most * each.entry_bytes, reverse=True)
    now_bytes = sum(each.count * each.entry_bytes for each in tables)
    most_bytes = sum(each.most * each.entry_bytes for each in tables)
    largest = ", ".join(
        f"{each.name} {each.count:,} of {each.most:,} ({format_bytes(each.most * each.entry_bytes)})"
        for each in tables[:_TABLES_NAMED]
    )
    return ok(
        f"tables of {name}",
        f"{format_bytes(now_bytes)} of at most {format_bytes(most_bytes)} beside the tiers: {largest}",
        tables_bytes=now_bytes,
        tables_bytes_max=most_bytes,
    )


def _check_device_caches(described: Description) -> Iterator[Check]:
    """Whether host memory is larger than the own cache of each engine that runs."""
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


def _check_unread(admin: Admin, name: str) -> Iterator[Check]:
    """Whether what was stored since the manager's start was ever read."""
    try:
        state = admin.ask(Snapshot(), SnapshotReply)
    except KvbmError:
        return  # it has just ended
    growth = Growth.between({}, {(name, *labels): value for name, labels, value in state.now.values})
    if growth.unread(state.manager.uptime_s):
        remedy = "until something is read, storing costs memory bandwidth and wears the disk for nothing"
        yield advice(name, growth.alarm(state.manager.uptime_s), remedy)


def _space(space: dict[str, Any]) -> str:
    """One namespace: its model, and how full its tiers are."""
    tiers = [
        f"{name} {tier['resident']:,} of {tier['blocks']:,} blocks"
        f" ({format_bytes(tier['blocks'] * space['block_bytes'])})"
        for name, tier in space["tiers"].items()
    ]
    tiers += [f"remote {each.get('blocks', 0):,} blocks known" for each in space["remote"]]
    return f"{space['model']}: {', '.join(tiers)}"


def _last_words(directory: str) -> Iterator[Check]:
    """The line that a private manager left when it could not start."""
    for path in sorted(Path(directory).glob(f"*{ERROR_SUFFIX}")):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # removed meanwhile, or not ours
            words = read_private(str(path)).decode().strip()[:_WORDS_MAX]
            if words:
                yield advice(
                    "last start of a manager", words, f"mend that; {path} stays until the next start"
                )
