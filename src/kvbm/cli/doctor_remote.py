"""Checks of the remote store that the settings name: what it can do, how fast it is, and what rights are missing.

A few small blobs of our own are written, read, listed and removed. Each request has a deadline, and the whole of it a
bound; nothing of what others have put there is looked at.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.clock import Clock, monotonic
from kvbm.errors import SettingsError
from kvbm.present.numbers import format_bytes, format_ms
from kvbm.settings import Settings, variable
from kvbm.tiers.remote.blobs import BlobStore, StoreError
from kvbm.tiers.remote.named_store import open_named_store, store_field

REQUEST_S = 5.0
TRIAL_S = 20.0
"""No step is begun after so long."""
TRIED_BYTES = 4 << 20
READS = 3
SKEW_S = 60.0
PREFIX = f"{'0' * 64}/probe/doctor-"
"""Where the trial's blobs lie. What is left of a trial that was killed is removed by the next collection."""


@dataclass(slots=True)
class Trial:
    """What was found out about a store; a step's error is in `failed` by its name."""

    failed: dict[str, StoreError] = field(default_factory=dict)
    wrong: str = ""
    latency_s: float = 0.0
    read_bytes_per_s: float = 0.0
    write_bytes_per_s: float = 0.0
    skew_s: float | None = None
    cut_short: bool = False


def check_remote(
    settings: Settings, wall: Clock, clock: Clock = monotonic, store: BlobStore | None = None
) -> Iterator[Check]:
    """The store, its speed, its rights, its peculiarities and its clock. `wall` tells the time of day, s.

    `store` in place of that of the settings, which is closed in any case.
    """
    if not settings.remote_on:
        yield ok("remote store", f"off in these settings; {variable('remote')} turns it on")
        return
    try:
        store = store or open_named_store(settings, clock, REQUEST_S)
    except SettingsError as error:
        yield fault("remote store", str(error), f"the manager does not start: mend {store_field(settings)}")
        return
    try:
        trial = try_out(store, wall, clock)
    finally:
        store.close()
    yield _check_store(settings, store.place, trial)
    if trial.read_bytes_per_s:
        yield _check_speed(settings, trial)
    yield from _check_rights(settings, trial)
    yield from (ok("remote peculiarity", f"the store {note}") for note in store.notes)
    if trial.skew_s is not None:
        yield _check_clock(trial.skew_s)


def try_out(store: BlobStore, wall: Clock, clock: Clock) -> Trial:
    """Write, read, list, touch and delete. Raises nothing of the store's."""
    trial, end_s = Trial(), clock() + TRIAL_S
    small, large = (f"{PREFIX}{secrets.token_hex(8)}" for _ in range(2))
    text = secrets.token_bytes(64)

    def step(name: str, do: Callable[[], None], after: str = "") -> None:
        if after in trial.failed:
            return
        if clock() >= end_s:
            trial.cut_short = True
            return
        try:
            do()
        except StoreError as error:
            trial.failed[name] = error

    def write() -> None:
        store.put(small, [text])

    def read() -> None:
        times = []
        for _ in range(READS):
            began_s = clock()
            found = store.read(small, 0, len(text))
            times.append(clock() - began_s)
            if found is None or bytes(found) != text:
                trial.wrong = "it does not give back what was written"
        trial.latency_s = min(times)

    def read_nothing() -> None:
        store.read(f"{PREFIX}none", 0, 1)

    def list_them() -> None:
        names = {info.name for info in store.listing(PREFIX.rpartition("/")[0] + "/")}
        if small not in names and "write" not in trial.failed:
            trial.wrong = trial.wrong or "what was just written is not in its listing"

    def measure() -> None:
        byte_count = min(TRIED_BYTES, store.blob_bytes_max)
        blob = secrets.token_bytes(byte_count)  # no compression on the way makes it smaller
        began_s = clock()
        store.put(large, [blob])
        written_s = clock()
        found = store.read(large, 0, byte_count)
        ended_s = clock()
        trial.write_bytes_per_s = byte_count / max(written_s - began_s, 1e-6)
        trial.read_bytes_per_s = byte_count / max(ended_s - written_s, 1e-6)
        if found is None or bytes(found) != blob:
            trial.wrong = trial.wrong or "it does not give back what was written"

    def ask_clock() -> None:
        before_s = wall()
        told_s = store.now_s()
        trial.skew_s = told_s - (before_s + wall()) / 2

    step("write", write)
    step("read", read_nothing if "write" in trial.failed else read)
    step("list", list_them)
    step("measure", measure, after="write" if "write" in trial.failed else "read")
    step("touch", lambda: store.touch(small), after="write")
    step("clock", ask_clock)
    # Also where the time is over: nothing is left behind.
    try:
        store.delete([small, large])
    except StoreError as error:
        if "write" not in trial.failed:
            trial.failed["delete"] = error
    return trial


def _check_store(settings: Settings, place: str, trial: Trial) -> Check:
    name, numbers = "remote store", {"failed_steps": len(trial.failed)}
    away = next((error for error in trial.failed.values() if error.trouble in ("unreachable", "slow")), None)
    remedy = f"blocks are computed instead; mend the store, or {store_field(settings)}"
    if away is not None:
        return fault(name, str(away), remedy, **numbers)
    if trial.wrong:
        return fault(name, f"{place}: {trial.wrong}", "another store: this one cannot be used", **numbers)
    if "read" in trial.failed:
        return fault(name, str(trial.failed["read"]), remedy, **numbers)
    if other := next((error for error in trial.failed.values() if error.trouble != "refused"), None):
        return fault(name, str(other), remedy, **numbers)
    if trial.cut_short:
        found = f"{place} answers, but not all was tried within {TRIAL_S:g} s"
        return advice(name, found, "a store that is so slow saves no time", **numbers)
    did = [step for step in ("write", "read", "list", "touch", "delete") if step not in trial.failed]
    return ok(name, f"{place}: {', '.join(did)} work", **numbers)


def _check_speed(settings: Settings, trial: Trial) -> Check:
    name = "remote speed"
    found = (
        f"{format_ms(trial.latency_s)} for a small read, {format_bytes(int(trial.read_bytes_per_s))}/s read and "
        f"{format_bytes(int(trial.write_bytes_per_s))}/s written, one request at a time"
    )
    numbers = {
        "latency_seconds": trial.latency_s,
        "read_bytes_per_second": trial.read_bytes_per_s,
        "write_bytes_per_second": trial.write_bytes_per_s,
    }
    deadline_s = settings.remote_deadline_ms / 1000
    expected_s = trial.latency_s + TRIED_BYTES / trial.read_bytes_per_s
    if expected_s > deadline_s:
        remedy = (
            f"reads of {format_bytes(TRIED_BYTES)} take {expected_s:.1f} s and are given up after {deadline_s:g} s "
            f"({variable('remote_deadline_ms')}): a nearer store, or a longer deadline"
        )
        return advice(name, found, remedy, **numbers)
    return ok(name, found, **numbers)


def _check_rights(settings: Settings, trial: Trial) -> Iterator[Check]:
    """A line for each right that is missing, and whether that matters with these settings."""
    refused = {step: error for step, error in trial.failed.items() if error.trouble == "refused"}
    name = "remote rights"
    if not refused and not trial.failed:
        yield ok(name, "these credentials may write, read, list and delete")
    for step, error in refused.items():
        if step == "write" and settings.remote_write:
            remedy = f"give it the right to write, or set {variable('remote_write')}=false to read only"
            yield fault(name, f"may not write: {error}", remedy)
        elif step == "list":
            yield fault(
                name, f"may not list: {error}", "give it the right to list: blocks of others are found so"
            )
        elif step == "delete" and settings.remote_collect:
            remedy = f"give it the right to delete, or set {variable('remote_collect')}=false and collect elsewhere"
            yield advice(name, f"may not delete: {error}", remedy)
        elif step == "touch":
            yield advice(name, f"may not touch: {error}", "blocks that are used may be collected as too old")
        elif step not in ("read", "measure"):
            yield ok(name, f"may not {step}, which these settings do not need")


def _check_clock(skew_s: float) -> Check:
    name, found = "remote clock", f"the store's clock differs from ours by {skew_s:+.1f} s"
    if abs(skew_s) > SKEW_S:
        remedy = "set this machine's clock: signed requests are refused where the difference is large"
        return advice(name, found, remedy, skew_seconds=skew_s)
    return ok(name, found, skew_seconds=skew_s)
