"""Checks of the fleet that the settings name: certificates, the address to lend at, the list of nodes, and the nodes.

All that is asked over the network is asked at the same time, and each answer has a deadline.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvbm.cli.doctor_check import Check, advice, fault, ok
from kvbm.clock import monotonic
from kvbm.errors import KvbmError, ProtocolError, SettingsError
from kvbm.fleet.directory import Peer
from kvbm.fleet.etcd import NOT_REACHED_YET, open_etcd_directory
from kvbm.fleet.listening import listening
from kvbm.fleet.named import certificates, fleet_name, node_name
from kvbm.fleet.static import StaticDirectory
from kvbm.fleet.tls import CERTIFICATES_PAGE, certified, lending_context, reading_context
from kvbm.layout import BlockLayout
from kvbm.manager.peer_server import HARM
from kvbm.settings import Settings, variable
from kvbm.tiers.peers.connecting import connect, greeting
from kvbm.tiers.peers.options import PeerOptions
from kvbm.tiers.peers.wire import NOT_SERVED, FromLender, Incoming, Refusal, framed, from_lender, one_line

ANSWER_S = 3.0
TRIAL_S = 8.0
"""No answer is waited for longer, with the time that a name takes to be found."""
SOON_DAYS = 30
_DAY_S = 86400.0
_NO_BLOCKS = bytes(32)
"""The fingerprint of no namespace: whoever says that it serves none of it is a node of our fleet."""
_LAYOUT = BlockLayout(block_tokens=1, shard_bytes=1)


def check_fleet(settings: Settings, wall: Callable[[], float], manager_runs: bool) -> Iterator[Check]:
    """All checks of a fleet. `wall` tells the time of day, s; `manager_runs`: one may have the address already."""
    if not settings.fleet and not settings.fleet_certs:
        yield ok("fleet", f"off in these settings; {variable('fleet')} turns it on")
        return
    tls: ssl.SSLContext | None = None
    if settings.fleet_certs:
        check = _check_certificates(settings, wall)
        yield check
        if check.state == "fault":
            return
        files = certificates(settings)
        assert files is not None
        tls = reading_context(files)
    if not settings.fleet:
        return
    yield _check_listen(settings, tls is not None, manager_runs)
    peers: list[Peer] = []
    yield from _check_directory(settings, peers)
    ours = settings.fleet_address or settings.fleet_listen
    others = [peer for peer in peers if peer.address != ours and peer.node != node_name(settings)]
    if others:
        yield _check_nodes(settings, others, tls)


def _check_certificates(settings: Settings, wall: Callable[[], float]) -> Check:
    """This node's certificate, shown to itself as it would be to another node."""
    name, remedy = "fleet certificates", f"the manager reads from no node: mend {variable('fleet_certs')}"
    try:
        fleet, node = fleet_name(settings), node_name(settings)
        files = certificates(settings)
        assert files is not None
        shown, until = shown_to_itself(lending_context(files), reading_context(files), fleet)
    except (OSError, KvbmError) as error:
        return fault(name, one_line(error), remedy)
    if shown != node:
        return fault(name, f"{files.certificate} is of node {shown!r}, and this is {node!r}", remedy)
    left_days = (ssl.cert_time_to_seconds(until) - wall()) / _DAY_S
    found = f"node {node!r} of fleet {fleet!r}, until {until}"
    if left_days < SOON_DAYS:
        renew = f"renew it ({CERTIFICATES_PAGE})"
        return advice(name, f"{found}: {left_days:.0f} days", renew, left_days=left_days)
    return ok(name, found, left_days=left_days)


def shown_to_itself(lends: ssl.SSLContext, reads: ssl.SSLContext, fleet: str) -> tuple[str, str]:
    """The node that the certificate names, and until when it and its authority are good. Raises OSError and KvbmError
    where they are not."""
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            end.setblocking(False)
        ends = [
            reads.wrap_socket(near, do_handshake_on_connect=False),
            lends.wrap_socket(far, server_side=True, do_handshake_on_connect=False),
        ]
        try:
            left = list(ends)
            while left:
                for each in list(left):
                    try:
                        each.do_handshake()
                        left.remove(each)
                    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        pass  # the other end's turn
            identity = certified(ends[0], fleet)
            own = str((ends[0].getpeercert() or {})["notAfter"])
            authorities = [str(each["notAfter"]) for each in reads.get_ca_certs()]
            # Of several authorities the last one to end counts: one takes over from another. None is listed where the
            # node's certificate is trusted by itself.
            last = max(authorities, key=ssl.cert_time_to_seconds, default=own)
            return identity.node, min(own, last, key=ssl.cert_time_to_seconds)
        finally:
            for each in ends:
                each.close()


def _check_listen(settings: Settings, certified_ends: bool, manager_runs: bool) -> Check:
    name, field, listen = "fleet address", variable("fleet_listen"), settings.fleet_listen
    if not listen:
        return advice(name, f"{field} is not set: this node reads and lends nothing", f"set {field} to lend")
    try:
        listening(field, listen, certified_ends or settings.fleet_plain, HARM).close()
    except SettingsError as error:
        if manager_runs and os.strerror(errno.EADDRINUSE) in str(error):
            return ok(name, f"{listen} is in use, and a manager runs")
        return fault(name, str(error), "the manager does not start")
    return ok(name, f"{listen} is free")


def _check_directory(settings: Settings, peers: list[Peer]) -> Iterator[Check]:
    """What lists the nodes; those that it lists are added to `peers`."""
    name = "fleet directory"
    if bool(settings.fleet_peers) == bool(settings.fleet_etcd):
        accepted = f"one of {variable('fleet_peers')} and {variable('fleet_etcd')}"
        yield fault(name, f"a fleet needs {accepted}", "the manager does not start")
        return
    try:
        if settings.fleet_peers:
            directory = StaticDirectory(settings.fleet_peers, variable("fleet_peers"))
            peers += directory.peers()
            yield ok(name, directory.place)
            return
        yield from _check_etcd(settings, peers)
    except SettingsError as error:
        yield fault(name, str(error), "the manager does not start")


def _check_etcd(settings: Settings, peers: list[Peer]) -> Iterator[Check]:
    """Each endpoint by itself: a manager asks the next one where one is away. Raises SettingsError."""
    assert settings.fleet
    endpoints = [part.strip() for part in (settings.fleet_etcd or "").split(",") if part.strip()]
    directories = [open_etcd_directory([each], settings.fleet, None, monotonic) for each in endpoints]
    try:
        end_s = monotonic() + TRIAL_S
        while any(each.fault == NOT_REACHED_YET for each in directories) and monotonic() < end_s:
            time.sleep(0.02)
        answering = [each for each in directories if not each.fault]
        for each in directories:
            if not each.fault:
                yield ok("fleet directory", f"{each.place} answers: {len(each.peers())} nodes")
            elif answering:
                yield advice("fleet directory", f"{each.place}: {each.fault}", "others are asked instead")
            else:
                remedy = f"no node is found: start etcd, or mend {variable('fleet_etcd')}"
                yield fault("fleet directory", f"{each.place}: {each.fault}", remedy)
        peers += answering[0].peers() if answering else ()
    finally:
        for each in directories:
            each.close()


def _check_nodes(settings: Settings, others: Sequence[Peer], tls: ssl.SSLContext | None) -> Check:
    assert settings.fleet
    options = PeerOptions(fleet=settings.fleet, node=node_name(settings), connect_timeout_s=ANSWER_S)
    troubles: dict[Peer, str] = {}

    def ask(peer: Peer) -> None:
        troubles[peer] = _trouble(peer, options, tls)

    threads = [threading.Thread(target=ask, args=(peer,), daemon=True) for peer in others]
    for thread in threads:
        thread.start()
    end_s = monotonic() + TRIAL_S
    for thread in threads:
        thread.join(max(0.0, end_s - monotonic()))
    silent = {peer: trouble for peer in others if (trouble := troubles.get(peer, "no answer in time"))}
    numbers = {"nodes": len(others), "nodes_answering": len(others) - len(silent)}
    found = f"{len(others) - len(silent)} of {len(others)} other nodes answer"
    if not silent:
        return ok("fleet nodes", found, **numbers)
    found += ": " + ", ".join(f"{peer.address}: {trouble}" for peer, trouble in list(silent.items())[:3])
    make = fault if len(silent) == len(others) else advice
    return make("fleet nodes", found, "their blocks are computed instead: start or mend them", **numbers)


def _trouble(peer: Peer, options: PeerOptions, tls: ssl.SSLContext | None) -> str:
    """Why a node does not answer as one of our fleet; empty where it does."""
    try:
        stream, _ = connect(peer, options, tls)
        try:
            end_s = monotonic() + ANSWER_S
            incoming: Incoming[FromLender] = Incoming(stream, from_lender)
            stream.send(memoryview(framed(greeting(options, _NO_BLOCKS, _LAYOUT, 1))))
            while (answer := incoming.next()) is None:
                left_s = end_s - monotonic()
                if left_s <= 0:
                    raise ProtocolError(f"nothing was heard for {ANSWER_S:g} s")
                poller = select.poll()
                poller.register(stream.connection, select.POLLIN)
                poller.poll(min(left_s, 0.1) * 1000)
        finally:
            stream.close()
    except (OSError, ValueError, KvbmError) as error:
        return one_line(error)
    return answer.line if isinstance(answer, Refusal) and NOT_SERVED not in answer.line else ""
