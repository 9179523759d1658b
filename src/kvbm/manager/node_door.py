"""The door for leaders on other nodes, of engines with ranks on this one: a session comes over TCP, and goes on at the
manager's own socket (`fleet.pump`).

Only leaders are let in. A worker maps memory and must be here; an operator's commands are for this machine's users.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time

from kvbm.clock import Clock, monotonic
from kvbm.errors import KvbmError, ProtocolError
from kvbm.fleet.listening import listening
from kvbm.fleet.named import certificates, fleet_name
from kvbm.fleet.pump import Pump, keep_watch
from kvbm.fleet.tls import certified, lending_context
from kvbm.framing import LENGTH_BYTES
from kvbm.protocol import Hello
from kvbm.protocol_decoding import decode_to_manager
from kvbm.settings import Settings

log = logging.getLogger("kvbm.manager")

LEADERS_MAX = 64
HELLO_S = 5.0
HELLO_BYTES_MAX = 1 << 16
HARM = "lease and reserve blocks"
"""What a client without a certificate could do."""
END_S = 0.4
"""The door and all sessions that came this way have so long to end, together."""


def node_tls(settings: Settings) -> ssl.SSLContext | None:
    """What leaders on other nodes are verified with; None without certificates. Raises SettingsError."""
    fleet_name(settings)
    files = certificates(settings)
    return lending_context(files) if files is not None else None


class NodeDoor:
    """Lets leaders in from its own threads until `close`.

    `listen` is `host:port`; port 0 takes a free one, which `port` tells. With `tls` a leader shows a certificate of the
    `fleet`; without, the address must be a private one, unless `plain`. Raises SettingsError, which names `field`.
    """

    def __init__(
        self,
        field: str,
        listen: str,
        socket_path: str,
        tls: ssl.SSLContext | None = None,
        fleet: str = "",
        plain: bool = False,
        clock: Clock = monotonic,
    ) -> None:
        self._clock = clock
        self._socket_path, self._tls, self._fleet = socket_path, tls, fleet
        self._listener = listening(field, listen, plain or tls is not None, HARM)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._pumps: dict[threading.Thread, Pump | None] = {}
        self._ended = False
        self._ours, self._theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvbm-node-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let nobody in any more, and end all sessions that came this way."""
        self._ended = True
        self._ours.close()
        end_s = time.monotonic() + END_S
        self._thread.join(END_S)
        self._listener.close()
        with self._lock:
            pumps = dict(self._pumps)
        for pump in pumps.values():
            if pump is not None:
                pump.stop()
        for thread in pumps:
            thread.join(max(0.0, end_s - time.monotonic()))
        self._theirs.close()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._theirs, select.POLLIN)
        while self._theirs.fileno() not in dict(poller.poll()):
            try:
                accepted, address = self._listener.accept()
            except OSError:  # it has gone again, or no descriptor is free: the next turn tries again
                select.poll().poll(50)
                continue
            thread = threading.Thread(
                target=self._serve, args=(accepted, str(address[0])), name="kvbm-leader", daemon=True
            )
            with self._lock:
                full = len(self._pumps) >= LEADERS_MAX
                if not full:
                    self._pumps[thread] = None
            if full:
                log.warning("a leader at %s is not let in: there are %d", address[0], LEADERS_MAX)
                accepted.close()
            else:
                thread.start()

    def _serve(self, far: socket.socket, host: str) -> None:
        try:
            pump = self._let_in(far)
            with self._lock:
                self._pumps[threading.current_thread()] = pump
            if self._ended:
                pump.stop()
            pump.run()
        except (OSError, ssl.SSLError, KvbmError) as error:
            log.warning("a connection from %s is not let in: %s", host, " ".join(str(error).split()))
        finally:
            with self._lock:
                self._pumps.pop(threading.current_thread(), None)

    def _let_in(self, far: socket.socket) -> Pump:
        """The pump of a leader's session. Raises OSError, SSLError and KvbmError."""
        near = None
        try:
            keep_watch(far)
            far.settimeout(HELLO_S)
            if self._tls is not None:
                far = self._tls.wrap_socket(far, server_side=True)
                certified(far, self._fleet)
            hello = _first_frame(far, self._clock() + HELLO_S, self._clock)
            near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            near.connect(self._socket_path)
            near.sendall(hello)
            return Pump(near, far)
        except BaseException:
            far.close()
            if near is not None:
                near.close()
            raise


def _first_frame(far: socket.socket, until_s: float, clock: Clock) -> bytes:
    """The bytes of a leader's Hello. Raises OSError, and ProtocolError for anything else."""
    head = _exactly(far, LENGTH_BYTES, until_s, clock)
    length = int.from_bytes(head, "little")
    if length > HELLO_BYTES_MAX:
        raise ProtocolError(f"its first message has {length} bytes")
    body = _exactly(far, length, until_s, clock)
    message = decode_to_manager(body)
    if not isinstance(message, Hello) or message.role != "leader":
        raise ProtocolError("it is no leader; others connect on this machine")
    return head + body


def _exactly(far: socket.socket, count: int, until_s: float, clock: Clock) -> bytes:
    data = b""
    while len(data) < count:
        far.settimeout(max(0.001, until_s - clock()))  # in all, not for each byte
        part = far.recv(count - len(data))
        if not part:
            raise ProtocolError("it closed before its first message")
        data += part
    return data
