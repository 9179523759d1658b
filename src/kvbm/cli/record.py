"""`kvbm record`: write the requests to a running manager down, as a trace for `kvbm simulate` and `kvbm plan`."""

from __future__ import annotations

import gzip
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, cast

import typer
from rich.console import Console

from kvbm.cli.managers import settings_for
from kvbm.client.admin import Admin, choose_manager
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError, ManagerUnavailable, SettingsError
from kvbm.protocol import Follow
from kvbm.sim.traces.recorder import Recorder

_LOOK_S = 0.5
FLUSH_S = 1.0

app = typer.Typer()


def follow(
    admin: Admin,
    recorder: Recorder,
    go_on: Callable[[], bool],
    on_progress: Callable[[], None],
    clock: Clock = monotonic,
) -> str:
    """Record until `go_on` is False (called twice a second). Returns why it ended before that, or an empty text.

    The file is flushed each second. Raises OSError where it cannot be written.
    """
    try:
        admin.tell(Follow())
        going, flushed_s = True, clock()
        while going:
            # Called first: messages that arrived before the end are still recorded.
            going = go_on()
            for message in admin.hear(_LOOK_S if going else 0.0):
                recorder.receive(message)
            if clock() - flushed_s >= FLUSH_S:
                recorder.flush()
                flushed_s = clock()
            on_progress()
    except ManagerUnavailable as error:
        return str(error)
    return ""


@app.command()
def record(
    file: Annotated[
        Path, typer.Argument(help="The trace to write; compressed if it ends in .gz.", metavar="FILE")
    ],
    manager: Annotated[
        str,
        typer.Option(help="Socket of the manager; the only one that runs when left out.", metavar="SOCKET"),
    ] = "",
    seconds: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="End after this long; 0 is until Ctrl-C.")
    ] = 0.0,
    requests: Annotated[
        int, typer.Option(min=0, metavar="N", help="End after so many requests; 0 is no end.")
    ] = 0,
    namespace: Annotated[
        str,
        typer.Option(
            metavar="DIGITS", help="Record this namespace (its first digits); the first seen when left out."
        ),
    ] = "",
) -> None:
    """Record the requests to a running manager: hashes, lengths and times, never a token.

    Ctrl-C, SIGTERM and a closed terminal end it. The file is flushed each second: a recording that is killed, or whose
    disk is full, can be read up to there.

    \b
      kvbm record monday.jsonl.gz --seconds 3600
      kvbm simulate monday.jsonl.gz --policy gittins,lru --host 1%,5%,20%
    """
    namespace = namespace.lower()
    if namespace.strip("0123456789abcdef"):
        raise SettingsError(
            "--namespace", namespace, "the first hex digits of a namespace (kvbm inspect namespaces)"
        )
    settings = settings_for(manager)
    console = Console(stderr=True)
    socket_path = choose_manager(settings)
    with (
        _writing(file),
        Admin(socket_path, settings) as admin,
        _create(file) as opened,
        _stop_requested() as stopped,
    ):
        recorder = Recorder(opened, namespace)
        end_s = time.monotonic() + seconds if seconds else float("inf")
        try:
            with console.status(f"recording {socket_path} …") as status:
                why = follow(
                    admin,
                    recorder,
                    lambda: (
                        not stopped()
                        and time.monotonic() < end_s
                        and (not requests or recorder.written < requests)
                    ),
                    lambda: status.update(
                        f"{recorder.written} requests of {recorder.model or '…'}; Ctrl-C ends"
                    ),
                )
        finally:
            recorder.close()
    console.print(f"{recorder.written} requests written to {file}" + (f" ({why})" if why else ""))
    if recorder.others:
        console.print(f"{recorder.others} look-ups of other namespaces were left out (--namespace chooses)")


@contextmanager
def _stop_requested() -> Iterator[Callable[[], bool]]:
    """Gives a function: has a signal asked the process to end? No signal may cut a compressed file short."""
    received: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else it runs under nohup
        numbers.append(signal.SIGHUP)
    before = [signal.signal(number, lambda number, frame: received.append(number)) for number in numbers]
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _writing(file: Path) -> Iterator[None]:
    """Raises KvbmError in place of an OSError, which is of the file alone: errors of the manager are KvbmErrors."""
    try:
        yield
    except OSError as error:
        raise KvbmError(
            f"{file}: cannot be written ({error.strerror}): it ends before, and can be read up to there"
        ) from None


def _create(file: Path) -> IO[bytes]:
    try:
        return cast(IO[bytes], gzip.open(file, "wb") if file.suffix == ".gz" else file.open("wb"))
    except OSError as error:
        raise SettingsError("FILE", file, f"a file that can be written ({error.strerror})") from None
