"""The manager as a process: its lock, its socket, its signals, and its end.

A *private* manager is started by an engine (`client.finder`) and ends when its last engine has gone; a *shared* one
is started by an operator and ends on SIGTERM, SIGINT or SIGHUP. Both drain: queued blocks are written to disk, bounded
in time.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvbm.client.finder import ERROR_SUFFIX, FROM_STDIN
from kvbm.client.whereabouts import announced
from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError, SettingsError
from kvbm.fleet.named import fleet_name
from kvbm.manager.admin_page import admin_page
from kvbm.manager.assembly import SpaceTable
from kvbm.manager.controller import controller
from kvbm.manager.event_stream import publishing
from kvbm.manager.garbage import collected_when_idle
from kvbm.manager.node_door import NodeDoor, node_tls
from kvbm.manager.probes import LIVE_PATH, READY_PATH, Probes
from kvbm.manager.scrapes import Scrapes
from kvbm.manager.server import Server
from kvbm.manager.traffic import Traffic
from kvbm.observe.exporter import MetricsServer, bind_nearby
from kvbm.observe.log import configure, start_line
from kvbm.observe.metrics import Metrics
from kvbm.runtime_dir import make_own_dir, make_runtime_dir, open_lock, replace_private
from kvbm.settings import Settings, variable, without_credentials
from kvbm.strict import record_swallowed
from kvbm.unix_sockets import listening_at, refuse_other_file

if TYPE_CHECKING:
    from kvbm.manager.fleet_side import FleetSide

log = logging.getLogger("kvbm.manager")

PRIVATE_GRACE_S = 0.2
PRIVATE_FIRST_ENGINE_S = 120.0
SOCKET_FIELD = variable("manager")
PORT_FIELD = variable("metrics_port")
GIL_SWITCH_S = 0.001
"""A thread that reads a journal gives the GIL back to the loop after so long, not after Python's 5 ms."""
METRICS_PORTS_MAX = 16
"""Ports that a private manager tries for its metrics: engines beside one another mostly ask for the same one."""
_BACKLOG = 128


def _tiers(settings: Settings) -> list[str]:
    """The tiers that keep blocks, as labels name them. Where disk is alone, host memory only passes blocks on."""
    on = {"host": settings.host_on, "disk": settings.disk_on, "remote": settings.beyond_on}
    return [name for name, there in on.items() if there]


def serve(
    settings: Settings,
    socket_path: str,
    namespaces: int = 1,
    private: bool = False,
    on_listening: Callable[[], None] = lambda: None,
    clock: Clock = monotonic,
    grace_s: float = PRIVATE_GRACE_S,
) -> None:
    """Serve until a signal, or, when private, until the last engine has been gone for `grace_s`.

    Raises SettingsError in one line when the socket or the metrics port cannot be had; a private manager takes another
    port, or does without. Tiers are made when the first engine names its namespace; a failure then is reported to that
    engine.
    """
    metrics = Metrics(_tiers(settings))
    traffic, scrapes = Traffic(metrics, settings, clock), Scrapes(metrics, clock)
    probes = Probes(settings, clock)
    if not settings.manager:
        make_runtime_dir(os.path.dirname(os.path.abspath(socket_path)))
    peer_uids = settings.trusted_peer_uids
    # A client that can connect is served: the socket comes when nothing else can fail. Each peer's user is checked.
    mode = 0o666 if peer_uids else 0o600
    with (
        contextlib.closing(scrapes),
        _scraped(settings, scrapes, probes, private) as metrics_port,
        admin_page(settings, os.path.abspath(socket_path), private) as start_page,
        controller(settings, os.path.abspath(socket_path)) as start_controller,
        publishing(settings, private) as publisher,
        _fleet(settings, clock) as fleet,
        listening_at(socket_path, SOCKET_FIELD, mode, _BACKLOG) as listener,
        announced(os.path.abspath(socket_path), settings.runtime_dir),
        contextlib.ExitStack() as undo,
    ):
        # Where nothing is published, engines need not say what blocks are.
        tiers = settings if publisher is not None else msgspec.structs.replace(settings, events_endpoint=None)
        reads = fleet.reads if fleet is not None else None
        make_spaces = partial(SpaceTable, tiers, namespaces, metrics, clock, peers=reads)
        server = Server(listener, make_spaces, traffic, clock, peer_uids, scrapes, publisher)
        if fleet is not None and (lending := fleet.lend(server.spaces, private)) is not None:
            server.lend(lending)
        signals = _Signals(server)
        events = publisher.endpoint if publisher is not None else None
        log.info("%s", _started(settings, socket_path, private, metrics_port, events))
        undo.enter_context(_node_door(settings, socket_path, private))
        if not private:  # an engine's own manager opens its tiers at once, and they say how they are
            undo.enter_context(_remote_trial(settings, clock))
        start_page()
        start_controller()
        on_listening()
        started_s, seen_engine = clock(), False
        sys.setswitchinterval(GIL_SWITCH_S)
        with collected_when_idle(clock) as turn_ended:
            while not signals.received:
                server.step()
                turn_ended(server.idle)
                probes.turn_ended(server.spaces)
                seen_engine = seen_engine or server.engine_count > 0
                # An engine that was refused does not start: no other one will come.
                patience_s = grace_s if seen_engine or server.refused_count else PRIVATE_FIRST_ENGINE_S
                idle_s = clock() - max(server.last_busy_s, started_s)
                if private and idle_s > patience_s and not server.engine_count:
                    break
        probes.stopping()
        if fleet is not None:
            server.stop_lending()
            fleet.stop_lending()
        traffic.summarize()
        server.close(keep=settings.disk_persist)
        log.info("stop role=manager pid=%d", os.getpid())


def _started(
    settings: Settings, socket_path: str, private: bool, metrics_port: int | None, events: str | None
) -> str:
    return start_line(
        "manager",
        pid=os.getpid(),
        socket=socket_path,
        private=private,
        host=_size(settings.host_bytes, settings.host_blocks),
        disk=_size(settings.disk_bytes, settings.disk_blocks),
        disk_dir=settings.disk_dir if settings.disk_on else None,
        remote=without_credentials(settings.remote) if settings.remote else settings.object_bucket,
        fleet=settings.fleet,
        metrics_port=metrics_port,
        events=events,
    )


@contextlib.contextmanager
def _fleet(settings: Settings, clock: Clock) -> Iterator[FleetSide | None]:
    """Our part in the fleet that the settings name, until the end; None without one. Raises SettingsError."""
    if not settings.fleet:
        yield None
        return
    from kvbm.manager.fleet_side import FleetSide  # who is in none needs none of it

    with contextlib.closing(FleetSide(settings, clock)) as fleet:
        yield fleet


def _remote_trial(settings: Settings, clock: Clock) -> contextlib.AbstractContextManager[None]:
    if not settings.remote_on:
        return contextlib.nullcontext()
    from kvbm.manager.remote_trial import remote_trial  # its packages are not everywhere, and take a while

    return remote_trial(settings, clock)


def _size(size_bytes: int | None, blocks: int | None) -> str | None:
    if blocks:
        return f"{blocks}blocks"
    return f"{size_bytes / 1e9:g}GB" if size_bytes else None


@contextlib.contextmanager
def _node_door(settings: Settings, socket_path: str, private: bool) -> Iterator[None]:
    """Let leaders on other nodes in, where the settings say so. A private manager does without where it cannot."""
    if settings.node_listen is None:
        yield
        return
    try:
        door = NodeDoor(
            variable("node_listen"),
            settings.node_listen,
            socket_path,
            node_tls(settings),
            fleet_name(settings),
            settings.fleet_plain,
        )
    except SettingsError as error:
        if not private:
            raise
        log.warning("no leader on another node is let in: %s", error)
        yield
        return
    with contextlib.closing(door):
        yield


@contextlib.contextmanager
def _scraped(settings: Settings, scrapes: Scrapes, probes: Probes, private: bool) -> Iterator[int | None]:
    """`/metrics`, and what an orchestrator asks, while the manager serves and ends; the port, or None without.

    A shared manager takes the port that its operator names, or fails. A private one takes another port, or none.
    """
    if not settings.metrics:
        yield None
        return
    page, host, port = scrapes.page, settings.metrics_host, settings.metrics_port
    beside = {LIVE_PATH: probes.live, READY_PATH: probes.ready}
    if private:
        exporter = bind_nearby(page, host, port, METRICS_PORTS_MAX, beside)
    else:
        exporter = MetricsServer(page, host, port, beside)
    if exporter is None:
        taken = f"{PORT_FIELD}={port} is in use, and so are the next {METRICS_PORTS_MAX - 1}"
        log.warning("%s: no metrics are served", taken)
        yield None
        return
    if exporter.port != port:
        log.warning("%s=%d is in use: metrics are at %s", PORT_FIELD, port, exporter.url)
    exporter.start()
    with contextlib.closing(exporter):
        yield exporter.port


class _Signals:
    """SIGTERM, SIGINT and SIGHUP end the loop at its next turn; a wake-up pipe makes that turn come at once."""

    def __init__(self, server: Server) -> None:
        self.received = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno())
        server.watch_descriptor(self._reader.fileno(), self._drain)
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # else it runs under nohup
            numbers.append(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.received = True

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing was signalled
            self._reader.recv(64)


def take_lock(socket_path: str) -> int:
    """The lock of a manager at `socket_path`, held until the descriptor closes; SettingsError when another has it.

    Raises SettingsError for a path with anything but a socket too, before a lock file lies beside it.
    """
    refuse_other_file(socket_path, "--socket")
    make_own_dir(os.path.dirname(os.path.abspath(socket_path)), SOCKET_FIELD)
    try:
        fd = open_lock(socket_path + ".lock")
    except OSError as error:
        accepted = f"a path beside which {socket_path}.lock can be opened ({error.strerror})"
        raise SettingsError("--socket", socket_path, accepted) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SettingsError("--socket", socket_path, "a path at which no other manager serves") from None
    return fd


def main(
    socket_path: str,
    lock_fd: int,
    settings_json: str,
    namespaces: int = 1,
    grace_s: float = PRIVATE_GRACE_S,
) -> int:
    """Entry point of a private one: `python -m kvbm.manager.process SOCKET LOCK_FD SETTINGS [NAMESPACES [GRACE_S]]`.

    An engine whose blocks have several sizes has a namespace for each. `-` stands for settings that come by stdin: a
    command line is no place for secrets.
    """
    # Leave the engine's process tree: vLLM kills all of it when it stops, and we have blocks to write by then.
    if os.fork():
        os._exit(0)
    directory = os.path.dirname(socket_path)
    try:
        make_runtime_dir(directory)
    except SettingsError as error:  # it changed since our engine looked at it: leave no file in it
        log.error("%s", error)  # noqa: TRY400 - one line, not a traceback
        return 2
    # An engine pins its ranks to cores; our I/O threads inherit that mask and would all share one core.
    with contextlib.suppress(OSError):  # the threads share the engine's cores then
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    os.set_inheritable(lock_fd, False)
    try:
        settings = msgspec.json.decode(settings_json, type=Settings)
        configure(settings.log_level)
        serve(settings, socket_path, namespaces=namespaces, private=True, grace_s=grace_s)
    except KvbmError as error:
        log.error("%s", error)  # noqa: TRY400 - one line, not a traceback
        _report_failure(socket_path, str(error))
        return 2
    except Exception as error:
        record_swallowed(error)
        log.exception("private manager failed")
        _report_failure(socket_path, f"private manager failed: {type(error).__name__}: {error}")
        return 2
    finally:
        # Removed while it is still held: opening the path from now on makes a new file.
        with contextlib.suppress(OSError):  # removed already
            os.unlink(socket_path + ".lock")
    return 0


def _report_failure(socket_path: str, reason: str) -> None:
    """Leave the reason, in one line, to the engine that started us (see `client.finder.ERROR_SUFFIX`)."""
    with contextlib.suppress(OSError):  # the directory takes no file: the engine reports a timeout
        replace_private(socket_path + ERROR_SUFFIX, " ".join(reason.split()).encode())


if __name__ == "__main__":
    more = [kind(word) for kind, word in zip((int, float), sys.argv[4:], strict=False)]
    said = sys.stdin.read() if sys.argv[3] == FROM_STDIN else sys.argv[3]
    sys.exit(main(sys.argv[1], int(sys.argv[2]), said, *more))
